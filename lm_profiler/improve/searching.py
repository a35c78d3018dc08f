"""Drive the search: run the cells that answer its questions, and write the record after each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from lm_profiler.analysis.improve.search import improve
from lm_profiler.analysis.improve.trials import Candidate, Check, Checked, Improvement, Question, Ran
from lm_profiler.analysis.remedies.remedy import UNKNOWN
from lm_profiler.improve.cells import Cells, Interrupted
from lm_profiler.improve.ran import NoSteps, RanCell, other_step, ran
from lm_profiler.improve.report_builder import Account
from lm_profiler.improve.tolerance import SEEDS, distances, judge, loss_tolerance, trains_the_same
from lm_profiler.record.improve import IMPROVE_FILE, Ended, ImproveRecord
from lm_profiler.record.process_spread import known_spread
from lm_profiler.record.run import RunRecord


def search(
    cells: Cells,
    candidates: Sequence[Candidate],
    account: Account,
    first: RunRecord,
    tell: Callable[[ImproveRecord], None],
) -> ImproveRecord:
    """Try ``candidates`` within the rest of the budget and return the record, which is also written to the folder.

    Args:
        cells: Runs the cells.
        candidates: The changes to try, in any order.
        account: The unchanging parts of the record.
        first: The first setting's own run, to whose samples all steps are scaled.
        tell: Gets the record after each answer.
    """
    left_s, known = account.request.budget_s - account.look_s, known_spread(first.environment)
    asking = improve(candidates, left_s, account.request.accept_numerics, known)
    state = Improvement()

    def write(ended: Ended) -> ImproveRecord:
        record = account.record(state, ended, cells.count, cells.shared)
        record.write(cells.folder.path / IMPROVE_FILE)
        tell(record)
        return record

    asked = next(asking)
    try:
        while True:
            state = asked.search
            write("unfinished")  # before the next run, which may be killed
            cells.left_s = account.request.budget_s - account.look_s - state.spent_s
            asked = asking.send(_answer(cells, asked, first, account.request.global_batch))
    except StopIteration as done:
        state = done.value
        return write(state.ended or "done")
    except Interrupted as why:
        if why.args:
            account = replace(account, notes=[*account.notes, f"interrupted: {why}"])
        return write("interrupted")


def _loss_from_first(cells: Cells, b: RunRecord) -> float:
    """Return how far b's loss is from the first setting's; 0 where that is unknown.

    Each winner is compared with the one before it, so small distances could add up unseen. The first setting's losses
    are known already: the first winner was compared with them.
    """
    with suppress(NoSteps):
        a = cells.check({}).record
        return 0.0 if other_step(a, b) is not None else distances(a.numerics, b.numerics)[0] or 0.0
    return 0.0


def _tolerance_of_seeds(cells: Cells) -> tuple[float, float]:
    """Return by what share the first setting's losses differ between seeds, and the seconds that the runs took.

    These runs are made only for the first change whose loss is off; later changes reuse them.
    """
    runs, took_s = [cells.check({})], 0.0
    for seed in SEEDS:
        runs.append(cells.under(seed))
        took_s += runs[-1].took_s
        cells.left_s -= runs[-1].took_s
    return loss_tolerance([None if run.entry.record is None else run.entry.record.numerics for run in runs]), took_s


def _answer(cells: Cells, asked: Question, first: RunRecord, global_batch: str) -> Ran | Checked:
    if not isinstance(asked, Check):
        return ran(cells.time(asked.options, asked.number), first)
    sides = list[RanCell]()
    for options in (asked.a_options, asked.b_options):
        sides.append(cells.check(options))
        cells.left_s -= sides[-1].took_s
    took_s = sum(side.took_s for side in sides)
    if any(side.cut for side in sides):
        return Checked(None, took_s, why="the budget ended before its numbers were known")
    try:
        a, b = (side.record for side in sides)
    except NoSteps as error:
        return Checked(None, took_s, why=f"its numbers are unknown: {error}")
    # The search asks for ``asked.b_options`` on top of the winners so far (``asked.a_options``).
    loss, gradients = distances(a.numerics, b.numerics)
    other = other_step(a, b)
    if asked.a_options and loss is not None:
        loss = max(loss, _loss_from_first(cells, b))
    rest = (gradients, asked.candidate.may_change, other, global_batch == "free")
    within, why = judge(loss, *rest)
    if within is False and judge(0.0, *rest)[0] is not False:  # only its loss is off
        tolerance, more_s = _tolerance_of_seeds(cells)
        took_s += more_s
        within, why = judge(loss, *rest, tolerance)
    if asked.candidate.may_change == UNKNOWN and within is not False:
        within, unlike = trains_the_same(a, b, other is None)
        why = unlike or why
    return Checked(within, took_s, loss, gradients, why)

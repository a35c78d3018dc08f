"""The verb ``improve``: try changes that may make a training step faster, and prove which do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import yaml
from rich.console import Console

from lm_profiler.analysis.compare.ratio import MARGIN
from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.cli.call import Call
from lm_profiler.cli.endings import interrupting
from lm_profiler.cli.options import read_config
from lm_profiler.cli.verbs.shared import AnswerFormat, show, write_json
from lm_profiler.cli.verbs.sweep import cell_processes, check_calls
from lm_profiler.improve.candidates import (
    ImproveRequest,
    open_candidates,
    refuse_small,
    requested_candidates,
)
from lm_profiler.improve.cells import (
    CellCalls,
    Cells,
    FinishedCell,
    Interrupted,
    NoSteps,
)
from lm_profiler.improve.search import FEWEST_RUNS
from lm_profiler.improve.searching import Account, ImproveDisplay, Runner, search
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL, config_file
from lm_profiler.record.files import write_whole
from lm_profiler.record.improve_record import (
    IMPROVE_FILE,
    IMPROVED_CONFIG,
    Ended,
    ImproveRecord,
    read_improve,
)
from lm_profiler.record.run_record import RecordError, RunRecord
from lm_profiler.record.sweep_files import Cell, SweepPlan
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.sweep.sweep_folder import SweepFolder, is_done
from lm_profiler.sweep.sweep_plan import CONFIGS, made_plan
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler improve --config small_bf16
  lm_profiler improve --config demo --try.data.num_workers 0,2 --budget 2m"""

_UNKNOWN_PREFETCH = (
    "the number of prefetched batches is unknown, because the loader is not a single DataLoader of torch: "
    "a gain may come from batches that were prepared before the measured steps"
)
_NO_TIME = "the first setting's run did not end within the budget, and no change can be judged without it"
# The time limit of a run: this multiple of the first setting's run, or this share of the budget, whichever is larger.
# So a run that hangs does not use up the budget, which has to suffice for two pairs of runs.
_LIMIT_IN_RUNS, _LIMIT_IN_BUDGETS = 2.0, 1 / 4
# how a search ended → the exit code; any other end is OK
_EXIT_CODES = {"interrupted": INTERRUPTED, "failed": FAILED}


def run(request: ImproveRequest) -> int:
    """Improve a run and return the exit code: 1 if the first setting does not run."""
    plan, calls = _plan(request)
    with SweepFolder(request.folder, plan, grows=True) as folder:
        return _run(request, folder, calls)


def _plan(request: ImproveRequest) -> tuple[SweepPlan, CellCalls]:
    """Return the plan, which grows with each requested cell, and the factory of its cells."""
    configs: dict[str, str] = {}
    call = ["fit"]
    if request.config is not None:
        name = f"{Path(config_file(request.config)).stem}.yaml"
        _, configs[name] = read_config(request.config)
        call.append(f"--config={request.folder / CONFIGS / name}")
    calls = CellCalls(request.folder, [*call, *request.options])
    texts = list(configs.values())
    plan = made_plan(
        request.name, request.command, texts, configs, cells=[calls.baseline()]
    )
    return plan, calls


def _run(request: ImproveRequest, folder: SweepFolder, calls: CellCalls) -> int:
    """Run the first setting, search with the rest of the budget, print the result and return the exit code."""
    console = Console(stderr=request.format == "json")
    display = ImproveDisplay(folder.path, request.budget_s, console)
    with (
        cell_processes(folder.lock) as processes,
        Runner(folder, processes, display) as runner,
    ):
        cells = Cells(folder, runner)
        # Calls are checked before anything runs. A cell that is done has passed this check.
        unchecked_cells = []
        for cell in _written_cells(request, calls):
            if not is_done(folder.path, cell):
                unchecked_cells.append(cell)
        check_calls(processes, unchecked_cells)
        # Only now: a wrong call must leave no folder behind.
        if folder.is_new:
            folder.begin()
        with display.live_line(), interrupting(runner.interrupt):
            cells.left_s = request.budget_s
            try:
                baseline = cells.result(calls.baseline())
                enough_s = baseline.took_s * (1 + FEWEST_RUNS)
                if request.budget_s < enough_s:
                    print_message(
                        f"budget: may be too short to try a change; --budget={math.ceil(enough_s)}s is enough for one"
                    )
                cells.limit_s = max(
                    _LIMIT_IN_BUDGETS * request.budget_s,
                    _LIMIT_IN_RUNS * baseline.took_s,
                )
                record = _search(request, cells, calls, baseline, display)
            except Interrupted as error:  # during the run of the first setting
                reason = f": {error}" if error.args else ""
                print_message(
                    f"interrupted{reason}; run the same command again to resume"
                )
                return INTERRUPTED
    return _print_end(folder, record, calls.call, request.format)


def _written_cells(request: ImproveRequest, calls: CellCalls) -> list[Cell]:
    """Return the cells whose options the user wrote: the first setting, and each value of ``--try``."""
    cells = [calls.baseline()]
    for name, texts in request.try_.items():
        cells += [calls.time({name: text}, number=0) for text in texts]
    return cells


def _search(
    request: ImproveRequest,
    cells: Cells,
    calls: CellCalls,
    baseline: FinishedCell,
    display: ImproveDisplay,
) -> ImproveRecord:
    """Try the changes that the first setting's run suggests; return the record of the search."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(RecordError):
        # if an earlier call has started the search
        started = read_improve(cells.folder.path).started
    account = Account(request, started, baseline.took_s)
    try:
        first_record = baseline.record
    except NoSteps as error:
        return _record_failure(cells, account, baseline, error)

    notes = []
    for line in contention_lines(first_record.contention):
        notes.append(f"in the first setting's run, {line}")
    if first_record.loader is None or first_record.loader.used_up is None:
        notes.append(_UNKNOWN_PREFETCH)
    changes = _changes_to_try(request, baseline, first_record)
    refused = [change for change in changes if change.refused]
    to_try = [change for change in changes if not change.refused]
    account = replace(account, refused=refused, notes=notes)
    calls = replace(calls, first_record=first_record)
    return search(cells, calls, to_try, account, display.show)


def _record_failure(
    cells: Cells, account: Account, baseline: FinishedCell, error: NoSteps
) -> ImproveRecord:
    """Write and return the record of a search whose first run measured no steps; UsageError if its call was wrong."""
    outcome = baseline.outcome
    if outcome.exit_code == WRONG_CALL and outcome.status == "failed":
        cells.folder.forget()
        raise UsageError(
            str(error).removeprefix(f"failed: exit code {WRONG_CALL}: ")
        ) from None
    end: Ended = "failed"
    note = str(error)
    if baseline.was_cut:
        end = "budget"
        note = _NO_TIME
    account = replace(account, notes=[note])
    record = account.record(searcher=None, end=end, runs=1)
    record.write(cells.folder.path / IMPROVE_FILE)
    return record


def _changes_to_try(
    request: ImproveRequest, baseline: FinishedCell, baseline_run: RunRecord
) -> list[Candidate]:
    """Return the changes of ``--try``, then those that the baseline run suggests.

    Changes with ``refused`` set cannot be tried, or are not worth it; they are in the list so that the reason is
    reported. Suggestions for options that ``--try`` names are left out.
    """
    suggested = open_candidates(
        baseline.entry, free_batch=request.global_batch == "free"
    )
    requested = requested_candidates(request.try_, suggested, baseline.entry.option)
    if request.only:
        return requested
    requested_options: set[str] = set()
    for change in requested:
        requested_options |= change.options.keys() & request.try_.keys()
    other_suggestions: list[Candidate] = []
    for change in suggested:
        changes_requested_option = not requested_options.isdisjoint(change.options)
        if change.refused or not changes_requested_option:
            other_suggestions.append(change)
    step_s = baseline_run.time["step"].mean
    return [*requested, *refuse_small(other_suggestions, step_s, MARGIN)]


def _print_end(
    folder: SweepFolder,
    record: ImproveRecord,
    call: Sequence[str],
    format_name: AnswerFormat = "terminal",
) -> int:
    """Print the result, write the config of the best setting, and return the exit code."""
    improved = folder.path / IMPROVED_CONFIG
    if record.options:
        write_whole(improved, config_text(record, call))
    else:
        improved.unlink(missing_ok=True)  # an earlier call may have written this file
    if format_name == "json":
        write_json(record)
    else:
        show(improve_table(record, folder.path))
        print(f"written to {folder.path}")
    return _EXIT_CODES.get(record.ended, OK)


def config_text(record: ImproveRecord, call: Sequence[str]) -> str:
    """Return YAML for ``fit --config``: the options of the first call with the accepted changes.

    A comment above the options has the command of the search, and the changes.
    """
    changes = [f"--{name}={text}" for name, text in record.options.items()]
    heading = [f"{record.command} changed:", *changes]
    # A command may have several lines.
    comment_lines = "\n".join(heading).splitlines()
    comment = "".join(f"# {line}\n" for line in comment_lines)
    content = Call([*call, *changes]).content
    options = yaml.safe_dump(content, sort_keys=False)
    return comment + options


VERBS = {"improve": (ImproveRequest, EXAMPLES, run)}

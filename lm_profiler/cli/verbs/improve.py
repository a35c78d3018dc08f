"""The verb ``improve``: try what would make a training step faster, and prove it."""

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
from lm_profiler.cli.verbs.sweep import SERVER, check_calls
from lm_profiler.improve.candidates import ImproveRequest, open_candidates, refuse_small, requested_candidates
from lm_profiler.improve.cells import CellCalls, Cells, FinishedCell, Interrupted, NoSteps
from lm_profiler.improve.search import FEWEST_RUNS
from lm_profiler.improve.searching import Account, ImproveDisplay, Runner, search
from lm_profiler.measure.boundary import say
from lm_profiler.processes.fork_server import CellServer, ServerError
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL, config_file
from lm_profiler.record.files import write_whole
from lm_profiler.record.improve_record import IMPROVE_FILE, IMPROVED_CONFIG, ImproveRecord, read_improve
from lm_profiler.record.run_record import RecordError, RunRecord
from lm_profiler.record.sweep_files import SweepPlan
from lm_profiler.report.run.improve_table import improve_table
from lm_profiler.sweep.sweep_folder import SweepFolder, is_done
from lm_profiler.sweep.sweep_plan import CONFIGS, made_plan
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler improve --config small_bf16
  lm_profiler improve --config demo --try.data.num_workers 0,2 --budget 2m"""

_AHEAD = (
    "how many batches are made ahead is not known, for the loader is not one DataLoader of torch: "
    "a gain may come from batches that were made before the measured steps"
)
_NO_TIME = "the first setting's own run did not end within the budget, and no change can be judged without it"
# A run's time limit: the larger of this multiple of the first setting's own run, which includes the trace, and this
# share of the budget. A run that hangs must not use up the budget, and a comparison needs two pairs of runs.
_LONGEST_RUN, _LONGEST_SHARE = 2.0, 1 / 4


def run(request: ImproveRequest) -> int:
    """Improve a run and return the exit code: 1 where the first setting does not run."""
    plan, calls = _plan(request)
    try:
        with SweepFolder(request.folder, plan, grows=True) as folder:
            return _run(request, folder, calls)
    except ServerError as error:
        say(str(error))
        return FAILED


def _plan(request: ImproveRequest) -> tuple[SweepPlan, CellCalls]:
    """Return the plan, which grows by each cell that is asked for, and the calls of its cells."""
    configs, call = {}, ["fit"]
    if request.config is not None:
        name = f"{Path(config_file(request.config)).stem}.yaml"
        configs[name] = read_config(request.config)[1]
        call.append(f"--config={request.folder / CONFIGS / name}")
    calls = CellCalls(request.folder, [*call, *request.options])
    return made_plan(request.name, request.command, [*configs.values()], configs, [calls.baseline()]), calls


def _run(request: ImproveRequest, folder: SweepFolder, calls: CellCalls) -> int:
    display = ImproveDisplay(folder.path, request.budget_s, Console(stderr=request.format == "json"))
    # The first setting and each value of ``--try``: their calls are checked before anything runs.
    asked = [{name: text} for name, texts in request.try_.items() for text in texts]
    written = [calls.baseline(), *(calls.time(options, 0) for options in asked)]
    with CellServer(SERVER, folder.lock) as server, Runner(folder, server, display) as runner:
        cells = Cells(folder, runner)
        check_calls(server, [cell for cell in written if not is_done(folder.path, cell)])
        # Only now: a wrong call must leave no folder behind.
        if folder.is_new:
            folder.begin()
        with display.shown(), interrupting(runner.interrupt):
            cells.left_s = request.budget_s
            try:
                baseline = cells.result(calls.baseline())
                least_s = baseline.took_s * (1 + FEWEST_RUNS)
                if request.budget_s < least_s:
                    say(f"budget: may be too short to try anything; --budget={math.ceil(least_s)}s is enough for one")
                cells.limit_s = max(_LONGEST_SHARE * request.budget_s, _LONGEST_RUN * baseline.took_s)
                record = _improved(request, cells, calls, baseline, display)
            except Interrupted as why:  # in the first setting's own run
                say(f"interrupted{f': {why}' if why.args else ''}; run the same command again to resume")
                return INTERRUPTED
    return _ending(folder, record, calls.call, request.format)


def _improved(
    request: ImproveRequest, cells: Cells, calls: CellCalls, baseline: FinishedCell, display: ImproveDisplay
) -> ImproveRecord:
    """Try the changes that the first setting's run leaves open; return the record of the search."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(RecordError):
        started = read_improve(cells.folder.path).started  # by an earlier call
    account = Account(request, started, baseline.took_s)
    try:
        first = baseline.record
    except NoSteps as error:
        if baseline.outcome.exit_code == WRONG_CALL and baseline.outcome.status == "failed":
            cells.folder.forget()
            raise UsageError(str(error).removeprefix(f"failed: exit code {WRONG_CALL}: ")) from None
        notes = [_NO_TIME if baseline.was_cut else str(error)]
        record = replace(account, notes=notes).record(None, "budget" if baseline.was_cut else "failed", 1)
        record.write(cells.folder.path / IMPROVE_FILE)
        return record
    changes = _changes(request, baseline, first)
    tried, refused = [one for one in changes if not one.refused], [one for one in changes if one.refused]
    notes = [f"in the first setting's own run, {line}" for line in contention_lines(first.contention)]
    notes += [_AHEAD] * (first.loader is None or first.loader.used_up is None)
    account = replace(account, refused=refused, notes=notes)
    return search(cells, replace(calls, first_record=first), tried, account, display.show)


def _changes(request: ImproveRequest, baseline: FinishedCell, first: RunRecord) -> list[Candidate]:
    """Return the changes, those of ``--try`` before ours, with refused ones marked."""
    known = open_candidates(baseline.entry, request.global_batch == "free")
    asked = requested_candidates(request.try_, known, baseline.entry.option)
    if request.only:
        return asked
    named = {name for name in request.try_ if any(name in one.options for one in asked)}
    ours = [one for one in known if one.refused or not named & {*one.options}]
    return [*asked, *refuse_small(ours, first.time["step"].mean, MARGIN)]


def _ending(folder: SweepFolder, record: ImproveRecord, call: Sequence[str], kind: AnswerFormat = "terminal") -> int:
    """Print the result, write the config of the best setting, and return the exit code."""
    improved = folder.path / IMPROVED_CONFIG
    if record.options:
        write_whole(improved, config_text(record, call))
    else:
        improved.unlink(missing_ok=True)  # an earlier call may have written this file
    if kind == "json":
        write_json(record)
    else:
        show(improve_table(record, folder.path))
        print(f"written to {folder.path}")
    return {"interrupted": INTERRUPTED, "failed": FAILED}.get(record.ended, OK)


def config_text(record: ImproveRecord, call: Sequence[str]) -> str:
    """Return YAML for ``fit --config``: the options of the first call and the changes."""
    changes = [f"--{name}={text}" for name, text in record.options.items()]
    content = Call([*call, *changes]).content
    above = [f"{record.command} changed:", *changes]
    lines = [f"# {line}\n" for text in above for line in text.splitlines()]
    return "".join(lines) + yaml.safe_dump(content, sort_keys=False)


VERBS = {"improve": (ImproveRequest, EXAMPLES, run)}

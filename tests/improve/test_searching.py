"""A search over cells that a known program answers: what it ends with, what it writes, and that it goes on."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from by_hand import made_outcome
from rich.console import Console
from stored_texts import assert_stored
from tests.support.made_improve import TRIED, made_improve
from tests.support.made_runs import made_record

from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.improve.candidates import ImproveRequest
from lm_profiler.improve.cells import CellCalls, Cells, Interrupted
from lm_profiler.improve.searching import Account, ImproveDisplay, search
from lm_profiler.record.improve_record import ImproveRecord, read_improve
from lm_profiler.record.run_record import NumericsFacts
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_plan
from lm_profiler.sweep.schedule import OUTPUT_FILE, clear
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.sweep.sweep_plan import made_plan

GAIN = {"data.num_workers": 0.7, "trainer.precision": 0.8, "data.batch_size": 1.9, "model.wrong": 0.5}
"""Of a step's time; twice the samples take 1.9 times as long."""
CANDIDATES = [
    Candidate("workers", {"data.num_workers": "2"}, "workers"),
    Candidate("wrong", {"model.wrong": "true"}, "wrong", ceiling_s=1.0, may_change="rounding"),
    Candidate("bf16", {"trainer.precision": "bf16-mixed"}, "precision", ceiling_s=0.5, may_change="rounding"),
    Candidate("useless", {"model.useless": "true"}, "useless"),
    Candidate("batch", {"data.batch_size": "8"}, "batch"),
    Candidate("fails", {"model.fails": "true"}, "fails"),
    Candidate("large", {"model.large": "true"}, "large"),
    Candidate("killed", {"model.killed": "true"}, "killed"),
]


RECORD = made_record()


class Program:
    """Leaves what a cell's process would.

    Args:
        folder: Where.
        patience: How many cells it runs before it is interrupted.
        slow: How long each of these takes; others take a second.
        drift: What each option adds to the loss, as a share.
        scatter: By how much (std, a share) each loss differs where other random numbers are drawn: with other workers.
    """

    def __init__(
        self,
        folder: Path,
        patience: float = math.inf,
        slow: Mapping[str, float] | None = None,
        drift: float = 0.0,
        scatter: float = 0.0,
    ) -> None:
        self.scatter = scatter
        self.folder, self.patience, self.ran = folder, patience, list[str]()
        self.slow, self.drift = slow or {}, drift

    def __call__(self, cell: Cell, limit_s: float) -> None:
        if len(self.ran) >= self.patience:
            raise Interrupted
        self.ran.append(cell.id)
        bad = {"model.fails": "failed", "model.large": "refused"}
        killed = "model.killed" in cell.overrides
        status = "interrupted" if killed else next((bad[name] for name in cell.overrides if name in bad), "ok")
        took_s = self.slow.get(cell.id, 1.0)
        if took_s > limit_s:
            status, took_s = "timeout", limit_s
        options = {name: text for name, text in cell.overrides.items() if name in GAIN}
        factor = math.prod(GAIN[name] for name in options) * random.Random(cell.id).lognormvariate(0.0, 0.01)
        samples = int(options.get("data.batch_size", "4"))
        drawn = random.Random(repr((cell.overrides.get("data.num_workers"), 1)))
        numbers = NumericsFacts(
            loss=2.0,
            reference_loss=2.0,
            output_error=0.0,
            gradient_error=0.2 if "model.wrong" in options else 0.01 if options else 0.0,
            kinds=[],
            losses=[
                loss * (1.0 + self.drift * len(options)) * (1.0 + self.scatter * drawn.gauss(0.0, 1.0))
                for loss in (2.0, 1.5) * 5
            ],
        )
        record = RECORD.model_copy(update={"numerics": numbers})
        step = record.time["step"].model_copy(update={"mean": 0.1 * factor})
        throughput = record.throughput.model_copy(update={"samples_per_step": samples}) if record.throughput else None
        run = clear(self.folder, cell) / "version_0"
        run.mkdir()
        measured = {"time": {**record.time, "step": step}, "throughput": throughput}
        record.model_copy(update=measured).write(run / "run.json")
        reason, exit_code = None if status == "ok" else "its reason", -9 if killed else 0
        ended = made_outcome(cell.id, status, took_s, reason, run=f"{cell.id}/version_0", exit_code=exit_code)
        ended.write(self.folder / cell.id / "outcome.json")


def search_record(path: Path, program: Program, budget: str = "150s", **options: object) -> ImproveRecord:
    request = ImproveRequest(config="demo", name=path.name, log_dir=str(path.parent), budget=budget, **options)
    calls = CellCalls(path, ["fit"])
    with SweepFolder(path, made_plan("it", "a call", [], {}, [calls.baseline()]), grows=True) as folder:
        folder.begin()
        cells = Cells(folder, program, lambda: 0.0)
        calls = replace(calls, first_record=RECORD)
        return search(cells, calls, CANDIDATES, Account(request, "now"), lambda record: None)


def test_a_search_records_the_winner_and_why_others_were_not_taken(tmp_path: Path) -> None:
    program = Program(tmp_path / "it")
    record = search_record(tmp_path / "it", program, global_batch="free")
    assert record == read_improve(tmp_path / "it")
    assert record.ended == "done"
    assert record.options == {
        "data.num_workers": "2", "trainer.precision": "bf16-mixed", "data.batch_size": "8"
    }  # fmt: skip
    first = {tried.name: tried for tried in reversed(record.tried)}
    assert {name: tried.verdict for name, tried in first.items()} == {
        "workers": "FASTER", "wrong": "NUMERICS", "bf16": "FASTER", "batch": "FASTER",
        "useless": first["useless"].verdict, "fails": "FAILED", "large": "REFUSED",
        "killed": "FAILED",
    }  # fmt: skip
    assert first["useless"].verdict in ("SAME", "UNDECIDED")
    assert "20.0%" in first["wrong"].why
    assert "its reason" in (first["fails"].why or "")
    truth = 1 / (0.7 * 0.8 * 0.95)  # a step of twice the samples counts by half
    assert record.final.low < truth < record.final.high
    assert record.runs == len(program.ran)
    assert record.elapsed_s == len(program.ran)


def test_a_run_ended_from_outside_has_its_end_in_the_record(tmp_path: Path) -> None:
    """The process that starts cells was killed: nobody knows the exit code of the cell, and nobody pressed Ctrl-C."""

    class Lost(Program):
        def __call__(self, cell: Cell, limit_s: float) -> None:
            super().__call__(cell, limit_s)
            if len(self.ran) == 3:
                path = self.folder / cell.id / "outcome.json"
                outcome = CellOutcome.model_validate_json(path.read_text())
                lost = {"status": "interrupted", "exit_code": None, "reason": "the server died (SIGKILL)"}
                outcome.model_copy(update=lost).write(path)

    record = search_record(tmp_path / "it", Lost(tmp_path / "it"))
    assert record.ended == "interrupted"
    assert "SIGKILL" in record.notes[-1]
    assert search_record(tmp_path / "other", Program(tmp_path / "other", patience=3)).notes == []


def test_numeric_distances_of_winners_add_up(tmp_path: Path) -> None:
    """Each is within what is tolerated of the setting before it; of the first setting, the second is not."""
    record = search_record(tmp_path / "it", Program(tmp_path / "it", drift=0.006))
    assert record.options == {"trainer.precision": "bf16-mixed"}  # what has a ceiling goes first
    workers = next(tried for tried in record.tried if tried.name == "workers")
    assert workers.verdict == "NUMERICS"
    assert "1.2%" in workers.why


def test_a_loader_may_differ_by_the_scatter_of_its_steps(tmp_path: Path) -> None:
    record = search_record(tmp_path / "loose", Program(tmp_path / "loose", scatter=0.05))
    workers = next(tried for tried in record.tried if tried.name == "workers")
    assert workers.numerics.loss > 0.01
    assert (workers.verdict, workers.accepted) == ("FASTER", True)
    record = search_record(tmp_path / "strict", Program(tmp_path / "strict", scatter=0.005, drift=0.2))
    assert record.options == {}


def test_another_global_batch_is_taken_only_on_request(tmp_path: Path):
    record = search_record(tmp_path / "it", Program(tmp_path / "it"))
    batch = next(tried for tried in record.tried if tried.name == "batch")
    assert batch.verdict == "NUMERICS"
    assert "8 samples" in batch.why
    assert "data.batch_size" not in record.options
    path = tmp_path / "it"
    search_record(path, Program(path))
    for cell in read_plan(path).cells:
        first_of_all = cell.id.endswith((",look", ",r0", ",check"))
        assert ("--check_memory=false" in cell.arguments) is not first_of_all


@pytest.mark.parametrize("patience", [1, 11])
def test_an_interrupted_search_continues(tmp_path: Path, patience: int) -> None:
    whole = search_record(tmp_path / "whole" / "it", Program(tmp_path / "whole" / "it"))
    path = tmp_path / "parts" / "it"
    before = Program(path, patience)
    assert search_record(path, before).ended == "interrupted"
    after = Program(path)
    assert search_record(path, after) == whole
    assert {*before.ran} & {*after.ran} <= {"model.killed=true,r0"}  # what was killed from outside may run next time
    assert all(len(ran) == len({*ran}) for ran in (before.ran, after.ran))


CELL = Cell(id="data.num_workers=4,r2", overrides={}, repeat=2, arguments=[])


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_a_search(tmp_path: Path, terminal: bool) -> None:
    (tmp_path / CELL.id).mkdir()
    (tmp_path / CELL.id / OUTPUT_FILE).write_text("warm-up: 5 steps\nmeasuring: 20 steps\n")
    printed, now = StringIO(), [0.0]
    console = Console(file=printed, force_terminal=terminal, width=150, no_color=True)
    display = ImproveDisplay(tmp_path, 600.0, console, clock=lambda: now[0])
    display.show(made_improve(tried=TRIED[:1], ended="unfinished", final=None, left=["model.compile=true"]))
    display.cell_begins(CELL, None)
    now[0] = 3.0
    display.tick()
    with console.capture() as running:
        console.print(display._live.renderable)
    display.show(made_improve(tried=TRIED[:2], ended="unfinished", final=None))
    first, second = printed.getvalue().splitlines()
    prefix = "[9.5 min of 10 min] trainer.precision="
    assert first.startswith(f"{prefix}bf16-mixed: FASTER")
    assert "48.0 [46.5, 49.5]" in first
    assert "8.1 %" not in first
    assert second.startswith(f"{prefix}bf16-true: NUMERICS")
    assert "9.0 [7.5, 10.5]" in second
    assert "8.1 %" in second
    assert (f"9.5 min of 10 min; measuring: {CELL.id}, 3.0 s" in running.get()) is terminal


def test_runs_on_a_shared_machine_are_noted() -> None:
    account = Account(ImproveRequest(config="demo"), "now")
    texts = {f"{shared} of 5": account.record(None, "done", 5, shared).notes for shared in (0, 3)}
    assert_stored("improve/notes: shared", texts)

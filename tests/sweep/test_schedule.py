"""Slots, limits and interrupts, with processes and a clock made by hand; what became of a cell by what it left."""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from by_hand import CELL, made_sweep_plan, write_cell_record
from stored_texts import assert_stored
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm_profiler.processes.cell_processes import CellEnded
from lm_profiler.record.run_record import Failure, Status
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_outcome, read_outcomes
from lm_profiler.sweep.schedule import GRACE_S, ProcessEnd, Schedule, memory_kills, record_outcome


class RecordingReporter:
    """Remembers the events that are reported to it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def cell_begins(self, cell: Cell, device: str | None) -> None:
        self.events.append(f"+{cell.id}")

    def cell_ends(self, cell: Cell, outcome: CellOutcome) -> None:
        self.events.append(f"-{cell.id} {outcome.status}")

    def tick(self) -> None: ...


class SentSignal(NamedTuple):
    at_s: float
    cell: str
    number: int


class Processes:
    """Each cell runs for ``lasts`` seconds, ends a moment after SIGTERM unless ``deaf``, at once at SIGKILL."""

    def __init__(self, folder: Path, lasts: Mapping[str, float], deaf: Sequence[str] = ()) -> None:
        self.folder, self.lasts, self.deaf = folder, lasts, deaf
        self.now = 100.0
        self.ends: dict[str, tuple[float, int]] = {}
        self.environments: dict[str, str | None] = {}
        self.most_at_once = 0
        self.caches: list[list[str | None]] = []
        self.signals: list[SentSignal] = []
        self.calls_at_s: dict[float, Callable[[], None]] = {}

    def start(self, cell: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        assert output == self.folder / cell / "output.txt"
        assert list(output.parent.iterdir()) == []  # whatever an earlier try left is gone
        self.caches.append([environment.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")])
        for cache in filter(None, self.caches[-1]):
            Path(cache).mkdir(parents=True)
        self.environments[cell] = environment.get("CUDA_VISIBLE_DEVICES")
        self.ends[cell] = (self.now + self.lasts[cell], 0)
        self.most_at_once = max(self.most_at_once, len(self.ends))

    def signal(self, cell: str, number: int) -> None:
        self.signals.append(SentSignal(self.now - 100.0, cell, number))
        if cell in self.ends and (number == signal.SIGKILL or cell not in self.deaf):
            self.ends[cell] = (self.now + 0.5, -signal.SIGKILL if number == signal.SIGKILL else 130)

    def wait_for_ends(self, timeout_s: float | None) -> list[CellEnded]:
        assert timeout_s >= 0
        self.now += max(timeout_s, 0.01)
        for when in [when for when in self.calls_at_s if when <= self.now - 100.0]:
            self.calls_at_s.pop(when)()
        ended = [(cell, code) for cell, (when, code) in self.ends.items() if when <= self.now]
        for cell, code in ended:
            del self.ends[cell]
            if code == 0:
                write_cell_record(self.folder, "ok", cell)
        return [CellEnded(cell, code) for cell, code in ended]


def schedule(
    processes: Processes, devices: Sequence[str | None] = (None,), timeout_s: float | None = None
) -> tuple[Schedule, RecordingReporter]:
    reporter = RecordingReporter()
    cells = made_sweep_plan(*processes.lasts).cells
    work = Schedule(processes.folder, cells, processes, reporter, devices, timeout_s, clock=lambda: processes.now)
    return work, reporter


def test_cells_run_one_at_a_time_in_order(tmp_path: Path) -> None:
    processes = Processes(tmp_path, {"a": 3, "b": 1, "c": 2})
    work, reporter = schedule(processes)
    work.run()
    assert reporter.events == ["+a", "-a ok", "+b", "-b ok", "+c", "-c ok"]
    assert processes.most_at_once == 1
    assert processes.environments == {"a": None, "b": None, "c": None}


def test_cells_run_one_at_a_time_on_each_device(tmp_path: Path) -> None:
    processes = Processes(tmp_path, {"a": 5, "b": 1, "c": 1, "d": 1})
    work, reporter = schedule(processes, ["0", "2,3"])
    work.run()
    assert processes.most_at_once == 2
    assert processes.environments == {"a": "0", "b": "2,3", "c": "2,3", "d": "2,3"}
    assert reporter.events[:4] == ["+a", "+b", "-b ok", "+c"]
    assert reporter.events[-1] == "-a ok"


def test_a_cell_over_its_time_is_terminated_then_killed(tmp_path: Path) -> None:
    """The first cell has until 7 s; the second one begins a moment later and does not react to SIGTERM."""
    processes = Processes(tmp_path, {"slow": 99, "deaf": 99, "quick": 1}, deaf=["deaf"])
    work, reporter = schedule(processes, timeout_s=7)
    work.run()
    assert reporter.events == ["+slow", "-slow timeout", "+deaf", "-deaf timeout", "+quick", "-quick ok"]
    slow, deaf, killed = processes.signals
    assert slow == SentSignal(pytest.approx(7.0, abs=0.02), "slow", signal.SIGTERM)
    assert (deaf.cell, deaf.number) == ("deaf", signal.SIGTERM)
    assert killed == SentSignal(pytest.approx(deaf.at_s + GRACE_S, abs=0.02), "deaf", signal.SIGKILL)
    reasons = {cell: outcome.reason or "" for cell, outcome in read_outcomes(tmp_path).items()}
    assert_stored("sweep/reasons: over its time", reasons)


def test_an_interrupted_sweep_begins_no_cell(tmp_path: Path) -> None:
    processes = Processes(tmp_path, {"a": 1, "b": 99, "deaf": 99, "c": 1}, deaf=["deaf"])
    work, reporter = schedule(processes, [None, None], timeout_s=50)
    processes.calls_at_s[3.0] = lambda: setattr(work, "interrupted", True)
    work.run()
    assert reporter.events == ["+a", "+b", "-a ok", "+deaf", "-b interrupted", "-deaf interrupted"]
    assert [sent.number for sent in processes.signals] == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]


def test_files_of_an_earlier_try_are_removed(tmp_path: Path) -> None:
    """``Processes`` expects an empty folder when a cell starts."""
    write_cell_record(tmp_path, "interrupted", "b")
    processes = Processes(tmp_path, {"b": 1})
    work, _ = schedule(processes)
    work.run()
    assert read_outcomes(tmp_path)["b"].status == "ok"


def test_each_cell_compiles_into_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    processes = Processes(tmp_path, {"a": 1.0, "b": 1.0})
    schedule(processes)[0].run()
    folders = [tmp_path / cell / "compile_cache" for cell in ("a", "b")]
    assert processes.caches == [[str(folder), str(folder / "triton")] for folder in folders]
    assert not list(tmp_path.glob("*/compile_cache"))


def test_cells_compile_into_a_folder_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/shared")
    processes = Processes(tmp_path, {"a": 1.0})
    schedule(processes)[0].run()
    assert processes.caches == [[None, None]]


OUT_OF_MEMORY = Failure(phase="backward", step=2, type="OutOfMemoryError", message="CUDA out of memory")
REFUSED = Failure(phase="setup", step=None, type="Refused", message="it cannot fit\ntake less")
KILL, TERM, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


ENDS: list[tuple[Status | None, ProcessEnd, str]] = [
    ("ok", ProcessEnd(0, 1.0), "ok"),
    ("ok", ProcessEnd(SEGV, 1.0), "ok"),  # it crashed after its record was complete
    ("oom", ProcessEnd(1, 1.0), "oom"),
    ("oom", ProcessEnd(KILL, 1.0, timeout_s=9), "oom"),
    ("failed", ProcessEnd(1, 1.0), "failed"),
    ("refused", ProcessEnd(2, 1.0), "refused"),
    ("interrupted", ProcessEnd(130, 1.0, timeout_s=9), "timeout"),
    (None, ProcessEnd(TERM, 1.0, timeout_s=9), "timeout"),
    ("ok", ProcessEnd(KILL, 1.0, timeout_s=9), "timeout"),
    (None, ProcessEnd(KILL, 1.0, memory_kills=1), "oom"),
    (None, ProcessEnd(KILL, 1.0), "interrupted"),
    ("ok", ProcessEnd(KILL, 1.0), "interrupted"),  # the record was not completed
    ("interrupted", ProcessEnd(130, 1.0), "interrupted"),
    (None, ProcessEnd(None, 1.0, lost_reason="its job was cancelled"), "interrupted"),
    (None, ProcessEnd(SEGV, 1.0, memory_kills=1), "failed"),
    (None, ProcessEnd(2, 1.0), "failed"),
    (None, ProcessEnd(0, 1.0), "failed"),
]


def test_the_reason_of_a_failed_cell(tmp_path: Path) -> None:
    texts = {}
    for number, (left, ended, status) in enumerate(ENDS):
        folder = tmp_path / str(number)
        (folder / CELL.id).mkdir(parents=True)
        (folder / CELL.id / "output.txt").write_bytes(b"first\nlm_profiler: the last words\n\xff\n"[:-2])
        if left is not None:
            write_cell_record(folder, left, failure={"oom": OUT_OF_MEMORY, "refused": REFUSED}.get(left))
        outcome = record_outcome(folder, CELL, ended)
        assert outcome.status == status, (left, ended)
        assert outcome.run == (None if left is None else f"{CELL.id}/version_0")
        assert (outcome.exit_code, outcome.duration_s) == (ended.code, 1.0)
        assert read_outcome(folder, CELL.id) == outcome
        assert (outcome.reason is None) == (status == "ok")
        how = {"timeout_s": ended.timeout_s, "memory_kills": ended.memory_kills, "left": left}
        more = [f"{name} {value}" for name, value in how.items() if value]
        texts[", ".join([f"code {ended.code}", *more])] = outcome.reason or ""
    assert len(texts) == len(ENDS)
    assert_stored("sweep/reasons: ended", texts)


def test_a_damaged_record_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / CELL.id / "version_0").mkdir(parents=True)
    (tmp_path / CELL.id / "version_0" / "run.json").write_text("{")
    outcome = record_outcome(tmp_path, CELL, ProcessEnd(1, 1.0))
    assert (outcome.status, outcome.reason, outcome.run) == ("failed", "exit code 1", None)


def test_a_cell_without_a_run_is_in_tensorboard(tmp_path: Path) -> None:
    (tmp_path / CELL.id).mkdir(parents=True)
    record_outcome(tmp_path, CELL, ProcessEnd(2, 1.0))
    events = EventAccumulator(str(tmp_path / CELL.id))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"a.x" in content
    texts = [text for event in events.Tensors("summary") for text in event.tensor_proto.string_val]
    assert any(b"failed: exit code 2" in text for text in texts)


def test_kills_for_memory_are_counted() -> None:
    assert memory_kills() >= 0

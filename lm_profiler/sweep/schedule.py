"""Run cells, as many at a time as there are slots, each within its time limit, and record how each cell ended."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol, cast

from lm_profiler.processes.cell_processes import CellEnded, CellProcesses
from lm_profiler.processes.child import end_text
from lm_profiler.record.calls import INTERRUPTED
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import RunRecord, none_if_unreadable, read_run
from lm_profiler.record.sweep_files import OUTCOME_FILE, Cell, CellOutcome, CellStatus
from lm_profiler.tensorboard.summary import write_hparams

# the file in a cell's folder with its stdout and stderr
OUTPUT_FILE = "output.txt"
# seconds between SIGTERM, on which a cell writes its record, and SIGKILL
GRACE_S = 10.0

_REDRAW_S = 0.5
_COMPILE_CACHE = "compile_cache"
# the last message is searched in this many bytes at the end of the output
_TAIL_BYTES = 16384
# exit codes of processes that another process killed by a signal
_KILLED_FROM_OUTSIDE = (
    -signal.SIGKILL,
    -signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGHUP,
)


def clear(folder: Path, cell: Cell) -> Path:
    """Delete the cell's folder below the sweep's ``folder``, create it again, and return it."""
    cell_folder = folder / cell.id
    shutil.rmtree(cell_folder, ignore_errors=True)
    cell_folder.mkdir(parents=True)
    return cell_folder


def own_compile_cache(cell_folder: Path) -> dict[str, str]:
    """Return the environment variables that give a cell its own compile cache in its folder.

    With a shared cache only the first cell would compile, so first steps could not be compared. And a half-written file
    of a killed process would make every later cell fail. If the user has set a cache, no variables are returned.
    """
    cache = (cell_folder / _COMPILE_CACHE).resolve()
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    if any(name in os.environ for name in variables):
        return {}
    return variables


class Watcher(Protocol):
    def cell_begins(self, cell: Cell, device: str | None) -> None: ...

    def cell_ends(self, cell: Cell, outcome: CellOutcome) -> None: ...

    def tick(self) -> None: ...


@dataclass
class _Running:
    cell: Cell
    device: str | None
    memory_kills: int  # how many processes the OOM killer had ended when the cell began
    begin_s: float  # the time at which the process began
    # when the next signal is due: SIGTERM, after which the cell may write its record, then SIGKILL
    signal_s: float
    is_asked_to_stop: bool = False
    is_timed_out: bool = False


class Schedule:
    """Runs ``cells`` in their order, at any time at most one for each entry of ``devices``.

    An entry of ``devices`` is the value of CUDA_VISIBLE_DEVICES for its cells; None leaves the variable unchanged.
    ``timeout_s`` is the time limit of a cell. ``environment`` has further variables of every cell, which override those
    that the schedule sets.
    """

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        processes: CellProcesses,
        watcher: Watcher,
        devices: Sequence[str | None] = (None,),
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._processes = processes
        self._watcher = watcher
        self._waiting_cells = deque(cells)
        self._free_devices = deque(devices)
        self._running: dict[str, _Running] = {}
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._environment = environment or {}
        self._clock = clock
        # A signal handler sets this. Then running cells are asked to end, and no further cell begins.
        self.interrupted = False

    def run(self) -> None:
        """Run until every cell has an outcome, or, after an interrupt, until the running cells have ended."""
        while self._running or (self._waiting_cells and not self.interrupted):
            while self._waiting_cells and self._free_devices and not self.interrupted:
                self._begin(self._waiting_cells.popleft(), self._free_devices.popleft())
            for cell_end in self._processes.wait_for_ends(self._wait_s()):
                self._end(cell_end)
            self._send_signals()
            self._watcher.tick()

    def _wait_s(self) -> float:
        """Return how long to wait for an event: until the next signal or the next update of the display is due."""
        wait_s = _REDRAW_S
        for running in self._running.values():
            wait_s = min(wait_s, running.signal_s - self._clock())
        return max(wait_s, 0.0)

    def _begin(self, cell: Cell, device: str | None) -> None:
        """Start the process of ``cell`` on ``device``, in an empty folder."""
        cell_folder = clear(self._folder, cell)
        kills_before = memory_kills()
        environment = own_compile_cache(cell_folder)
        environment.update(self._environment)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        self._processes.start(
            cell.id, cell.arguments, cell_folder / OUTPUT_FILE, environment
        )
        begin_s = self._clock()
        self._running[cell.id] = _Running(
            cell, device, kills_before, begin_s, signal_s=begin_s + self._timeout_s
        )
        self._watcher.cell_begins(cell, device)

    def _end(self, event: CellEnded) -> None:
        """Record how the process of a cell ended, and free its device."""
        running = self._running.pop(event.cell)
        # The compile caches of many cells would fill the disk.
        shutil.rmtree(self._folder / event.cell / _COMPILE_CACHE, ignore_errors=True)
        self._free_devices.append(running.device)
        process_end = ProcessEnd(
            event.code,
            duration_s=self._clock() - running.begin_s,
            timeout_s=self._timeout_s if running.is_timed_out else None,
            memory_kills=memory_kills() - running.memory_kills,
            lost_reason=event.lost,
        )
        self._watcher.cell_ends(
            running.cell, record_outcome(self._folder, running.cell, process_end)
        )

    def _send_signals(self) -> None:
        """Ask cells to stop: those over their time limit, or all after an interrupt. Kill those that do not stop."""
        now_s = self._clock()
        for running in self._running.values():
            is_due = now_s >= running.signal_s
            if running.is_asked_to_stop:
                if is_due:
                    self._processes.signal(running.cell.id, signal.SIGKILL)
                    running.signal_s = now_s + GRACE_S
            elif is_due or self.interrupted:
                # The first signal lets the cell write its record.
                self._processes.signal(running.cell.id, signal.SIGTERM)
                running.is_asked_to_stop = True
                running.is_timed_out = not self.interrupted
                running.signal_s = now_s + GRACE_S


# -- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessEnd:
    """How a cell's process ended."""

    # the exit code, negative for the signal that killed the process; None if it is unknown
    code: int | None
    duration_s: float  # seconds from its start to its end
    # the time limit after which it was stopped; None if it was not stopped for that reason
    timeout_s: float | None = None
    # how many processes on this machine the OOM killer ended while it ran
    memory_kills: int = 0
    lost_reason: str | None = None  # why the exit code is unknown; None if it is known

    @property
    def is_stopped(self) -> bool:
        """Whether the process did not end by itself."""
        return (
            self.code is None
            or self.code in _KILLED_FROM_OUTSIDE
            or self.code == INTERRUPTED
        )


def record_outcome(folder: Path, cell: Cell, process_end: ProcessEnd) -> CellOutcome:
    """Determine how a cell of the sweep in ``folder`` ended, and write its outcome, also for TensorBoard's HPARAMS."""
    cell_folder = folder / cell.id
    run = cell_folder / "version_0"  # the cell's folder was empty when it began
    record = none_if_unreadable(read_run, run)
    status, reason = _status_and_reason(record, process_end, cell_folder / OUTPUT_FILE)
    outcome = CellOutcome(
        cell=cell.id,
        status=status,
        reason=reason,
        run=None if record is None else run.relative_to(folder).as_posix(),
        ended=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        duration_s=process_end.duration_s,
        exit_code=process_end.code,
    )
    outcome.write(cell_folder / OUTCOME_FILE)
    if record is None or record.status != status:
        # a run writes its HPARAMS itself, with the status of its record
        with suppress(OSError):  # a full disk: the outcome is written already
            write_hparams(
                Entry(cell_folder if record is None else run, record, cell, outcome)
            )
    return outcome


def _status_and_reason(
    record: RunRecord | None, process_end: ProcessEnd, output: Path
) -> tuple[CellStatus, str | None]:
    """Return status and reason: from the run's record, else from what stopped the process, else from its output."""
    if record is not None and _is_conclusive(record, process_end):
        return cast(CellStatus, record.status), _failure_text(record)
    if process_end.timeout_s is not None:
        return (
            "timeout",
            f"ran longer than {process_end.timeout_s:g} s{_place_text(record)}",
        )
    if process_end.lost_reason is not None:
        return "interrupted", process_end.lost_reason
    if process_end.code == -signal.SIGKILL and process_end.memory_kills:
        return "oom", f"killed by the OOM killer{_place_text(record)}"
    if process_end.code == INTERRUPTED:
        return "interrupted", _place_text(record).lstrip(",; ") or None
    if process_end.is_stopped:
        return (
            "interrupted",
            f"killed by {end_text(process_end.code)} from outside{_place_text(record)}",
        )
    return "failed", _last_message(output, process_end.code)


def _is_conclusive(record: RunRecord, process_end: ProcessEnd) -> bool:
    """Return whether the status of the record is that of the cell."""
    # An interrupted record does not distinguish a timeout from Ctrl-C, and an unfinished one does not show the end.
    if record.status in ("interrupted", "unfinished"):
        return False
    # A process that was stopped after a successful run has not written everything.
    return record.status != "ok" or not process_end.is_stopped


def _failure_text(record: RunRecord) -> str | None:
    """Return why the run of a cell failed, in one line; None if it did not."""
    failure = record.failure
    if failure is None:
        return None
    message = "; ".join(failure.message.splitlines())
    if record.status == "refused":
        return message
    return f"{failure.type} in {failure.where}: {message}".removesuffix(": ")


def _place_text(record: RunRecord | None) -> str:
    """Return the end of a reason: the place in the run where the process was stopped, or that it left no record.

    Return an empty text if the record does not have the place.
    """
    if record is None:
        return "; left no record"
    if record.failure is None:
        return ""
    return f", in {record.failure.where}"


def _last_message(output: Path, code: int | None) -> str:
    """Return how the process ended, and the last line of its output."""
    if code == 0:
        ending = "left no record in its folder"
    elif code is not None and code < 0:
        ending = f"killed by {end_text(code)}"
    else:
        ending = end_text(code)
    for line in reversed(last_lines(output)):
        if line.strip():
            message = line.strip().removeprefix("lm_profiler: ")
            return f"{ending}: {message[:300]}"
    return ending


def last_lines(output: Path) -> list[str]:
    """Return the last lines of a file of output; none if it cannot be read."""
    try:
        with output.open("rb") as file:
            file.seek(max(output.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def memory_kills() -> int:
    """Return how many processes this system's OOM killer has ended; 0 if that is unknown."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0

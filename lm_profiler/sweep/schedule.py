"""Run cells, one in each slot, each within its time limit, and judge how each ended from the files of its process."""

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

from lm_profiler.processes.child import end_text
from lm_profiler.processes.fork_server import CellEnded, CellServer
from lm_profiler.record.calls import INTERRUPTED
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import RunRecord, if_readable, read_run
from lm_profiler.record.sweep_files import OUTCOME_FILE, Cell, CellOutcome, CellStatus
from lm_profiler.tensorboard.summary import write_hparams

OUTPUT_FILE = "output.txt"  # the file in a cell's folder that takes its stdout and stderr
GRACE_S = 10.0  # seconds between SIGTERM, on which a cell writes its record, and SIGKILL

_REDRAW_S = 0.5
_CACHE = "compile_cache"
_TAIL_BYTES = 16384  # bytes at the end of the output in which the last message is looked for
_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


def clear(folder: Path, cell: Cell) -> Path:
    own = folder / cell.id
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    return own


def own_compile_cache(own: Path) -> dict[str, str]:
    """Return the variables that give a cell its own compile cache, below its folder ``own``, while it runs.

    With a shared cache only the first cell would compile, so first steps could not be compared, and a file that a
    killed process left half written would fail every later cell. A cache that the user has set is kept.
    """
    folders = {"TORCHINDUCTOR_CACHE_DIR": own / _CACHE, "TRITON_CACHE_DIR": own / _CACHE / "triton"}
    return {} if folders.keys() & os.environ.keys() else {name: str(path.resolve()) for name, path in folders.items()}


class Watcher(Protocol):
    def began(self, cell: Cell, device: str | None) -> None: ...

    def ended(self, cell: Cell, outcome: CellOutcome) -> None: ...

    def tick(self) -> None: ...


@dataclass
class _Running:
    cell: Cell
    device: str | None
    kills: int
    began: float  # the time at which the process began; before that is known, the time of the request
    # the time of the next signal: SIGTERM, on which the cell may write its record, then SIGKILL
    stop_at: float = math.inf
    asked_to_stop: bool = False
    timed_out: bool = False


class Schedule:
    """Runs ``cells`` in order, one per entry of ``devices`` at a time.

    ``devices`` are the CUDA_VISIBLE_DEVICES of each slot's cells; None leaves it unchanged. ``timeout_s`` is the time
    limit of a cell, ``environment`` holds variables of every cell, which override those that the schedule sets.
    """

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        starter: CellServer,
        watcher: Watcher,
        devices: Sequence[str | None] = (None,),
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._starter, self._watcher = folder, starter, watcher
        self._waiting, self._free = deque(cells), deque(devices)
        self._running: dict[str, _Running] = {}
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._environment, self._clock = environment or {}, clock
        self.interrupted = False  # a signal handler sets this: running cells are asked to end, and no other begins

    def run(self) -> None:
        """Run until every cell has an outcome, or, after an interrupt, until the running cells have ended."""
        while self._running or (self._waiting and not self.interrupted):
            while self._waiting and self._free and not self.interrupted:
                self._begin(self._waiting.popleft(), self._free.popleft())
            limits = [running.stop_at - self._clock() for running in self._running.values()]
            for event in self._starter.events(max(min([_REDRAW_S, *limits]), 0.0)):
                if isinstance(event, CellEnded):
                    self._end(event)
                else:
                    running = self._running[event.cell]
                    running.began = self._clock()
                    running.stop_at = running.began + self._timeout_s
            self._enforce()
            self._watcher.tick()

    def _begin(self, cell: Cell, device: str | None) -> None:
        own = clear(self._folder, cell)
        self._running[cell.id] = _Running(cell, device, memory_kills(), self._clock())
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        environment = {**own_compile_cache(own), **self._environment, **visible}
        self._starter.start(cell.id, cell.arguments, own / OUTPUT_FILE, environment)
        self._watcher.began(cell, device)

    def _end(self, event: CellEnded) -> None:
        running = self._running.pop(event.cell)
        # Compiled kernels of many cells would fill the disk.
        shutil.rmtree(self._folder / event.cell / _CACHE, ignore_errors=True)
        self._free.append(running.device)
        limit_s, kills = self._timeout_s if running.timed_out else None, memory_kills() - running.kills
        ended = Ended(event.code, self._clock() - running.began, limit_s, kills, event.lost)
        self._watcher.ended(running.cell, record_outcome(self._folder, running.cell, ended))

    def _enforce(self) -> None:
        now = self._clock()
        for running in self._running.values():
            if now < running.stop_at and (running.asked_to_stop or not self.interrupted):
                continue
            # The first signal asks, so that the record is written; only a cell that ignores it is killed.
            running.timed_out |= not (self.interrupted or running.asked_to_stop)
            self._starter.signal(running.cell.id, signal.SIGKILL if running.asked_to_stop else signal.SIGTERM)
            running.asked_to_stop, running.stop_at = True, now + GRACE_S


# -- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a cell's process ended."""

    code: int | None  # the exit code, negative for the signal that killed the process; None where it is unknown
    duration_s: float  # seconds from its start to its end
    timeout_s: float | None = None  # the time limit at which it was stopped; None if it was not
    memory_kills: int = 0  # processes on this machine that the OOM killer ended meanwhile
    lost: str | None = None  # why the exit code is unknown; None where it is known


def record_outcome(folder: Path, cell: Cell, ended: Ended) -> CellOutcome:
    """Judge how the cell below the sweep's ``folder`` ended, and write its outcome, for TensorBoard's HPARAMS too."""
    own = folder / cell.id
    run = own / "version_0"  # the cell's folder was empty when it began
    record = if_readable(read_run, run)
    status, reason = _status(record, ended, own / OUTPUT_FILE)
    outcome = CellOutcome(
        cell=cell.id,
        status=status,
        reason=reason,
        run=None if record is None else run.relative_to(folder).as_posix(),
        ended=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        duration_s=ended.duration_s,
        exit_code=ended.code,
    )
    outcome.write(own / OUTCOME_FILE)
    if record is None or record.status != status:  # otherwise the run has written its HPARAMS
        with suppress(OSError):  # a full disk: the outcome is written already
            write_hparams(Entry(own if record is None else run, record, cell, outcome))
    return outcome


def _status(record: RunRecord | None, ended: Ended, output: Path) -> tuple[CellStatus, str | None]:
    """Return status and reason: from the run's record, else from what stopped the process, else from its output."""
    # A record with ``ok`` does not count if the process was stopped: it had more to write after the run.
    stopped = ended.code is None or ended.code in _FROM_OUTSIDE or ended.code == INTERRUPTED
    # An interrupted record does not distinguish a timeout from Ctrl-C, and an unfinished one shows nothing.
    told = None if record is None or record.status in ("interrupted", "unfinished") else record
    if told is not None and not (told.status == "ok" and stopped):
        return cast(CellStatus, told.status), _failure(told)
    if ended.timeout_s is not None:
        return "timeout", f"ran longer than {ended.timeout_s:g} s{_where(record)}"
    if ended.lost is not None:
        return "interrupted", ended.lost
    if ended.code == -signal.SIGKILL and ended.memory_kills:
        return "oom", "killed by the OOM killer" + _where(record)
    if ended.code == INTERRUPTED:
        return "interrupted", _where(record).lstrip(",; ") or None
    if stopped:
        return "interrupted", f"killed by {end_text(ended.code)} from outside" + _where(record)
    return "failed", _last_words(output, ended.code)


def _failure(record: RunRecord) -> str | None:
    failure = record.failure
    if failure is None:
        return None
    message = "; ".join(failure.message.splitlines())
    if record.status == "refused":
        return message
    return f"{failure.type} in {failure.where}: {message}".removesuffix(": ")


def _where(record: RunRecord | None) -> str:
    if record is None:
        return "; left no record"
    return "" if record.failure is None else f", in {record.failure.where}"


def _last_words(output: Path, code: int | None) -> str:
    how = "killed by " * (code is not None and code < 0) + end_text(code)
    how = "left no record in its folder" if code == 0 else how
    said = [line.strip().removeprefix("lm_profiler: ") for line in last_lines(output) if line.strip()]
    return f"{how}: {said[-1][:300]}" if said else how


def last_lines(output: Path) -> list[str]:
    try:
        with output.open("rb") as file:
            file.seek(max(output.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def memory_kills() -> int:
    """Return how many processes this system's OOM killer has ended; 0 where that is unknown."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

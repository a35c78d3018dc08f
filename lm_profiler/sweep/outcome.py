"""Judge how a cell ended from what its process left: its record, its exit code, the end of its output."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import cast

from lm_profiler.processes.child import how_ended
from lm_profiler.record.calls import INTERRUPTED
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import RecordError, RunRecord, read_run
from lm_profiler.record.sweep import OUTCOME_FILE, Cell, CellOutcome, CellStatus
from lm_profiler.tensorboard.summary import write_hparams

OUTPUT_FILE = "output.txt"  # the file in a cell's folder that takes its stdout and stderr

_TAIL_BYTES = 16384  # bytes at the end of the output in which the last message is looked for

_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


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
    try:
        record = read_run(run)
    except RecordError:
        record = None
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
    """Return status and reason: from the run's record, else from what stopped the process, else from its output.

    A record with ``ok`` does not count for a process that was stopped: more was still to be written after the run.
    """
    stopped = ended.code is None or ended.code in _FROM_OUTSIDE or ended.code == INTERRUPTED
    # An interrupted record does not tell a timeout from Ctrl-C, and an unfinished one tells nothing.
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
        return "interrupted", f"killed by {how_ended(ended.code)} from outside" + _where(record)
    return "failed", _last_words(output, ended.code)


def _failure(record: RunRecord) -> str | None:
    failure = record.failure
    if failure is None:
        return None
    message = "; ".join(failure.message.splitlines())
    if record.status == "refused":
        return message
    return f"{failure.type} in {failure.where}" + (f": {message}" if message else "")


def _where(record: RunRecord | None) -> str:
    if record is None:
        return "; left no record"
    return "" if record.failure is None else f", in {record.failure.where}"


def _last_words(output: Path, code: int | None) -> str:
    how = "killed by " * (code is not None and code < 0) + how_ended(code)
    how = "left no record in its folder" if code == 0 else how
    said = [line.strip().removeprefix("lm_profiler: ") for line in last_lines(output) if line.strip()]
    return f"{how}: {said[-1][:300]}" if said else how


def last_lines(output: Path) -> list[str]:
    """Return the last lines of a cell's output."""
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

"""Turns the exception that ended a run into the failure of its record, and collects how the ranks ended.

Each rank that fails writes how it ended into the run's folder. Ranks do not end each other: their launcher does, or the
time limit of the process group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

import torch

from lm_profiler.callbacks.marks.namespaces import is_a, is_fetch
from lm_profiler.measure.boundary import first_line, message_of
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.memory.history import (
    is_out_of_memory,
    memory_history_of,
    oom_cause,
)
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.rank_ends import RankEnd, read_ends
from lm_profiler.record.run_record import Failure, Status


def no_step(causes: str) -> Failure:
    """Return the failure of a run that ended without an error before it had done a step."""
    message = f"the run had no step: {causes}"
    return Failure(phase="data", step=None, type="NoStep", message=message)


def status_of(error: BaseException) -> Status:
    """Return ``oom``, ``interrupted`` or ``failed``."""
    if isinstance(error, KeyboardInterrupt) or is_a(error, "SIGTERMException"):
        return "interrupted"
    if is_out_of_memory(error):
        return "oom"
    return "failed"


def phase_of(error: BaseException, timeline: Timeline, steps: int) -> str:
    """Return the phase in which the run died after ``steps`` steps; ``setup`` before the first, ``other`` in none."""
    reading = timeline.reading()
    if steps == 0 and not reading.is_step_running:
        return "setup"
    # The timeline has left "data" already, because Lightning's fetcher ends its action before the error leaves it
    # (2.6.6).
    if any(is_fetch(frame) for frame, _ in walk_tb(error.__traceback__)):
        return "data"
    code = reading.stack[-1] if reading.failed_in is None else reading.failed_in
    if code < len(PARTS):
        return PARTS[code]
    return "other"


def failure_of(
    error: BaseException,
    phase: str,
    step: int | None,
    device: torch.device | None = None,
) -> Failure:
    """Return the failure for the record, with the cause if ``device`` ran out of memory."""
    return Failure(
        phase=phase,
        step=None if phase == "setup" else step,
        type=type(error).__name__,
        message=first_line(error),
        out_of_memory=None if device is None else oom_cause(error, device),
    )


def keep_snapshot(device: torch.device, path: Path) -> None:
    """Write a snapshot of the allocator for memory_viz, if the allocator recorded its history."""
    history = memory_history_of(device)
    if history is not None:
        with suppress(Exception):  # a record without a snapshot is better than none
            history.dump(path)


# matches the messages of torch, gloo and NCCL about a collective or a store whose other end is gone or late
_GROUP_FAILED = re.compile(
    r"gloo|NCCL|ProcessGroup|Connection (closed|reset)|Broken pipe|Timed out waiting|[Ss]ocket|"
    r"remote (server|process)|TCPStore|wait timeout after|Watchdog",
)

# How long to wait for the ends of other ranks: if another rank failed first, it has written its end already.
_PATIENCE_S = 2.0
# If a signal ended this rank, other ranks may be in the middle of a long operation.
_PATIENCE_AFTER_SIGNAL_S = 8.0
_CHECK_EVERY_S = 0.1


def is_of_the_group(error: BaseException) -> bool:
    """Return whether ``error`` only reports that another rank has ended or is late, without the reason."""
    is_torchs_own = type(error).__name__.startswith("Dist")  # such as DistBackendError
    if is_torchs_own:
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    return _GROUP_FAILED.search(message_of(error)) is not None


def ends_of_ranks(
    own_end: RankEnd,
    folder: Path,
    ranks: int,
    codes: Callable[[], Mapping[int, int | None]],
    pause: Callable[[float], object] = time.sleep,
) -> dict[int, RankEnd]:
    """Wait until all ranks have ended, some seconds at most, and return the ends that they wrote.

    If ``own_end`` came first, do not wait.

    Args:
        own_end: how this rank ended.
        folder: the folder of the run.
        ranks: the number of ranks.
        codes: returns the exit codes of the ranks that this process started; None for those that run.
        pause: sleeps for some seconds.
    """
    patience_s = 0.0
    if own_end.followed:
        patience_s = _PATIENCE_S
    elif own_end.is_signalled and not codes():
        patience_s = _PATIENCE_AFTER_SIGNAL_S
    ends = {own_end.failure.rank or 0: own_end}
    # The launcher may interrupt the wait, because it ends all ranks; then the ends that are known are returned.
    with suppress(KeyboardInterrupt):
        for pauses_left in range(round(patience_s / _CHECK_EVERY_S), -1, -1):
            # A rank that was killed writes no end.
            dead_ranks = {rank for rank, code in codes().items() if code is not None}
            ends = {**read_ends(folder), **ends}
            ended_ranks = ends.keys() | dead_ranks
            if pauses_left == 0 or len(ended_ranks) >= ranks:
                break
            pause(_CHECK_EVERY_S)
    return ends

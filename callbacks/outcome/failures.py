"""Turns the exception that ended a run into the failure of its record."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

import torch

from lm_profiler.callbacks.namespaces import is_a, is_fetch
from lm_profiler.measure.boundary import first_line
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.memory.history import is_out_of_memory, memory_history_of, oom_cause
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import Failure, Status

# the failure of a run that ended without an error before it had done a step
NO_STEP = Failure(
    phase="data",
    step=None,
    type="NoStep",
    message="expected at least one step, given none: the loader is empty or ran dry, every batch was skipped, "
    "or the Trainer was told to run none",
)


def status_of(error: BaseException) -> Status:
    """Return ``oom``, ``interrupted`` or ``failed``."""
    if isinstance(error, KeyboardInterrupt) or is_a(error, "SIGTERMException"):
        return "interrupted"
    return "oom" if is_out_of_memory(error) else "failed"


def phase_of(error: BaseException, timeline: Timeline, steps: int) -> str:
    """Return the phase in which the run died after ``steps`` steps: also ``setup``, and ``other`` between phases."""
    known = timeline.reading()
    if steps == 0 and not known.running:
        return "setup"
    # The timeline has left "data" by then: Lightning's fetcher ends its action before it lets the error through
    # (2.6.6).
    if any(is_fetch(frame) for frame, _ in walk_tb(error.__traceback__)):
        return "data"
    code = known.failed_in if known.failed_in is not None else known.stack[-1]
    return PARTS[code] if code < len(PARTS) else "other"


def failure_of(error: BaseException, phase: str, step: int | None, device: torch.device | None = None) -> Failure:
    """Return the failure for the record, with the cause where ``device`` ran out of memory."""
    return Failure(
        phase=phase,
        step=step if phase != "setup" else None,
        type=type(error).__name__,
        message=first_line(error),
        out_of_memory=None if device is None else oom_cause(error, device),
    )


def keep_snapshot(device: torch.device, path: Path) -> None:
    """Write a snapshot of the allocator for memory_viz, where it recorded its history."""
    history = memory_history_of(device)
    if history is not None:
        with suppress(Exception):  # a record without a snapshot is better than none
            history.dump(path)

"""Columns about the additional time of each pass in the first step: the cost of compilation and autotuning."""

from __future__ import annotations

from functools import partial

from lm_profiler.analysis.steps.summaries import first_step
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import RecordError
from lm_profiler.report.tables.column import Column, asked_column

_PASSES = ("forward", "backward")


def first_step_columns() -> list[Column]:
    """Return a column for each pass, and one for both without compilation."""
    columns = []
    for phase in _PASSES:
        title = f"first {phase}, extra"
        meaning = (
            f"how much longer {phase} takes in the first step than in measured steps: "
            "autotuning, compilation, first allocations"
        )
        extra_s = partial(_excess_of_first_step_s, phase)
        name = f"first_{phase}_extra_s"
        columns.append(asked_column(name, title, meaning, extra_s, "ms"))
    meaning = (
        "how much longer forward and backward take in the first step than in measured steps, without the time of "
        "torch.compile: autotuning of kernels, and first allocations"
    )
    columns.append(
        asked_column("autotuning_s", "autotuning", meaning, _autotuning_s, "ms")
    )
    return columns


def _autotuning_s(entry: Entry) -> float | None:
    """Return the additional time of both passes in the first step, without compilation; None if it is unknown.

    The time of compilation is known only for the warm-up, so the first step has to be part of it.
    """
    if entry.record is None or entry.record.warmup_compile_s is None:
        return None
    forward_extra_s = _excess_of_first_step_s("forward", entry)
    if forward_extra_s is None:
        return None
    # There is no backward in a validation.
    backward_extra_s = _excess_of_first_step_s("backward", entry) or 0.0
    extra_s = forward_extra_s + backward_extra_s
    return max(extra_s - entry.record.warmup_compile_s, 0.0)


def _excess_of_first_step_s(phase: str, entry: Entry) -> float | None:
    """Return the additional time of ``phase`` in the first step over its mean; None if either is unknown."""
    if entry.record is None:
        return None
    mean_s = TIMES[phase].get(entry.record)
    try:
        row = first_step(entry)
    except (OSError, RecordError):
        return None
    if mean_s is None or row is None:
        return None
    return float(row.time(phase) - mean_s)

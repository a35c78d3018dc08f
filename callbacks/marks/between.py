"""Names what took time between measured steps: validation, checkpoints, the turn of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lm_profiler.measure.clocks.steps import OUTSIDE, StepMarks
from lm_profiler.record.run import BetweenSteps

VALIDATION, EPOCH, CHECKPOINT, INSTRUMENTS = "validation", "epoch", "checkpoint", "instruments"


class Passed(NamedTuple):
    """Something that happened outside of every phase; both ends are equal where only its beginning is known."""

    begin_ns: int
    end_ns: int
    what: str


def outside_of(step: StepMarks, last_ns: int | None) -> list[tuple[int, int]]:
    """Return the spans in which the loop was in no step: since ``last_ns``, where the last one ended, and amid this."""
    ends = [*step.host_ns[1:], step.host_ns[-1]]
    spans = [(begin, end) for code, begin, end in zip(step.codes, step.host_ns, ends, strict=True) if code == OUTSIDE]
    return [*([] if last_ns is None else [(last_ns, step.host_ns[0])]), *spans]


def between_steps(
    outside: Sequence[tuple[int, int]], within: tuple[int, int], passed: Sequence[Passed]
) -> list[BetweenSteps]:
    """Return what took time in the spans ``outside`` of steps, the longest first; checkpoints also from amid steps.

    ``within`` are the instants between which steps were measured. A span counts as validation where that began in it,
    else as the turn of an epoch where one began in it, else as our own. Time of a checkpoint counts as that alone.
    """
    seconds: dict[str, float] = {}
    times: dict[str, int] = {}
    saved = [event for event in passed if event.what == CHECKPOINT and within[0] <= event.begin_ns < within[1]]
    for begin_ns, end_ns in outside:
        inside = [event for event in passed if begin_ns <= event.begin_ns <= end_ns]
        kinds = {event.what for event in inside}
        what = VALIDATION if VALIDATION in kinds else EPOCH if EPOCH in kinds else INSTRUMENTS
        saving_ns = sum(min(event.end_ns, end_ns) - event.begin_ns for event in inside if event in saved)
        seconds[what] = seconds.get(what, 0.0) + (end_ns - begin_ns - saving_ns) * 1e-9
        times[what] = times.get(what, 0) + 1
    if saved:
        seconds[CHECKPOINT] = sum(event.end_ns - event.begin_ns for event in saved) * 1e-9
        times[CHECKPOINT] = len(saved)
    between = [BetweenSteps(what=what, seconds=s, times=times[what]) for what, s in seconds.items() if s > 0.0]
    return sorted(between, key=lambda each: -each.seconds)

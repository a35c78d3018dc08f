"""Activities outside the phases of a run's steps, and their long-run cost per step.

A few measured steps may contain no validation, or more starts of epochs than average. So it is counted from
the first step of the run to its last one, in all stages, and how often it comes is taken from when it came last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from lm_profiler.analysis.watch.ledger import CHECKPOINTS, NamedSpan, SpansInOrder
from lm_profiler.record.run_record import (
    CHECKPOINT,
    EPOCH,
    FIRST_BATCH,
    FIRST_STEP,
    TRAIN_DATALOADER,
    VALIDATION,
    OutsideSteps,
)

# in later stages what passes is traced or timed, and takes longer
TIMED_STAGES = ("warmup", "measure")

_INSTRUMENTS = "instruments"


class RunStep(NamedTuple):
    """One step of any stage."""

    stage: str
    begin_ns: int
    end_ns: int
    data_s: float  # how long it waited for its batches, on the host
    # spans within the step in which the loop had left it
    away_ns: Sequence[tuple[int, int]] = ()
    other_s: float = 0.0  # how long the host was in no phase

    @property
    def rest_s(self) -> float:
        """The seconds in which the loop was in the step and did not wait for a batch."""
        away_ns = sum(end_ns - begin_ns for begin_ns, end_ns in self.away_ns)
        return (self.end_ns - self.begin_ns - away_ns) * 1e-9 - self.data_s


class _Kind(NamedTuple):
    what: str
    owner: str | None = None
    in_step: bool = False


class _Event(NamedTuple):
    seconds: float
    steps_before: int
    is_timed: bool  # whether it came in a stage whose times count


def outside_steps(
    steps: Sequence[RunStep],
    events: Sequence[NamedSpan],
    own_spans: Sequence[tuple[int, int]],
) -> list[OutsideSteps]:
    """Return what took time outside the phases of ``steps``, the costliest per mean step first.

    Such as validations, checkpoints and hooks.

    ``events`` are the moments at which the loop left its steps, and the spans of checkpoints and hooks. ``own_spans``
    are those in which our instruments worked between steps.
    """
    if not steps:
        return []
    kinds: defaultdict[_Kind, list[_Event]] = defaultdict(list)
    # A run may have ten thousand steps and as many events: each step looks only at those that began in it.
    events_in_order = SpansInOrder(events)
    own_spans_in_order = SpansInOrder(
        [NamedSpan(*span, _INSTRUMENTS) for span in own_spans]
    )
    first_steps = _first_steps_of_epochs(steps, events_in_order)
    later_steps = []
    for number, step in enumerate(steps):
        if number not in first_steps:
            later_steps.append(step)
    usual_data_s = median(step.data_s for step in later_steps)
    usual_rest_s = median(step.rest_s for step in later_steps)
    usual_other_s = median(step.other_s for step in steps)
    for number, step in enumerate(steps):
        is_timed = step.stage in TIMED_STAGES
        gaps = list(step.away_ns)
        if number:
            gaps.insert(0, (steps[number - 1].end_ns, step.begin_ns))
        for gap in gaps:
            instruments_ns = 0
            for span in own_spans_in_order.around(*gap):
                instruments_ns += _overlap_ns(gap, span)
            gap_events = events_in_order.beginning(*gap)
            by_kind = _seconds_by_kind(gap, gap_events, instruments_ns)
            for kind, seconds in by_kind.items():
                kinds[kind].append(
                    _Event(
                        seconds=seconds, steps_before=max(number, 1), is_timed=is_timed
                    )
                )
        for span in events_in_order.beginning(step.begin_ns, step.end_ns):
            if span.what == CHECKPOINTS and _is_within_step(span, step):
                seconds = _checkpoint_s(span, step, usual_other_s)
                checkpoint = _Event(
                    seconds=seconds, steps_before=number + 1, is_timed=is_timed
                )
                kinds[_Kind(CHECKPOINT, in_step=True)].append(checkpoint)
        if number in first_steps:
            excess_s = max(step.data_s - usual_data_s, 0.0)
            first_batch = _Event(
                seconds=excess_s, steps_before=number, is_timed=is_timed
            )
            kinds[_Kind(FIRST_BATCH, in_step=True)].append(first_batch)
            # such as the copies of memory that new workers share until one of the two writes to it
            excess_s = max(step.rest_s - usual_rest_s, 0.0)
            first_step = _Event(
                seconds=excess_s, steps_before=number, is_timed=is_timed
            )
            kinds[_Kind(FIRST_STEP, in_step=True)].append(first_step)
    costs = []
    for kind, kind_events in kinds.items():
        if kind.what != _INSTRUMENTS:
            costs.append(_long_run_cost(kind, kind_events, len(steps)))
    return sorted(costs, key=lambda cost: cost.per_step_s, reverse=True)


def _seconds_by_kind(
    gap: tuple[int, int], events: Sequence[NamedSpan], instruments_ns: int
) -> Mapping[_Kind, float]:
    """Return the seconds of each kind in a gap between steps; a span's own are those without spans inside of it.

    ``events`` are the moments and spans that begin in the gap, in which our instruments worked for ``instruments_ns``.
    """
    begin_ns, end_ns = gap
    spans = [event for event in events if event.ns]
    seconds: defaultdict[_Kind, float] = defaultdict(float)
    rest_ns = end_ns - begin_ns - instruments_ns
    for span in spans:
        inner_ns = 0
        for inner in spans:
            if inner is not span and _contains(span, inner):
                inner_ns += inner.ns
        own_ns = max(span.ns - inner_ns, 0)
        seconds[_kind_of(span)] += own_ns * 1e-9
        rest_ns -= own_ns
    moments = {event.what for event in events if not event.ns}
    rest = _INSTRUMENTS
    if VALIDATION in moments:
        rest = VALIDATION
    elif EPOCH in moments:
        rest = EPOCH
    seconds[_Kind(rest)] += max(rest_ns, 0) * 1e-9
    return seconds


def _kind_of(span: NamedSpan) -> _Kind:
    if span.what == CHECKPOINTS:
        return _Kind(CHECKPOINT)
    if span.what.endswith(f".{TRAIN_DATALOADER}"):
        return _Kind(TRAIN_DATALOADER, owner=span.what)
    return _Kind(span.what, owner=span.what)


def _overlap_ns(gap: tuple[int, int], span: NamedSpan) -> int:
    begin_ns, end_ns = gap
    return max(min(end_ns, span.end_ns) - max(begin_ns, span.begin_ns), 0)


def _contains(outer: NamedSpan, inner: NamedSpan) -> bool:
    return outer.begin_ns <= inner.begin_ns and inner.end_ns <= outer.end_ns


def _is_within_step(span: NamedSpan, step: RunStep) -> bool:
    is_in_loop = not any(
        begin_ns <= span.begin_ns < end_ns for begin_ns, end_ns in step.away_ns
    )
    return step.begin_ns <= span.begin_ns < step.end_ns and is_in_loop


def _checkpoint_s(span: NamedSpan, step: RunStep, usual_other_s: float) -> float:
    """Return what a checkpoint within ``step`` took, with what its callback did around ``span``, the writing.

    It deletes older checkpoints, for example. What another callback does in the same step is not told apart, so
    at most as much again as the writing counts.
    """
    written_s = span.ns * 1e-9
    excess_s = step.other_s - usual_other_s
    return min(max(written_s, excess_s), 2.0 * written_s)


def _first_steps_of_epochs(steps: Sequence[RunStep], events: SpansInOrder) -> set[int]:
    """Return the indices of steps that begin an epoch; not the run's first one, of which it is not known."""
    first_steps = set()
    for number in range(1, len(steps)):
        gap = events.beginning(steps[number - 1].end_ns, steps[number].begin_ns)
        if any(event.what == EPOCH for event in gap):
            first_steps.add(number)
    return first_steps


def _long_run_cost(kind: _Kind, events: Sequence[_Event], steps: int) -> OutsideSteps:
    """Return the cost of the ``events`` of one kind per step, as often as they come in the long run."""
    seconds = [event.seconds for event in events]
    timed_s = [event.seconds for event in events if event.is_timed]
    # It came so often up to the last time; and after that, for as long as the run went on, not again.
    steps_before_last = events[-1].steps_before
    per_step = min(
        len(events) / max(steps_before_last, 1), 1.0 / max(steps - steps_before_last, 1)
    )
    if len(events) > steps:  # several in each step
        per_step = len(events) / steps
    return OutsideSteps(
        what=kind.what,
        owner=kind.owner,
        in_step=kind.in_step,
        seconds=sum(seconds),
        times=len(seconds),
        per_step_s=per_step * fmean(timed_s or seconds),
    )

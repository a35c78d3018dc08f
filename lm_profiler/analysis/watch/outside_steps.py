"""Finds activities outside the phases of a run's steps, and their cost per step in the long run.

The few measured steps may contain no validation, or more epoch boundaries than average. So activities are counted from
the first step of the run to the last, in all stages, and their frequency is estimated from when they last occurred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from lm_profiler.analysis.watch.ledger import (
    CHECKPOINTS,
    LAST_BATCH,
    NamedSpan,
    SpansInOrder,
)
from lm_profiler.record.run_record import (
    CHECKPOINT,
    EPOCH,
    FIRST_BATCH,
    FIRST_STEP,
    TRAIN_DATALOADER,
    VALIDATION,
    OutsideSteps,
)

# In later stages, tracing and detailed timing make activities longer.
TIMED_STAGES = ("warmup", "measure")

_INSTRUMENTS = "instruments"  # the kind of the time in which this profiler worked


class RunStep(NamedTuple):
    """One step of any stage. All times are on the host's clock."""

    stage: str
    begin_ns: int
    end_ns: int
    data_s: float  # how long the step waited for its batches
    # begin and end of each interval in which the loop had left the step, for example for validation
    away_ns: Sequence[tuple[int, int]] = ()
    other_s: float = 0.0  # the time in no phase

    @property
    def rest_s(self) -> float:
        """The seconds in which the loop was in the step and did not wait for a batch."""
        away_ns = sum(end_ns - begin_ns for begin_ns, end_ns in self.away_ns)
        return (self.end_ns - self.begin_ns - away_ns) * 1e-9 - self.data_s


class _Kind(NamedTuple):
    """A kind of activity, as ``OutsideSteps`` names it."""

    what: str
    owner: str | None = None
    in_step: bool = False  # whether its time is part of a step's time


class _Event(NamedTuple):
    """One occurrence of an activity."""

    seconds: float
    steps_before: int  # number of steps of the run before it
    is_timed: bool  # whether it occurred in one of ``TIMED_STAGES``


def outside_steps(
    steps: Sequence[RunStep],
    events: Sequence[NamedSpan],
    own_spans: Sequence[tuple[int, int]],
) -> list[OutsideSteps]:
    """Return the activities outside the phases of ``steps``, such as validations and hooks, the costliest first.

    Args:
        steps: all steps of the run.
        events: the moments at which the loop left its steps, and the spans of checkpoints and hooks.
        own_spans: begin and end of each interval between steps in which this profiler worked.
    """
    if not steps:
        return []
    occurrences: defaultdict[_Kind, list[_Event]] = defaultdict(list)
    # There may be ten thousand steps and as many events, so the events of a step must be found quickly.
    events_in_order = SpansInOrder(events)
    own_spans_in_order = SpansInOrder(
        [NamedSpan(*span, _INSTRUMENTS) for span in own_spans]
    )
    first_steps = first_steps_of_epochs(steps, events_in_order)
    usual = _usual_step(steps, first_steps)
    # The excess is that over the steps that begin no epoch. These must be at least half of all steps.
    is_excess_known = 2 * len(first_steps) <= len(steps)
    for index, step in enumerate(steps):
        is_timed = step.stage in TIMED_STAGES
        # 1. the time outside any step: before this one, and while the loop had left it
        gaps = list(step.away_ns)
        if index:
            gap_before_step = (steps[index - 1].end_ns, step.begin_ns)
            gaps.insert(0, gap_before_step)
        for gap in gaps:
            instruments_ns = 0
            for span in own_spans_in_order.around(*gap):
                instruments_ns += _overlap_ns(gap, span)
            gap_events = events_in_order.beginning(*gap)
            seconds_by_kind = _seconds_by_kind(gap, gap_events, instruments_ns)
            for kind, seconds in seconds_by_kind.items():
                # The gaps of the first step lie within it, so one step had begun before them.
                steps_before = max(index, 1)
                occurrences[kind].append(_Event(seconds, steps_before, is_timed))

        # 2. checkpoints that are written within the step
        for span in events_in_order.beginning(step.begin_ns, step.end_ns):
            if span.what == CHECKPOINTS and _is_within_step(span, step):
                checkpoint_s = _checkpoint_s(span, step, usual.other_s)
                checkpoint = _Kind(CHECKPOINT, in_step=True)
                event = _Event(checkpoint_s, steps_before=index + 1, is_timed=is_timed)
                occurrences[checkpoint].append(event)

        # 3. the excess of a step that begins an epoch
        if is_excess_known and index in first_steps:
            for kind, seconds in _excess_of_first_step(step, usual).items():
                occurrences[kind].append(_Event(seconds, index, is_timed))

    costs = []
    for kind, kind_events in occurrences.items():
        if not _is_due_to_instruments(kind, kind_events):
            costs.append(_long_run_cost(kind, kind_events, len(steps)))
    return sorted(costs, key=lambda cost: cost.per_step_s, reverse=True)


def _is_due_to_instruments(kind: _Kind, events: Sequence[_Event]) -> bool:
    """Return whether this profiler may have caused all the time of ``events``, which are of one kind.

    Memory readings, traces and FLOP counts make a step many times as long. If they were on in all the steps that began
    an epoch, the excess of these steps says nothing about the program.
    """
    if kind.what == FIRST_STEP:
        return not any(event.is_timed for event in events)
    return kind.what == _INSTRUMENTS


class _UsualStep(NamedTuple):
    """The median times of steps."""

    data_s: float  # without first steps of epochs
    rest_s: float  # without first steps of epochs
    other_s: float


def _excess_of_first_step(step: RunStep, usual: _UsualStep) -> dict[_Kind, float]:
    """Return by how many seconds the first step of an epoch was longer: waiting for its batch, and in the rest.

    The rest may be longer, for example, because memory that new workers share with this process is copied when one of
    them writes to it.
    """
    batch_s = max(step.data_s - usual.data_s, 0.0)
    rest_s = max(step.rest_s - usual.rest_s, 0.0)
    return {
        _Kind(FIRST_BATCH, in_step=True): batch_s,
        _Kind(FIRST_STEP, in_step=True): rest_s,
    }


def _usual_step(steps: Sequence[RunStep], first_steps: set[int]) -> _UsualStep:
    """Return the median times of ``steps``; ``first_steps`` are the indices of those that begin an epoch."""
    later_steps = []
    for index, step in enumerate(steps):
        if index not in first_steps:
            later_steps.append(step)
    return _UsualStep(
        data_s=median(step.data_s for step in later_steps),
        rest_s=median(step.rest_s for step in later_steps),
        other_s=median(step.other_s for step in steps),
    )


def _seconds_by_kind(
    gap: tuple[int, int], events: Sequence[NamedSpan], instruments_ns: int
) -> Mapping[_Kind, float]:
    """Divide the time of a gap, in which the loop was in no step, among kinds of activities; return their seconds.

    Args:
        gap: its start and its end.
        events: the moments and spans that begin in it.
        instruments_ns: how long this profiler worked in it.
    """
    begin_ns, end_ns = gap
    spans = [event for event in events if event.ns]
    seconds: defaultdict[_Kind, float] = defaultdict(float)
    rest_ns = end_ns - begin_ns - instruments_ns
    for span in spans:
        inner_ns = 0  # spans within this one
        for inner in spans:
            if inner is not span and _contains(span, inner):
                inner_ns += inner.ns
        own_ns = max(span.ns - inner_ns, 0)
        seconds[_kind_of(span)] += own_ns * 1e-9
        rest_ns -= own_ns
    # The rest, which is in no span, belongs to the reason for which the loop left its steps. Without a reason it counts
    # as time of this profiler, which is not reported.
    moments = {event.what for event in events if not event.ns}
    kind_of_rest = _INSTRUMENTS
    if VALIDATION in moments:
        kind_of_rest = VALIDATION
    elif EPOCH in moments and LAST_BATCH not in moments:
        kind_of_rest = EPOCH
    seconds[_Kind(kind_of_rest)] += max(rest_ns, 0) * 1e-9
    return seconds


def _kind_of(span: NamedSpan) -> _Kind:
    """Return the kind of activity of ``span``, whose name is that of a hook except for checkpoints."""
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
    """Return whether ``span`` begins in ``step`` while the loop has not left it, for example for validation."""
    is_in_loop = not any(
        begin_ns <= span.begin_ns < end_ns for begin_ns, end_ns in step.away_ns
    )
    return step.begin_ns <= span.begin_ns < step.end_ns and is_in_loop


def _checkpoint_s(span: NamedSpan, step: RunStep, usual_other_s: float) -> float:
    """Return the seconds of a checkpoint within ``step``: writing it (``span``), and other work of its callback.

    The callback may delete older checkpoints, for example. The excess of ``other`` in this step includes that, but also
    the work of other callbacks, so it counts only up to twice the time of the writing.
    """
    writing_s = span.ns * 1e-9
    excess_s = step.other_s - usual_other_s
    return min(max(writing_s, excess_s), 2.0 * writing_s)


def first_steps_of_epochs(steps: Sequence[RunStep], events: SpansInOrder) -> set[int]:
    """Return the indices of the steps that begin an epoch, without the run's first step.

    An epoch may begin within a step that has several batches. After the end of its data, a loop may continue with a
    batch that it had asked for in advance: the step with this batch belongs to the old epoch.
    """
    first_steps = set()
    for index in range(1, len(steps)):
        gap_before_step = (steps[index - 1].end_ns, steps[index].begin_ns)
        for gap in (gap_before_step, *steps[index].away_ns):
            moments = {event.what for event in events.beginning(*gap)}
            if EPOCH in moments and LAST_BATCH not in moments:
                first_steps.add(index)
    return first_steps


def _long_run_cost(kind: _Kind, events: Sequence[_Event], steps: int) -> OutsideSteps:
    """Return the cost per step of the ``events`` of one kind, with the frequency that they have in the long run."""
    # only these durations are those of an undisturbed run, if there are any
    timed_s = [event.seconds for event in events if event.is_timed]
    mean_s = fmean(timed_s or [event.seconds for event in events])
    # The frequency is that up to the last event, but at most one event in the steps after it, which had none.
    steps_before_last = events[-1].steps_before
    steps_after_last = steps - steps_before_last
    frequency_until_last = len(events) / max(steps_before_last, 1)
    per_step = min(frequency_until_last, 1.0 / max(steps_after_last, 1))
    if len(events) > steps:  # several in each step
        per_step = len(events) / steps
    return OutsideSteps(
        what=kind.what,
        owner=kind.owner,
        in_step=kind.in_step,
        seconds=len(events) * mean_s,
        times=len(events),
        per_step_s=per_step * mean_s,
    )

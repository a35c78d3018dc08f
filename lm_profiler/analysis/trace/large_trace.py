"""Selects the first steps of a trace that is too large for the memory: as many steps as fit.

A relevant event takes about 300 bytes while it is analysed. A trace with too many of them is read twice: first to find
its steps and how many events they have, and then to keep the events of the selected steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.analysis.trace.packed_trace import (
    DamagedEvent,
    Range,
    Rows,
    is_on_device,
    is_relevant,
    nanoseconds,
    outermost,
    span_of,
    start_of,
)
from lm_profiler.analysis.trace.trace_file import Event, OperatorEvents

MOST_EVENTS = 400_000  # at 450,000 the process took 312 MB

# Kernels run after their launch. So those that begin up to this share of the selected time, or this long, after it are
# kept too.
_LATE_SHARE = 0.1
_LATE_NS = 50_000_000


class TooManyEvents(Exception):
    """Raised if a trace has more relevant events than fit into the memory."""


class TracePart(NamedTuple):
    """The part of a trace that is read: its first steps, or the beginning of a step that is too large itself."""

    begin: int
    end: int
    steps: list[Range]
    all_steps: int  # number of steps of the whole trace
    has_whole_steps: bool  # False if it is only the beginning of a step

    @property
    def words(self) -> str:
        """A description of the part, for the user."""
        shown_part = "only the beginning of the trace is shown, as one step"
        if self.has_whole_steps:
            shown_part = (
                f"only the first {len(self.steps)} of {self.all_steps} steps are shown"
            )
        return f"{shown_part}, because the trace has too many events"


# Events are counted in at most this many stretches of time, so that the memory does not grow with the file.
_MOST_STRETCHES = 200_000
_MOST_NEW_MOMENTS = 2 * _MOST_STRETCHES


@dataclass
class _EventCounts:
    """Counts how many events begin in each stretch of time: a histogram whose bins become longer as events are
    added."""

    shift: int = 0  # a stretch is 2 ** shift nanoseconds long
    # moments that have not been counted yet
    new_moments_ns: array[int] = field(default_factory=lambda: array("q"))
    # the stretches in which events begin, in order: their numbers (the moment divided by the length), and the counts
    stretches: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    counts: Rows = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, moments_ns: Sequence[int]) -> None:
        self.new_moments_ns.extend(moments_ns)
        if len(self.new_moments_ns) > _MOST_NEW_MOMENTS:
            self.merge()

    def merge(self) -> None:
        """Add the new moments to the counts; double the length of the stretches while there are too many of them."""
        moments = np.array(self.new_moments_ns, np.int64)
        self.new_moments_ns = array("q")
        stretches = np.concatenate((self.stretches, moments >> self.shift))
        counts = np.concatenate((self.counts, np.ones_like(moments)))
        self.stretches, self.counts = _sums_of_stretches(stretches, counts)
        while len(self.stretches) > _MOST_STRETCHES:
            self.shift += 1
            self.stretches, self.counts = _sums_of_stretches(
                self.stretches >> 1, self.counts
            )

    def events_before(self, moment_ns: int) -> int:
        """Return how many events begin before the stretch that contains ``moment_ns``."""
        end = int(np.searchsorted(self.stretches, moment_ns >> self.shift))
        return int(self.counts[:end].sum())

    def moment_of(self, number: int) -> int:
        """Return when the stretch of event ``number`` (from 0) begins; that of the last event if there are fewer."""
        index = int(np.searchsorted(np.cumsum(self.counts), number, side="right"))
        last_index = len(self.stretches) - 1
        return int(self.stretches[min(index, last_index)]) << self.shift


def _sums_of_stretches(stretches: Rows, counts: Rows) -> tuple[Rows, Rows]:
    """Return the distinct ``stretches`` in order, and the sum of the ``counts`` of each."""
    distinct, index = np.unique(stretches, return_inverse=True)
    return distinct, np.bincount(index, weights=counts).astype(np.int64)


@dataclass
class _Survey:
    """The steps of a trace, and a histogram of the times at which its events begin."""

    steps: list[Range] = field(default_factory=list)
    event_counts: _EventCounts = field(default_factory=_EventCounts)


def limited_events(events: Iterable[Event], most_events: int) -> Iterator[Event]:
    """Yield ``events``; raise TooManyEvents once more than ``most_events`` of them are relevant."""
    count = 0
    for event in events:
        if isinstance(event, OperatorEvents):
            count += len(event.starts)
        elif is_relevant(event):
            count += 1
        if count > most_events:
            raise TooManyEvents
        yield event


def chosen_part(
    events: Iterable[Event], is_step: Callable[[str], bool], most_events: int
) -> TracePart:
    """Return the first steps of a trace that together have at most ``most_events``, or the beginning of the first step.

    Raises:
        ValueError: no event has a start.
    """
    survey = _Survey()
    for event in events:
        _add_to_survey(survey, event, is_step)
    event_counts = survey.event_counts
    event_counts.merge()
    if not len(event_counts.stretches):
        raise ValueError("no event has a possible start")
    steps = outermost(survey.steps)
    begin = steps[0].start if steps else event_counts.moment_of(number=0)
    events_before = event_counts.events_before(begin)

    fitting_steps = []
    for step in steps:
        events_until_end = event_counts.events_before(step.end) - events_before
        if events_until_end > most_events:
            break
        fitting_steps.append(step)
    if fitting_steps:
        end = max(step.end for step in fitting_steps)
        return TracePart(begin, end, fitting_steps, len(steps), has_whole_steps=True)
    end = event_counts.moment_of(events_before + most_events)
    steps_shown = [Range(begin, end, "the beginning")]
    return TracePart(
        begin, end, steps=steps_shown, all_steps=len(steps), has_whole_steps=False
    )


def _add_to_survey(
    survey: _Survey, event: Event, is_step: Callable[[str], bool]
) -> None:
    """Count when an event begins, and keep its range if it is a step."""
    if isinstance(event, OperatorEvents):
        survey.event_counts.add(nanoseconds(event.starts).tolist())
        return
    if not is_relevant(event):
        return
    try:
        survey.event_counts.add([start_of(event)])
        name = event.get("name")
        is_range = event["cat"] == "user_annotation" and isinstance(name, str)
        if is_range and is_step(name):
            start, length = span_of(event)
            if length > 0:
                survey.steps.append(Range(start, start + length, name))
    except DamagedEvent:
        return  # ``PackedTrace`` counts the damage


def events_in_part(events: Iterable[Event], part: TracePart) -> Iterator[Event]:
    """Yield the ``events`` that begin in ``part``, and the kernels that begin soon after it."""
    late_ns = max(int(_LATE_SHARE * (part.end - part.begin)), _LATE_NS)
    for event in events:
        if isinstance(event, OperatorEvents):
            yield from _operators_within(event, part)
            continue
        if not is_relevant(event):
            continue
        end = part.end
        if is_on_device(event):
            end += late_ns
        try:
            begins_in_part = part.begin <= start_of(event) <= end
        except DamagedEvent:
            begins_in_part = True  # so that ``PackedTrace`` counts the damage
        if begins_in_part:
            yield event


def _operators_within(
    events: OperatorEvents, part: TracePart
) -> Iterator[OperatorEvents]:
    """Yield the operators that begin in ``part``; nothing if there are none."""
    starts = nanoseconds(events.starts)
    chosen = np.flatnonzero((part.begin <= starts) & (starts <= part.end)).tolist()
    if not chosen:
        return
    columns: list[Any] = []
    for column in events:
        columns.append([column[index] for index in chosen])
    yield OperatorEvents(*columns)

"""Chooses a part of a trace that is too large to be kept: its first steps, as many as fit.

An event that is needed takes some 300 bytes once it is analysed. A trace with more of them is read twice: once for its
steps and the moments of its events, and once for the events of the steps that were chosen.
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
    may_count,
    nanoseconds,
    span_of,
    start_of,
)
from lm_profiler.analysis.trace.trace_file import Event, OperatorEvents

MOST_EVENTS = 400_000  # at 450,000 the process took 312 MB

# Kernels run after their launch: those that begin this long after the chosen steps are kept as well.
_LATE_SHARE, _LATE_NS = 0.1, 50_000_000


class TooManyEvents(Exception):
    """A trace has more events that count than can be kept."""


class TracePart(NamedTuple):
    """The part of a trace that is read: from when to when, and its steps, of which the whole trace has ``all_steps``.

    Without ``has_whole_steps`` it is the beginning of one step.
    """

    begin: int
    end: int
    steps: list[Range]
    all_steps: int
    has_whole_steps: bool

    @property
    def words(self) -> str:
        """What is shown, for people."""
        shown_part = "only its beginning is shown, as one step"
        if self.has_whole_steps:
            shown_part = (
                f"only its first {len(self.steps)} of {self.all_steps} steps are shown"
            )
        return f"{shown_part}, because it has too many events"


# Moments are kept in at most this many stretches of time, so that the memory does not grow with the file.
_MOST_STRETCHES = 200_000
_MOST_NEW_MOMENTS = 2 * _MOST_STRETCHES


@dataclass
class _EventCounts:
    """How many events begin in each stretch of time; stretches are one nanosecond long, of many events longer."""

    shift: int = 0  # a stretch takes 2 ** shift nanoseconds
    # moments that were not counted yet
    new_moments_ns: array[int] = field(default_factory=lambda: array("q"))
    # the numbers of the stretches in which events begin, in order, and how many
    stretches: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    counts: Rows = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, moments_ns: Sequence[int]) -> None:
        self.new_moments_ns.extend(moments_ns)
        if len(self.new_moments_ns) > _MOST_NEW_MOMENTS:
            self.merge()

    def merge(self) -> None:
        """Count the new moments with the others, in longer stretches if there would be too many."""
        moments = np.array(self.new_moments_ns, np.int64)
        self.new_moments_ns = array("q")
        stretches = np.concatenate((self.stretches, moments >> self.shift))
        counts = np.concatenate((self.counts, np.ones_like(moments)))
        self.stretches, self.counts = _summed(stretches, counts)
        while len(self.stretches) > _MOST_STRETCHES:
            self.shift += 1
            self.stretches, self.counts = _summed(self.stretches >> 1, self.counts)

    def events_before(self, moment_ns: int) -> int:
        """Return how many events begin before ``moment_ns``, without those of its own stretch."""
        end = int(np.searchsorted(self.stretches, moment_ns >> self.shift))
        return int(self.counts[:end].sum())

    def moment_of(self, number: int) -> int:
        """Return when the event of this number begins, or its stretch of time; the last one's if there are fewer."""
        index = int(np.searchsorted(np.cumsum(self.counts), number, side="right"))
        last_index = len(self.stretches) - 1
        return int(self.stretches[min(index, last_index)]) << self.shift


def _summed(stretches: Rows, counts: Rows) -> tuple[Rows, Rows]:
    """Return each of ``stretches`` once, in order, with the sum of its ``counts``."""
    once, place = np.unique(stretches, return_inverse=True)
    return once, np.bincount(place, weights=counts).astype(np.int64)


@dataclass
class _Survey:
    """The steps of a trace, and when its events begin."""

    steps: list[Range] = field(default_factory=list)
    event_counts: _EventCounts = field(default_factory=_EventCounts)


def limited_events(events: Iterable[Event], most_events: int) -> Iterator[Event]:
    """Yield ``events``; raise TooManyEvents after ``most_events`` of those that count."""
    count = 0
    for event in events:
        if isinstance(event, OperatorEvents):
            count += len(event.starts)
        elif may_count(event):
            count += 1
        if count > most_events:
            raise TooManyEvents
        yield event


def chosen_part(
    events: Iterable[Event], is_step: Callable[[str], bool], most_events: int
) -> TracePart:
    """Return the first steps of a trace that have ``most_events`` together, or the beginning of its first one.

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
    begin = steps[0].start if steps else event_counts.moment_of(0)
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


def outermost(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges that begin in no other one, by their start."""
    chosen: list[Range] = []
    for annotation in sorted(ranges, key=lambda found: (found.start, -found.end)):
        if not chosen or annotation.start >= chosen[-1].end:
            chosen.append(annotation)
    return chosen


def _add_to_survey(
    survey: _Survey, event: Event, is_step: Callable[[str], bool]
) -> None:
    """Add when an event begins, and its range if that is a step."""
    if isinstance(event, OperatorEvents):
        survey.event_counts.add(nanoseconds(event.starts).tolist())
        return
    if not may_count(event):
        return
    try:
        survey.event_counts.add([start_of(event)])
        name = event.get("name")
        if (
            event["cat"] == "user_annotation"
            and isinstance(name, str)
            and is_step(name)
        ):
            start, length = span_of(event)
            if length > 0:
                survey.steps.append(Range(start, start + length, name))
    except DamagedEvent:
        return


def events_in_part(events: Iterable[Event], part: TracePart) -> Iterator[Event]:
    """Yield those of ``events`` that begin in ``part``, and the kernels that run soon after it."""
    late_ns = max(int(_LATE_SHARE * (part.end - part.begin)), _LATE_NS)
    for event in events:
        if isinstance(event, OperatorEvents):
            yield from _operators_within(event, part)
            continue
        if not may_count(event):
            continue
        end = part.end
        if is_on_device(event):
            end += late_ns
        try:
            begins_in_part = part.begin <= start_of(event) <= end
        except DamagedEvent:
            begins_in_part = True  # it is counted where it is kept
        if begins_in_part:
            yield event


def _operators_within(
    events: OperatorEvents, part: TracePart
) -> Iterator[OperatorEvents]:
    """Yield those of ``events`` that begin in ``part``; nothing if none does."""
    starts = nanoseconds(events.starts)
    chosen = np.flatnonzero((part.begin <= starts) & (starts <= part.end)).tolist()
    if not chosen:
        return
    columns: list[Any] = []
    for column in events:
        columns.append([column[index] for index in chosen])
    yield OperatorEvents(*columns)

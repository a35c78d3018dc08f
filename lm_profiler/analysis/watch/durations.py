"""Judges how long validations, checkpoints and epoch boundaries take: single long ones, and a course that grows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_MOST_DURATIONS = 20  # durations that are compared with
_FEWEST = 3  # durations before anything is reported
_LONG_RATIO = 1.5  # times the median before it
_LONG_AGAINST_LONGEST = 1.25  # times the longest before it
_GREW_RATIO = 1.25  # by which all of the last ``_FEWEST`` are above the reference
_LEAST_S, _LEAST_STEPS = 0.1, 10.0  # seconds and steps below which nothing is reported
_CORRECTED = 0.1  # share by which a course must have moved to be reported again


@dataclass(eq=False, kw_only=True)
class LongDurations:
    """Single durations that are longer than usual, or a course: durations that stay longer than they were."""

    first_step: int
    found_step: int  # the step at which it was found
    at_s: float
    against_s: float  # the usual duration, or the one at the beginning of the course
    now_s: float  # the mean of the long ones, or the duration by now
    is_course: bool = False
    times: int = 1
    excess_s: float = 0.0
    until_step: int | None = None
    is_withdrawn: bool = False  # a course stands for it
    _reported_s: float = 0.0

    @property
    def is_corrected(self) -> bool:
        return abs(self.now_s - self._reported_s) > _CORRECTED * self._reported_s

    def mark_reported(self) -> None:
        self._reported_s = self.now_s


class _Duration(NamedTuple):
    seconds: float
    step: int  # after which it ended
    at_s: float  # when it ended


@dataclass(eq=False)
class Durations:
    """The durations of one kind, as they come."""

    _usual_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=_MOST_DURATIONS)
    )
    _last_durations: deque[_Duration] = field(
        default_factory=lambda: deque(maxlen=_FEWEST)
    )
    # the first ``_FEWEST`` durations, whose median is the reference
    _first_durations_s: list[float] = field(default_factory=list)
    _reference_s: float | None = None
    _long_event: LongDurations | None = None
    _course: LongDurations | None = None
    _changed: list[LongDurations] = field(default_factory=list)

    def add(self, seconds: float, step: int, at_s: float, step_s: float) -> None:
        """Take how long one took, which ended at ``at_s`` after ``step``; a step usually takes ``step_s``."""
        least_s = max(_LEAST_S, _LEAST_STEPS * step_s)
        usual_s = float(np.median(self._usual_s)) if self._usual_s else seconds
        self._last_durations.append(_Duration(seconds, step, at_s))
        if self._follow_course(seconds, step, least_s):
            self._usual_s.append(seconds)
            return

        if not self._is_long_duration(seconds, usual_s, least_s):
            self._usual_s.append(seconds)
            return
        if self._long_event is None:
            self._long_event = LongDurations(
                first_step=step,
                found_step=step,
                at_s=at_s,
                against_s=usual_s,
                now_s=seconds,
            )
        else:
            event = self._long_event
            event.now_s = (event.now_s * event.times + seconds) / (event.times + 1)
            event.times += 1
        self._long_event.excess_s += seconds - usual_s
        self._changed.append(self._long_event)

    def _is_long_duration(self, seconds: float, usual_s: float, least_s: float) -> bool:
        if len(self._usual_s) < _FEWEST or seconds - usual_s < least_s:
            return False
        least_by_longest_s = _LONG_AGAINST_LONGEST * max(self._usual_s)
        return seconds >= max(_LONG_RATIO * usual_s, least_by_longest_s)

    def _follow_course(self, seconds: float, step: int, least_s: float) -> bool:
        """Return whether the durations have grown for good, and keep the event of it up to date."""
        if self._reference_s is None:
            self._first_durations_s.append(seconds)
            if len(self._first_durations_s) == _FEWEST:
                self._reference_s = float(np.median(self._first_durations_s))
            return False
        reference_s = self._reference_s
        course = self._course
        if course is not None:
            course.now_s = seconds
            course.times += 1
            if seconds < _GREW_RATIO * reference_s:
                course.until_step = step
                self._course = None
                self._changed.append(course)
            elif course.is_corrected:
                self._changed.append(course)
            return True
        shortest_s = min(duration.seconds for duration in self._last_durations)
        if shortest_s < _GREW_RATIO * reference_s or seconds - reference_s < least_s:
            return False
        first = self._last_durations[0]
        first_durations_s = self._first_durations_s
        grows_from_start = first_durations_s == sorted(first_durations_s)
        against_s = first_durations_s[0] if grows_from_start else reference_s
        self._course = LongDurations(
            first_step=first.step,
            found_step=step,
            at_s=first.at_s,
            against_s=against_s,
            now_s=seconds,
            is_course=True,
            times=_FEWEST,
        )
        self._changed.append(self._course)
        event = self._long_event
        if event is not None and event.first_step >= first.step:
            event.is_withdrawn = True
            self._changed.append(event)
            self._long_event = None
        return True

    def finish(self) -> None:
        """At the end of the run, report the last duration of a course."""
        if self._course is not None:
            self._changed.append(self._course)

    def take_changed(self) -> list[LongDurations]:
        """Return the events that are new or have changed."""
        changed = []
        for event in self._changed:
            if event not in changed:
                changed.append(event)
                event.mark_reported()
        self._changed = []
        return changed

"""Finds validations, checkpoints and epoch boundaries that take long: single ones, a lasting increase, or all of them.

Validations and checkpoints that always take as long as they do are left out: the program asks for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_MOST_DURATIONS = 20  # the last durations, with which a new one is compared
_FEWEST = 3  # durations that are needed for any comparison
# A single duration is long if it is this many times the median, and this many times the longest, of those before it.
_LONG_RATIO = 1.5
_LONG_AGAINST_LONGEST = 1.25
# Durations have increased for good if each of the last three is this many times the median of the first three.
_GREW_RATIO = 1.25
# an excess below this many seconds, or below the time of this many steps, is not reported
_LEAST_S = 0.1
_LEAST_STEPS = 10.0
# Epoch boundaries are an event (a cost) if there were so many of them, and they take this share of the time.
_FEWEST_COSTLY = 4
_COSTLY_SHARE = 0.05
_LEAST_COSTLY_S = 0.05  # shorter ones are no event, whatever their share
_CORRECTED = 0.1  # a lasting increase is reported again if the duration has changed by this share


@dataclass(eq=False, kw_only=True)
class LongDurations:
    """An event of one of three sorts: single durations that were longer than usual, a drift, or a cost.

    A drift means that the durations have increased for good, a cost that all of them together take much of the time.
    """

    first_step: int
    found_step: int  # the step at which it was found
    at_s: float  # when the first of the durations ended
    # the usual duration; of a drift, the duration at the beginning; None for a cost
    against_s: float | None
    now_s: float  # the mean of the long durations; of a drift, the last duration
    is_drift: bool = False
    times: int = 1  # the number of durations
    # sum over single long durations of the time beyond the usual; of a cost, the sum of all durations
    excess_s: float = 0.0
    # of a cost, the share of the time since the first durations ended
    share: float | None = None
    # the step at which a drift had ended; None: it has not
    until_step: int | None = None
    is_withdrawn: bool = False  # whether a drift includes it
    _reported_s: float = 0.0  # ``now_s`` as it was last reported

    @property
    def should_report_again(self) -> bool:
        """Whether the duration differs much from the one that was last reported."""
        return abs(self.now_s - self._reported_s) > _CORRECTED * self._reported_s

    def mark_reported(self) -> None:
        self._reported_s = self.now_s


class _Duration(NamedTuple):
    seconds: float
    step: int  # the step after which it ended
    at_s: float  # the time at which it ended


@dataclass(eq=False)
class _TotalCost:
    """The cost of all durations of one kind after the first ones."""

    event: LongDurations | None = None  # None until it is much of the time
    _began_s: float | None = None  # when the first durations were handed over
    _times: int = 0
    _seconds: float = 0.0

    def add(self, seconds: float, step: int, at_s: float) -> list[LongDurations]:
        """Add a duration that ended at ``at_s``, and update the event; return it in a list if it is new."""
        # The first call begins the time of which the share is computed. Several durations may come with one ``at_s``.
        if self._began_s is None or at_s <= self._began_s:
            self._began_s = at_s
            return []
        self._times += 1
        self._seconds += seconds
        mean_s = self._seconds / self._times
        share = self._seconds / (at_s - self._began_s)
        is_costly = share >= _COSTLY_SHARE and mean_s >= _LEAST_COSTLY_S
        new_events: list[LongDurations] = []
        if self.event is None:
            if self._times < _FEWEST_COSTLY or not is_costly:
                return []
            self.event = LongDurations(
                first_step=step,
                found_step=step,
                at_s=at_s,
                against_s=None,
                now_s=mean_s,
            )
            new_events.append(self.event)
        self.event.now_s = mean_s
        self.event.times = self._times
        self.event.excess_s = self._seconds
        self.event.share = share
        self.event.is_withdrawn = not is_costly
        return new_events


@dataclass(eq=False)
class Durations:
    """Follows the durations of one kind, such as validations."""

    # whether durations that all take long are an event
    reports_cost: bool = False
    _total: _TotalCost = field(default_factory=lambda: _TotalCost())
    # the last durations that were not long
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
    _drift: LongDurations | None = None
    _changed: list[LongDurations] = field(default_factory=list)

    def add(self, seconds: float, step: int, at_s: float, step_s: float) -> None:
        """Add a duration that ended at ``at_s`` after ``step``; a step usually takes ``step_s``."""
        least_s = max(_LEAST_S, _LEAST_STEPS * step_s)
        usual_s = float(np.median(self._usual_s)) if self._usual_s else seconds
        self._last_durations.append(_Duration(seconds, step, at_s))
        if self.reports_cost:
            self._changed += self._total.add(seconds, step, at_s)
        if self._update_drift(seconds, step, least_s):
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
        """Return whether a duration is much longer than the usual ones, by at least ``least_s``."""
        if len(self._usual_s) < _FEWEST or seconds - usual_s < least_s:
            return False
        least_by_longest_s = _LONG_AGAINST_LONGEST * max(self._usual_s)
        return seconds >= max(_LONG_RATIO * usual_s, least_by_longest_s)

    def _update_drift(self, seconds: float, step: int, least_s: float) -> bool:
        """Update the drift, or begin one if the durations have increased for good; return whether there is one.

        The drift that this duration ends counts, too. ``least_s`` is the least increase in seconds that is worth an
        event.
        """
        if self._reference_s is None:
            self._first_durations_s.append(seconds)
            if len(self._first_durations_s) == _FEWEST:
                self._reference_s = float(np.median(self._first_durations_s))
            return False
        limit_s = _GREW_RATIO * self._reference_s
        if self._drift is not None:
            self._continue_drift(self._drift, seconds, step, limit_s)
            return True
        shortest_s = min(duration.seconds for duration in self._last_durations)
        if shortest_s < limit_s or seconds - self._reference_s < least_s:
            return False
        self._begin_drift(seconds, step, self._reference_s)
        return True

    def _continue_drift(
        self, drift: LongDurations, seconds: float, step: int, limit_s: float
    ) -> None:
        """Add a duration to ``drift``, which ends if the duration is below ``limit_s``."""
        drift.now_s = seconds
        drift.times += 1
        has_ended = seconds < limit_s
        if has_ended:
            drift.until_step = step
            self._drift = None
        if has_ended or drift.should_report_again:
            self._changed.append(drift)

    def _begin_drift(self, seconds: float, step: int, reference_s: float) -> None:
        """Begin a drift with the last durations, and withdraw the event of single long durations that it includes."""
        first = self._last_durations[0]
        # If the first durations of the run increased already, the very first one is the reference.
        first_durations_s = self._first_durations_s
        grows_from_start = first_durations_s == sorted(first_durations_s)
        against_s = first_durations_s[0] if grows_from_start else reference_s
        self._drift = LongDurations(
            first_step=first.step,
            found_step=step,
            at_s=first.at_s,
            against_s=against_s,
            now_s=seconds,
            is_drift=True,
            times=_FEWEST,
        )
        self._changed.append(self._drift)
        event = self._long_event
        if event is not None and event.first_step >= first.step:
            event.is_withdrawn = True
            self._changed.append(event)
            self._long_event = None

    def finish(self) -> None:
        """At the end of the run, report a drift with its last duration, and a cost with all durations."""
        for event in (self._drift, self._total.event):
            if event is not None:
                self._changed.append(event)

    def take_changed(self) -> list[LongDurations]:
        """Return the events that are new, or have changed, since the last call."""
        changed = []
        for event in self._changed:
            if event not in changed:
                changed.append(event)
                event.mark_reported()
        self._changed = []
        return changed

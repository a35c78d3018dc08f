"""Finds memory that grows steadily, in windows of the last seconds, minutes and hours."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import rank_correlation


class _Span(NamedTuple):
    """The length of a window."""

    seconds: float
    # A window is divided into this many equal intervals; the least memory in each of them is one reading.
    readings: int


# Short windows are for runs of minutes; memory is read once a second. At first, a cache that fills up within minutes
# seems to grow steadily, too. So even if the growth slows down as that of a cache does, what is still to come must be
# at least the memory held already (``_growth_to_come``).
_SHORT_SPANS = (
    _Span(6.0, readings=6),
    _Span(10.0, readings=10),
    _Span(15.0, readings=15),
    _Span(60.0, readings=15),
    _Span(240.0, readings=15),
)
_LONG_SPANS = (
    _Span(1200.0, readings=40),
    _Span(4800.0, readings=40),
    _Span(19_200.0, readings=40),
    _Span(76_800.0, readings=40),
)
_GREW_BYTES = 32 * 2**20
# smaller growth in the second of two windows, as a share of the memory held, is due to caches and heaps
_GREW_SHARE_OF_SHORT = 0.15
_GREW_SHARE_OF_LONG = 0.02
# The slowing of growth may be larger than it seems by this many standard errors.
_STANDARD_ERRORS = 2.0
# New growth must exceed the memory at which an earlier growth ended by this factor.
_ABOVE_HIGHEST = 1.15
_LEAST_JUDGED_S = 60.0  # the least time from one judgement of a growth to the next
# Memory grows steadily if all of these hold:
_RISING = 0.8  # its rank correlation (Kendall's) with time is at least this
_UNEVEN = 0.25  # in each quarter of the readings the slope is at least this share of the mean slope
_SLOWING = 0.88  # the second half has at least this share of the slope of the first; a cache fills more and more slowly
# growth has ended if its slope is below this share of the first slope
_ENDED_SHARE = 0.1
_CORRECTED = 0.2  # growth is reported again if its slope differs by this share from the one reported


@dataclass(eq=False, kw_only=True)
class MemoryGrowth:
    """Growth of memory. Its estimates are corrected while readings arrive."""

    step: int  # the step at which it was found
    at_s: float  # when it was found
    bytes_per_s: float
    grew_bytes: float  # since the first reading of the window in which it was found
    until_step: int | None = None  # the step at which it had ended; None: it has not
    _first_bytes: float = 0.0
    _first_per_s: float = 0.0
    _reported_per_s: float = 0.0
    _judged_at_s: float = 0.0


class _Window:
    """The readings of memory in the last two windows of a ``span``; each is the least memory of an interval."""

    def __init__(self, span: _Span) -> None:
        self.span = span
        self.times_s: deque[float] = deque(maxlen=2 * span.readings)
        self.held_bytes: deque[float] = deque(maxlen=2 * span.readings)
        self._begin_s: float | None = None
        self._least_bytes = math.inf

    def add(self, at_s: float, held_bytes: float) -> bool:
        """Add the memory held at ``at_s``; return whether this completes an interval, and thus a reading."""
        if self._begin_s is None:
            self._begin_s = at_s
        self._least_bytes = min(self._least_bytes, held_bytes)
        if at_s - self._begin_s < self.span.seconds / self.span.readings:
            return False
        self.times_s.append(at_s)
        self.held_bytes.append(self._least_bytes)
        self._begin_s = at_s
        self._least_bytes = math.inf
        return True

    def slope(self) -> float | None:
        """Return bytes per second if memory grew steadily in the last two windows; None otherwise."""
        if len(self.held_bytes) < 2 * self.span.readings:
            return None
        held_bytes = np.array(self.held_bytes)
        times_s = np.array(self.times_s)
        # The second half of the readings is the last window.
        grew_bytes = float(held_bytes[-1] - held_bytes[self.span.readings])
        is_short = self.span in _SHORT_SPANS
        grew_share = _GREW_SHARE_OF_SHORT if is_short else _GREW_SHARE_OF_LONG
        least_bytes = max(grew_share * float(held_bytes[0]), _GREW_BYTES)
        rises = rank_correlation(held_bytes) >= _RISING
        if grew_bytes < least_bytes or not rises:
            return None
        if is_short and _growth_to_come(times_s, held_bytes) < held_bytes[-1]:
            return None

        last_index = len(held_bytes) - 1
        # the indices at which the quarters of the readings begin, and the last one
        quarters = [quarter * last_index // 4 for quarter in range(5)]
        slopes = np.diff(held_bytes[quarters]) / np.diff(times_s[quarters])
        has_jump = float(slopes.min()) < _UNEVEN * float(slopes.mean())
        slope_of_first_half = float(slopes[:2].mean())
        slope = float(slopes[2:].mean())
        is_slowing = slope < _SLOWING * slope_of_first_half
        if has_jump or is_slowing:  # a jump is a change of level, not steady growth
            return None
        return slope

    def last_slope(self) -> float | None:
        """Return bytes per second over the last window, whether the growth is steady or not."""
        readings = self.span.readings  # of one window; up to two windows are kept
        if len(self.held_bytes) < readings:
            return None
        grew_bytes = self.held_bytes[-1] - self.held_bytes[-readings]
        seconds = self.times_s[-1] - self.times_s[-readings]
        return grew_bytes / seconds


def _growth_to_come(
    times_s: NDArray[np.float64], held_bytes: NDArray[np.float64]
) -> float:
    """Return the bytes by which memory will still grow if its growth slows down as that of a cache that fills up.

    The slope of such growth falls exponentially: by the same share in each second. The last slope, and how fast it
    falls, are those of a parabola fitted to the readings. Of the parabolas that the noise of the readings allows, it is
    one whose slope falls fast, so that the growth is underestimated rather than overestimated.
    """
    middle_s = (times_s[0] + times_s[-1]) / 2.0
    half_s = (times_s[-1] - times_s[0]) / 2.0
    positions = (times_s - middle_s) / half_s  # from -1 to 1
    design = np.column_stack([np.ones(len(positions)), positions, positions**2])
    parabola, *_ = np.linalg.lstsq(design, held_bytes, rcond=None)
    errors = held_bytes - design @ parabola
    variance = float(errors @ errors) / (len(errors) - design.shape[1])
    variance_of_curve = variance * float(np.linalg.inv(design.T @ design)[2, 2])
    least_curve = float(parabola[2]) - _STANDARD_ERRORS * math.sqrt(variance_of_curve)
    fall = -2.0 * least_curve
    slope_at_end = float(parabola[1]) - fall
    if slope_at_end <= 0.0:
        return 0.0
    if fall <= 0.0:
        return math.inf
    # The slope falls by the share ``fall / slope_at_end`` per unit of time. The integral of a slope that falls
    # exponentially is the slope divided by this share.
    return slope_at_end**2 / fall


def _all_windows() -> list[_Window]:
    """Return windows of all lengths, the shortest first."""
    return [_Window(span) for span in (*_SHORT_SPANS, *_LONG_SPANS)]


@dataclass(eq=False)
class MemoryWatch:
    """Watches the bytes that a process or a device holds between steps."""

    growth: MemoryGrowth | None = None
    _windows: list[_Window] = field(default_factory=_all_windows)
    _growing_window: _Window | None = None
    # the most that was held when an earlier growth ended: what rises and falls with each epoch reaches it again
    _highest_bytes: float = 0.0

    def add(self, at_s: float, held_bytes: float, step: int) -> MemoryGrowth | None:
        """Add the bytes held at ``at_s``; return growth if it is new, if its slope has changed, or if it has ended."""
        changed = None
        for window in self._windows:
            if not window.add(at_s, held_bytes):
                continue
            if self.growth is None:
                changed = self._look_for_growth(window, step) or changed
            elif window is self._growing_window:
                changed = self._follow_growth(window, step) or changed
        return changed

    def _look_for_growth(self, window: _Window, step: int) -> MemoryGrowth | None:
        """Return new growth if memory grew steadily in ``window``; None otherwise."""
        slope = window.slope()
        if slope is None:
            return None
        is_short = window.span in _SHORT_SPANS
        if is_short and window.held_bytes[-1] < _ABOVE_HIGHEST * self._highest_bytes:
            return None
        self.growth = MemoryGrowth(
            step=step,
            at_s=window.times_s[-1],
            bytes_per_s=slope,
            grew_bytes=window.held_bytes[-1] - window.held_bytes[0],
            _first_bytes=window.held_bytes[0],
            _first_per_s=slope,
            _reported_per_s=slope,
            _judged_at_s=window.times_s[-1],
        )
        self._growing_window = window
        return self.growth

    def _follow_growth(self, window: _Window, step: int) -> MemoryGrowth | None:
        """Check the growth again, once per window; return it if its slope has changed, or if it has ended."""
        growth = self.growth
        slope = window.last_slope()
        if growth is None or slope is None:
            return None
        since_judged_s = window.times_s[-1] - growth._judged_at_s
        if since_judged_s < max(window.span.seconds, _LEAST_JUDGED_S):
            return None
        growth._judged_at_s = window.times_s[-1]
        growth.grew_bytes = window.held_bytes[-1] - growth._first_bytes
        if slope < _ENDED_SHARE * growth._first_per_s:
            growth.until_step = step
            highest_bytes = growth._first_bytes + max(growth.grew_bytes, 0.0)
            self._highest_bytes = max(
                self._highest_bytes, highest_bytes, *window.held_bytes
            )
            self.growth = None
            self._growing_window = None
            return growth
        growth.bytes_per_s = slope
        if abs(slope - growth._reported_per_s) > _CORRECTED * growth._reported_per_s:
            growth._reported_per_s = slope
            return growth
        return None

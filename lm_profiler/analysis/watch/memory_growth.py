"""Finds memory that grows steadily, in windows of the last seconds, minutes and hours."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lm_profiler.analysis.steps.statistics import rank_correlation

_READINGS = 40  # readings of a window: the least memory in equal spans of time
_WINDOWS_S = (1200.0, 4800.0, 19_200.0, 76_800.0)
_GREW_SHARE = 0.02  # a share of the held bytes, and ...
_GREW_BYTES = 32 * 2**20  # ... bytes, below which growth is that of caches and heaps
# Windows for runs of minutes, in which growth must be steep: a cache that fills up in ten minutes looks steady in the
# first of them. If it doubles the memory, it grows by less than this share in a window that is short enough to look
# steady (``_SLOWING``).
_SHORT_READINGS = 15
_SHORT_WINDOWS_S = (15.0, 60.0, 240.0)
_STEEP_SHARE = 0.15
_RISING = 0.8  # Kendall's rank correlation with time
_UNEVEN = 0.25  # least slope of a quarter of the window over the mean
_SLOWING = 0.88  # least slope of the second half over that of the first: what fills up grows slower and slower
_ENDED_SHARE = 0.1  # share of the first slope below which growth has ended
_CORRECTED = 0.2  # share by which a slope must differ to be reported again


@dataclass(eq=False, kw_only=True)
class MemoryGrowth:
    """Memory that grows, as it is known by now."""

    step: int
    at_s: float
    bytes_per_s: float
    grew_bytes: float  # since it was first seen to grow
    until_step: int | None = None
    _first_bytes: float = 0.0
    _first_per_s: float = 0.0
    _reported_per_s: float = 0.0
    _judged_at_s: float = 0.0


class _Window:
    """The memory in the last two windows of ``span_s`` seconds, as the least of it in each of equal spans."""

    def __init__(self, span_s: float, readings: int, grew_share: float) -> None:
        self.span_s = span_s
        self._readings = readings  # in a window
        self._grew_share = grew_share  # of the held bytes: less is no growth
        self.times_s: deque[float] = deque(maxlen=2 * readings)
        self.held_bytes: deque[float] = deque(maxlen=2 * readings)
        self._begin_s: float | None = None
        self._least_bytes = math.inf

    def add(self, at_s: float, held_bytes: float) -> bool:
        """Take a reading; return whether it completes a span."""
        if self._begin_s is None:
            self._begin_s = at_s
        self._least_bytes = min(self._least_bytes, held_bytes)
        if at_s - self._begin_s < self.span_s / self._readings:
            return False
        self.times_s.append(at_s)
        self.held_bytes.append(self._least_bytes)
        self._begin_s = at_s
        self._least_bytes = math.inf
        return True

    def slope(self) -> float | None:
        """Return bytes per second if memory grew steadily in the last two windows; None otherwise."""
        if len(self.held_bytes) < 2 * self._readings:
            return None
        held_bytes = np.array(self.held_bytes)
        times_s = np.array(self.times_s)
        grew_bytes = float(held_bytes[-1] - held_bytes[self._readings])
        if grew_bytes < max(self._grew_share * float(held_bytes[0]), _GREW_BYTES):
            return None
        if rank_correlation(held_bytes) < _RISING:
            return None

        last_index = len(held_bytes) - 1
        quarters = [quarter * last_index // 4 for quarter in range(5)]
        slopes = np.diff(held_bytes[quarters]) / np.diff(times_s[quarters])
        has_jump = float(slopes.min()) < _UNEVEN * float(slopes.mean())
        slope_before = float(slopes[:2].mean())
        slope = float(slopes[2:].mean())
        is_slowing = slope < _SLOWING * slope_before
        if has_jump or is_slowing:  # one jump is a level, not a slope
            return None
        return slope

    def last_slope(self) -> float | None:
        """Return bytes per second over the last window, steady or not."""
        if len(self.held_bytes) < self._readings:
            return None
        grew_bytes = self.held_bytes[-1] - self.held_bytes[-self._readings]
        return grew_bytes / (self.times_s[-1] - self.times_s[-self._readings])


def _all_windows() -> list[_Window]:
    """Return the windows in which memory is watched, the shortest first."""
    windows = [
        _Window(span_s, _SHORT_READINGS, _STEEP_SHARE) for span_s in _SHORT_WINDOWS_S
    ]
    windows += [_Window(span_s, _READINGS, _GREW_SHARE) for span_s in _WINDOWS_S]
    return windows


@dataclass(eq=False)
class MemoryWatch:
    """Takes the bytes that a process or a device holds between steps."""

    growth: MemoryGrowth | None = None
    _windows: list[_Window] = field(default_factory=_all_windows)
    _growing_window: _Window | None = None

    def add(self, at_s: float, held_bytes: float, step: int) -> MemoryGrowth | None:
        """Take a reading; return growth that is new, whose slope has changed, or that has ended."""
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
        """Return the growth that ``window`` shows, as of ``step``; None if memory does not grow in it."""
        slope = window.slope()
        if slope is None:
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
        """Judge the growth again once a whole window has passed."""
        growth = self.growth
        slope = window.last_slope()
        if growth is None or slope is None:
            return None
        if window.times_s[-1] - growth._judged_at_s < window.span_s:
            return None
        growth._judged_at_s = window.times_s[-1]
        growth.grew_bytes = window.held_bytes[-1] - growth._first_bytes
        if slope < _ENDED_SHARE * growth._first_per_s:
            growth.until_step = step
            self.growth = None
            self._growing_window = None
            return growth
        growth.bytes_per_s = slope
        if abs(slope - growth._reported_per_s) > _CORRECTED * growth._reported_per_s:
            growth._reported_per_s = slope
            return growth
        return None

"""Finds memory that grows steadily, in windows of the last seconds, minutes and hours."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import robust_std


class _Span(NamedTuple):
    """The length of a window."""

    seconds: float
    # A window is divided into this many equal intervals; the least memory in each of them is one reading.
    readings: int
    # Smaller growth, as a share of the memory held, is due to heaps and caches.
    least_share: float


# Short windows are for runs of minutes; memory is read once a second.
_SHORT_SPANS = (
    _Span(12.0, readings=12, least_share=0.03),
    _Span(20.0, readings=20, least_share=0.04),
    _Span(40.0, readings=8, least_share=0.08),
    _Span(120.0, readings=12, least_share=0.15),
    _Span(480.0, readings=16, least_share=0.15),
)
_LONG_SPANS = (
    _Span(2400.0, readings=80, least_share=0.04),
    _Span(9600.0, readings=80, least_share=0.04),
    _Span(38_400.0, readings=80, least_share=0.04),
    _Span(153_600.0, readings=80, least_share=0.04),
)
_LEAST_GROWTH_BYTES = 32 * 2**20  # smaller growth counts as none
# Memory grows steadily if all of these hold for its slopes, each over a quarter of the readings. Their median is the
# slope of the window: neither a jump nor memory that is high for a moment changes it much.
_UNEVEN = 0.25  # three quarters of the slopes are at least this share of their median
_SLOWING = 0.88  # the later slopes are at least this share of the earlier ones; a cache fills more and more slowly
_LASTING = 0.5  # the lowest memory has risen by this share of the rise that the median slope gives
_ABOVE_NOISE = 10.0  # memory has grown by this many standard deviations of the readings around the line
# New growth must exceed the memory at which an earlier growth ended by this factor: what rises and falls with each
# epoch reaches about the same memory again.
_ABOVE_HIGHEST = 1.1
# Growth has ended if its slope is below this share of the first slope.
_ENDED_SHARE = 0.25
# Growth that ended within so many seconds, or that memory lost again, was a cache that is full, or the warm-up of an
# allocator.
_LONGEST_WARM_UP_S = 300.0
_LOST_SHARE = 0.5
_NEAR = 0.05  # a reading is near a line or a level if the distance is at most this share of the growth
_CORRECTED = 0.2  # growth is reported again if its slope differs by this share from the one reported


@dataclass(eq=False, kw_only=True)
class MemoryGrowth:
    """Growth of memory. Its estimates are corrected while readings arrive."""

    step: int  # the step at which it was found
    at_s: float  # when it was found
    since_step: int  # the step at which it began
    begin_s: float
    begin_bytes: float  # held when it began
    now_s: float  # when it was last judged, and what was held then
    now_bytes: float
    bytes_per_s: float  # its present slope; jumps of memory do not belong to it
    until_step: int | None = None  # the step at which it had ended; None: it has not
    is_withdrawn: bool = (
        False  # whether it has turned out to be a cache that is full now
    )
    _first_per_s: float
    _reported_per_s: float
    _reported_at_s: float

    @property
    def grew_bytes(self) -> float:
        return self.now_bytes - self.begin_bytes


class _Reading(NamedTuple):
    """The least memory that was held in an interval which ended at ``at_s``, in ``step``."""

    at_s: float
    held_bytes: float
    step: int


class _Window:
    """The last readings of memory, over the time of a ``span``; each is the least memory of an interval."""

    def __init__(self, span: _Span) -> None:
        self.span = span
        self.times_s: deque[float] = deque(maxlen=span.readings)
        self.held_bytes: deque[float] = deque(maxlen=span.readings)
        self.steps: deque[int] = deque(maxlen=span.readings)
        self._begin_s: float | None = None
        self._least_bytes = math.inf

    @property
    def is_full(self) -> bool:
        return len(self.held_bytes) == self.span.readings

    def reading(self, index: int) -> _Reading:
        return _Reading(
            self.times_s[index], float(self.held_bytes[index]), self.steps[index]
        )

    def add(self, at_s: float, held_bytes: float, step: int) -> bool:
        """Add the memory held at ``at_s``; return whether this completes an interval, and thus a reading."""
        if self._begin_s is None:
            self._begin_s = at_s
        self._least_bytes = min(self._least_bytes, held_bytes)
        if at_s - self._begin_s < self.span.seconds / self.span.readings:
            return False
        self.times_s.append(at_s)
        self.held_bytes.append(self._least_bytes)
        self.steps.append(step)
        self._begin_s = at_s
        self._least_bytes = math.inf
        return True

    def line(self) -> tuple[float, NDArray[np.float64]]:
        """Return the median slope, in bytes per second, and what the line through the readings holds at each of them.

        The line goes through the later half of the readings, because growth may have begun among the earlier ones.
        """
        times_s = np.array(self.times_s)
        slope = float(np.median(self._slopes_over(times_s)))
        heights = np.array(self.held_bytes) - slope * times_s
        half = len(heights) // 2
        return slope, float(np.median(heights[-half:])) + slope * times_s

    def grows_steadily(self) -> bool:
        """Return whether memory grew steadily by more than heaps and caches do."""
        if not self.is_full:
            return False
        held_bytes = [*self.held_bytes]
        quarter = len(held_bytes) // 4
        lowest_rise = min(held_bytes[-quarter:]) - min(held_bytes[:quarter])
        least_bytes = max(_LEAST_GROWTH_BYTES, self.span.least_share * held_bytes[0])
        least_rise_share = _LASTING * 0.75
        # Steady memory ends here, before the slopes are computed, which takes far longer.
        if lowest_rise < least_rise_share * least_bytes:
            return False
        _, line_bytes = self.line()
        grew_bytes = float(line_bytes[-1] - line_bytes[0])
        if grew_bytes < least_bytes or lowest_rise < least_rise_share * grew_bytes:
            return False
        # With each step, memory grows evenly even if the machine's speed changes.
        if not self._is_even_over(self.times_s) and not self._is_even_over(self.steps):
            return False
        noise_bytes = robust_std(np.array(held_bytes) - line_bytes)
        return bool(grew_bytes >= _ABOVE_NOISE * noise_bytes)

    def _is_even_over(self, positions: Sequence[float]) -> bool:
        """Return whether memory grew about equally fast in all parts of the window, and not ever more slowly.

        ``positions`` are the times, or the steps, of the readings.
        """
        slopes = self._slopes_over(np.array(positions))
        half = len(slopes) // 2
        if half == 0:  # hardly a step has ended
            return False
        earlier_slope = float(np.median(slopes[:half]))
        later_slope = float(np.median(slopes[-half:]))
        is_uneven = float(np.quantile(slopes, 0.25)) < _UNEVEN * float(
            np.median(slopes)
        )
        is_slowing = later_slope < _SLOWING * earlier_slope
        return not is_uneven and not is_slowing

    def _slopes_over(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the slopes between all readings that are a quarter of the window apart, in bytes per unit of position.

        Slopes between readings at the same position are left out.
        """
        held_bytes = np.array(self.held_bytes)
        apart = len(held_bytes) // 4
        rises = held_bytes[apart:] - held_bytes[:-apart]
        distances = positions[apart:] - positions[:-apart]
        is_known = distances > 0
        slopes: NDArray[np.float64] = rises[is_known] / distances[is_known]
        return slopes


def _all_windows() -> list[_Window]:
    """Return windows of all lengths, the shortest first."""
    return [_Window(span) for span in (*_SHORT_SPANS, *_LONG_SPANS)]


@dataclass(eq=False)
class MemoryWatch:
    """Watches the bytes that a process or a device holds between steps."""

    growth: MemoryGrowth | None = None
    _windows: list[_Window] = field(default_factory=_all_windows)
    _growing_window: _Window | None = None
    # the most that was held when an earlier growth ended
    _highest_bytes: float = 0.0

    def add(self, at_s: float, held_bytes: float, step: int) -> MemoryGrowth | None:
        """Add the bytes held at ``at_s``; return growth if it is new, if its slope has changed, or if it has ended."""
        changed = None
        for window in self._windows:
            if not window.add(at_s, held_bytes, step):
                continue
            if self.growth is None:
                changed = self._look_for_growth(window, step) or changed
                continue
            if self._is_better(window, self.growth):
                self._growing_window = window
            if window is self._growing_window:
                changed = self._follow_growth(self.growth, window) or changed
        return changed

    def _is_better(self, window: _Window, growth: MemoryGrowth) -> bool:
        """Return whether ``window`` lies within ``growth`` and is longer than the one by which it is followed.

        The slope of a longer window is less uncertain.
        """
        if self._growing_window is None or not window.is_full:
            return False
        is_longer = window.span.seconds > self._growing_window.span.seconds
        return is_longer and window.times_s[0] >= growth.begin_s

    def finish(self) -> MemoryGrowth | None:
        """At the end of the run, return the growth that has not ended: it is larger now than when it was reported."""
        return self.growth

    def _look_for_growth(self, window: _Window, step: int) -> MemoryGrowth | None:
        """Return new growth if memory grew steadily in ``window``; None otherwise."""
        if not window.grows_steadily():
            return None
        is_short = window.span in _SHORT_SPANS
        if is_short and window.held_bytes[-1] < _ABOVE_HIGHEST * self._highest_bytes:
            return None
        slope, line_bytes = window.line()
        distances = np.abs(np.array(window.held_bytes) - line_bytes)
        are_near = distances <= _NEAR * (line_bytes[-1] - line_bytes[0])
        begin = self._beginning(window.reading(int(are_near.argmax())), slope, window)
        self.growth = MemoryGrowth(
            step=step,
            at_s=window.times_s[-1],
            since_step=begin.step,
            begin_s=begin.at_s,
            begin_bytes=begin.held_bytes,
            now_s=window.times_s[-1],
            now_bytes=float(line_bytes[-1]),
            bytes_per_s=slope,
            _first_per_s=slope,
            _reported_per_s=slope,
            _reported_at_s=window.times_s[-1],
        )
        self._growing_window = window
        return self.growth

    def _beginning(self, first: _Reading, slope: float, window: _Window) -> _Reading:
        """Return the reading at which growth began: ``first``, or an earlier one of longer windows.

        From it on, memory has risen at no less than a quarter of ``slope``, in each quarter of ``window``.
        """
        earlier_readings: list[_Reading] = []
        for other in self._windows:
            for index in range(len(other.times_s)):
                earlier_readings.append(other.reading(index))
        begin = first
        for reading in sorted(earlier_readings, reverse=True):
            seconds = begin.at_s - reading.at_s
            if seconds < window.span.seconds / 4:
                continue
            rise_bytes = begin.held_bytes - reading.held_bytes
            if rise_bytes < _UNEVEN * slope * seconds:
                break
            begin = reading
        return begin

    def _follow_growth(
        self, growth: MemoryGrowth, window: _Window
    ) -> MemoryGrowth | None:
        """Judge ``growth`` by the last reading; return it if its slope has changed, or if it has ended."""
        slope, line_bytes = window.line()
        quarter = len(window.held_bytes) // 4
        last_bytes = max([*window.held_bytes][-quarter:])
        is_lost = last_bytes < growth.begin_bytes + _LOST_SHARE * growth.grew_bytes
        if is_lost or slope < _ENDED_SHARE * growth._first_per_s:
            self._end_growth(growth, window, is_lost)
            return growth
        growth.now_s = window.times_s[-1]
        growth.now_bytes = float(line_bytes[-1])
        growth.bytes_per_s = slope
        correction = abs(slope - growth._reported_per_s)
        is_corrected = correction > _CORRECTED * growth._reported_per_s
        since_reported_s = growth.now_s - growth._reported_at_s
        if not is_corrected or since_reported_s < window.span.seconds:
            return None
        growth._reported_per_s = slope
        growth._reported_at_s = growth.now_s
        return growth

    def _end_growth(self, growth: MemoryGrowth, window: _Window, is_lost: bool) -> None:
        """End ``growth``, and withdraw it if it was a cache or the warm-up of an allocator.

        It ended at the first reading that is nearly as high as it became.
        """
        held_bytes = np.array(window.held_bytes)
        highest_bytes = max(growth.now_bytes, float(np.median(held_bytes)))
        grew_bytes = highest_bytes - growth.begin_bytes
        are_near = held_bytes >= highest_bytes - _NEAR * grew_bytes
        end = int(are_near.argmax())
        growth.until_step = window.steps[end]
        growth.now_s = window.times_s[end]
        growth.now_bytes = highest_bytes
        was_short = growth.now_s - growth.at_s < _LONGEST_WARM_UP_S
        growth.is_withdrawn = is_lost or was_short
        self._highest_bytes = max(self._highest_bytes, highest_bytes)
        self.growth = None
        self._growing_window = None

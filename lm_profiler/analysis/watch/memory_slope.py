"""Tells of a run that goes on whether the memory that it holds between steps grows without an end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_READINGS = 40  # of the least memory of equal stretches of time; pairs of stretches are merged, so that time doubles
_MOST = 2 * _READINGS
_GREW = 0.02  # a share of what is held, and ...
_GREW_BYTES = 32 * 2**20  # ... bytes, below which growth is that of caches and heaps
_LONG_S = 600.0  # seconds: what fills up in a minute looks like a line for half of it
_STEADY = 0.7  # the share of the first half's slope that the second half has, where nothing ends


@dataclass(eq=False)
class MemorySlope:
    """Follows the bytes that a process or a device holds between steps, read at about equal distances."""

    _times_s: list[float] = field(default_factory=list)
    _bytes: list[float] = field(default_factory=list)
    _merged: int = 1
    _waiting: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at_s: float, held_bytes: float) -> float | None:
        """Take a reading; return bytes a second where memory grew all the while, and still does; None otherwise."""
        self._waiting.append((at_s, held_bytes))
        if len(self._waiting) < self._merged:
            return None
        self._times_s.append(self._waiting[-1][0])
        self._bytes.append(min(held for _, held in self._waiting))
        self._waiting = []
        if len(self._bytes) >= _MOST:
            self._times_s = self._times_s[1::2]
            self._bytes = [min(pair) for pair in zip(self._bytes[::2], self._bytes[1::2], strict=True)]
            self._merged *= 2
        return self._slope()

    def restart(self) -> None:
        """Forget what was read: it has been told."""
        self._times_s, self._bytes, self._merged, self._waiting = [], [], 1, []

    def _slope(self) -> float | None:
        held, times = np.array(self._bytes), np.array(self._times_s)
        n = held.size
        if n < _READINGS:
            return None
        held, times = held[n // 10 :], times[n // 10 :]  # the beginning fills caches
        n = held.size
        grew = float(held[-1] - held[0])
        rising = float((np.sign(np.subtract.outer(held, held).T)[np.triu_indices(n, 1)]).mean())  # Kendall's tau
        if times[-1] - times[0] < _LONG_S or grew < max(_GREW * float(held[0]), _GREW_BYTES) or rising < 0.8:
            return None
        quarters = held[[0, n // 4, n // 2, 3 * n // 4, n - 1]]
        each = np.diff(quarters) / np.diff(times[[0, n // 4, n // 2, 3 * n // 4, n - 1]])
        # A heap that fills slows down; one jump is a level, not a slope.
        steady = each[2:].mean() >= _STEADY * each[:2].mean() and each.min() >= 0.25 * each.mean()
        return grew / float(times[-1] - times[0]) if steady else None

"""Tells of a run that goes on which single steps are slow beyond what its own tail lets expect.

Peaks over threshold with a generalised Pareto tail (Siffer et al., KDD 2017, "Anomaly detection in streams with extreme
value theory"), fitted by probability-weighted moments (Hosking & Wallis 1987, Technometrics 29:339).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_BLOCK = 10  # steps whose median is their level; a slow step is above the blocks before and after it too
_KEPT, _FEWEST = 20_000, 1_000  # steps whose tail is known
_TAIL = 0.05  # share of them that is the tail
_RISK = 1e-8  # how likely a steady step may be told: a hundredth of the aim, because the tail is known from few steps
_LEAST_SHAPE, _MOST_SHAPE = 0.05, 0.9  # a tail that looks shorter by chance would promise too much: simulated,
# as is the standard error that the shape is raised by
_ENORMOUS = math.log(5.0)  # what is told before the tail is known
_SLOW = math.log(1.25)  # a step that takes less than a quarter more is not worth an event


@dataclass(eq=False)
class SlowSteps:
    """Follows one series of step times. ``judged`` is the first step that no call has judged yet, from 0, less a block
    that is its neighbour."""

    judged: int = 0
    _left: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _known: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def add(self, step_s: NDArray[np.float64]) -> list[tuple[int, float]]:
        """Take the next steps' seconds; return those that are slow, by their index from 0, with their expected
        seconds."""
        logs = np.concatenate([self._left, np.log(np.maximum(step_s, 1e-9))])
        blocks = logs.size // _BLOCK
        if blocks < 3:
            self._left = logs
            return []
        levels = np.median(logs[: blocks * _BLOCK].reshape(blocks, _BLOCK), axis=1)
        level = np.repeat(np.max([levels[:-2], levels[1:-1], levels[2:]], axis=0), _BLOCK)
        middle = logs[_BLOCK : (blocks - 1) * _BLOCK]
        beyond, first = middle - level, self.judged + _BLOCK
        self._left, self.judged = logs[(blocks - 2) * _BLOCK :], self.judged + (blocks - 2) * _BLOCK
        slow = beyond > self._threshold()
        self._known = np.concatenate([self._known, beyond[~slow]])[-_KEPT:]
        crowded = np.repeat(slow.reshape(-1, _BLOCK).sum(axis=1) > _BLOCK // 3, _BLOCK)  # that is a level
        return [(first + int(at), math.exp(level[at])) for at in np.flatnonzero(slow & ~crowded)]

    def _threshold(self) -> float:
        """Return how far above its level a step is, in logarithms, with a probability of ``_RISK``."""
        n = self._known.size
        if n < _FEWEST:
            return _ENORMOUS if n >= _FEWEST // 10 else math.inf
        most = round(n * _TAIL)
        ordered = np.sort(self._known)
        base = float(ordered[-most - 1])
        excess = ordered[-most:] - base
        mean = float(excess.mean())
        weighted = float((excess * (most - np.arange(most) - 0.65)).mean() / most)
        if mean <= 2.0 * weighted:
            return max(_SLOW, base)
        shape = max(2.0 - mean / (mean - 2.0 * weighted), _LEAST_SHAPE) + 1.0 / math.sqrt(most)
        shape = min(shape, _MOST_SHAPE)
        scale = mean * (1.0 - shape)
        reach = scale / shape * ((_RISK / _TAIL) ** -shape - 1.0)
        return float(max(_SLOW, base + reach))

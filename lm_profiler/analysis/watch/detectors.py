"""Finds in a running training when its level changes, which single steps are slow, and whether memory grows.

A change of level is suspected by a generalised likelihood ratio over means of blocks (Lorden 1971, Annals of
Mathematical Statistics 42:1897; Siegmund & Venkatraman 1995, Annals of Statistics 23:255). ``step_model.fit``, the only
statistics of levels, confirms it in the steps around it, and says where it was.

A slow step exceeds what the run's own tail predicts: peaks over threshold with a generalised Pareto tail (Siffer
et al., KDD 2017, "Anomaly detection in streams with extreme value theory"), fitted by probability-weighted moments
(Hosking & Wallis 1987, Technometrics 29:339).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import FINEST
from lm_profiler.analysis.steps.step_model import SMALLEST_EFFECT, fit

# steps of a block; its value is the mean of the middle half of their logarithms, which odd steps do not move
BLOCK = 20

_REFERENCE = 200  # blocks that estimate a level: 4,000 steps, then it is fixed, so that a slow drift adds up against it
_FEWEST = 20  # blocks before anything is reported: the estimate of their noise is within a sixth
_RECENT = 50  # blocks in which a change may lie: 1,000 steps
# Standard errors for a suspicion. Simulated (benchmarks/watch): less than one false alarm in 10^6 steps, also
# under AR(1) noise of 0.6 and Student's t of three degrees.
_THRESHOLD = 6.0
_AGAIN = 5  # blocks after which a suspicion that was not confirmed is looked at again

_NEAR = 10  # steps whose median is their level; a slow step is above the blocks before and after it too
_KEPT, _FEWEST_KNOWN = 20_000, 1_000  # steps whose tail is estimated
_TAIL = 0.05  # share of them that is the tail
_RISK = 1e-8  # probability of reporting a steady step: a hundredth of the aim, because few steps estimate the tail
_LEAST_SHAPE, _MOST_SHAPE = 0.05, 0.9  # a tail that looks too short by chance would give false alarms: simulated,
# like the standard error by which the shape is raised
_ENORMOUS = math.log(5.0)  # reported before the tail is known
_SLOW = math.log(1.25)  # a step that takes less than a quarter more is not worth an event

_READINGS = 40  # readings of the least memory in equal spans of time; merging pairs of spans doubles the time
_MOST = 2 * _READINGS
_GREW = 0.02  # a share of the held bytes, and ...
_GREW_BYTES = 32 * 2**20  # ... bytes, below which growth is that of caches and heaps
_LONG_S = 600.0  # seconds: a cache that fills within a minute looks like a line for half of it
_STEADY = 0.7  # least slope of the second half over that of the first, if growth does not end


@dataclass(frozen=True)
class LevelChange:
    """The level changed at ``step``. Seconds are means of a step's parts (``TIMED``) in the levels on either side."""

    step: int
    before_s: NDArray[np.float64]
    after_s: NDArray[np.float64]


@dataclass(eq=False)
class LevelChanges:
    """Follows the level of one series of step times: ``level_s`` is the current one, None before it is known."""

    _left: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _blocks: list[float] = field(default_factory=list)
    _looked: int = 0

    @property
    def level_s(self) -> float | None:
        return math.exp(float(np.mean(self._blocks[-_RECENT:]))) if self._blocks else None

    def add(self, step_s: NDArray[np.float64]) -> int | None:
        """Take the next steps' seconds; return how many steps ago the level is suspected to have changed, or None."""
        logs = np.concatenate([self._left, np.log(np.maximum(step_s, 1e-9))])
        whole = logs.size // BLOCK * BLOCK
        self._left, suspected = logs[whole:], None
        quarter = BLOCK // 4
        for value in np.sort(logs[:whole].reshape(-1, BLOCK), axis=1)[:, quarter:-quarter].mean(axis=1):
            self._blocks.append(float(value))
            suspected = self._suspected() or suspected
            if len(self._blocks) > _REFERENCE + 2 * _RECENT:
                del self._blocks[_REFERENCE:-_RECENT]
        return None if suspected is None else suspected * BLOCK + self._left.size

    def _suspected(self) -> int | None:
        """Return the number of blocks since the level is suspected to have changed."""
        self._looked += 1
        n = len(self._blocks)
        most = min(_RECENT, n - _FEWEST)
        if most < 2 or self._looked < 0:
            return None
        blocks = np.array(self._blocks)
        reference = blocks[: min(_REFERENCE, n - most)]
        m = reference.size
        centre = float(reference.mean())
        deviation, noise = reference - centre, float(reference.std(ddof=1))
        lag1 = float(deviation[1:] @ deviation[:-1]) / max(float(deviation @ deviation), 1e-300)
        noise = max(noise, FINEST) * math.sqrt((1.0 + max(lag1, 0.0)) / (1.0 - min(max(lag1, 0.0), 0.9)))
        recent = np.cumsum(blocks[::-1][:most] - centre) / (size := np.arange(1, most + 1))
        # Few blocks estimate the noise (Student's t): the same deviation is fewer standard errors of a Gaussian.
        clear = np.abs(recent) / (noise * np.sqrt(1.0 / size + 1.0 / m)) * math.sqrt(1.0 - 4.0 / (m + 4.0))
        clear[np.abs(recent) < SMALLEST_EFFECT] = 0.0
        best = int(clear[1:].argmax()) + 1
        return best + 1 if clear[best] > _THRESHOLD else None

    def doubt(self) -> None:
        """Look again after some more blocks, because the suspicion was not confirmed."""
        self._looked = -_AGAIN


def confirmed(first_step: int, seconds: NDArray[np.float64], ago: int) -> LevelChange | None:
    """Return the change that the model of step times finds nearest to ``ago`` steps before the end, if there is one.

    ``seconds`` are those of the steps from ``first_step`` on, (n, TIMED).
    """
    if len(seconds) < 4 * BLOCK:
        return None
    model = fit(seconds[:, -1], warms_up=False)
    edges = model.edges[1:-1]
    if not edges:
        return None
    at = min(edges, key=lambda edge: abs(len(seconds) - ago - edge))
    place = list(model.edges).index(at)
    levels = pairwise(model.edges[place - 1 : place + 2])
    means = [seconds[a:b][~model.odd[a:b]].mean(axis=0) for a, b in levels]
    if abs(math.log(means[1][-1] / means[0][-1])) < SMALLEST_EFFECT:
        return None
    return LevelChange(first_step + at, *means)


@dataclass(eq=False)
class SlowSteps:
    """Follows one series of step times."""

    judged: int = 0  # the first step that no call has judged yet, from 0, minus a neighbouring block
    _left: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _known: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def add(self, step_s: NDArray[np.float64]) -> list[int]:
        """Take the next steps' seconds; return those that are slow, by their index from 0."""
        logs = np.concatenate([self._left, np.log(np.maximum(step_s, 1e-9))])
        blocks = logs.size // _NEAR
        if blocks < 3:
            self._left = logs
            return []
        levels = np.median(logs[: blocks * _NEAR].reshape(blocks, _NEAR), axis=1)
        level = np.repeat(np.max([levels[:-2], levels[1:-1], levels[2:]], axis=0), _NEAR)
        middle = logs[_NEAR : (blocks - 1) * _NEAR]
        beyond, first = middle - level, self.judged + _NEAR
        self._left, self.judged = logs[(blocks - 2) * _NEAR :], self.judged + (blocks - 2) * _NEAR
        slow = beyond > self._threshold()
        self._known = np.concatenate([self._known, beyond[~slow]])[-_KEPT:]
        crowded = np.repeat(slow.reshape(-1, _NEAR).sum(axis=1) > _NEAR // 3, _NEAR)  # so many are a new level
        return [first + int(at) for at in np.flatnonzero(slow & ~crowded)]

    def _threshold(self) -> float:
        """Return how far above its level a step is, in logarithms, with a probability of ``_RISK``."""
        n = self._known.size
        if n < _FEWEST_KNOWN:
            return _ENORMOUS if n >= _FEWEST_KNOWN // 10 else math.inf
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


@dataclass(eq=False)
class MemorySlope:
    """Follows the bytes that a process or a device holds between steps, read at about equal intervals."""

    _times_s: list[float] = field(default_factory=list)
    _bytes: list[float] = field(default_factory=list)
    _merged: int = 1
    _waiting: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at_s: float, held_bytes: float) -> float | None:
        """Take a reading; return bytes per second if memory has grown steadily and still grows; otherwise None."""
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

"""Tells of a run that goes on when its level changes: few sums a step, and the model of step times has the last word.

A generalised likelihood ratio over means of blocks (Lorden 1971, Annals of Mathematical Statistics 42:1897; Siegmund &
Venkatraman 1995, Annals of Statistics 23:255) suspects a change. ``step_model.fit``, the only statistics of levels,
confirms it in the steps around it, and says where it was.
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

_REFERENCE = 200  # blocks that a level is known from: 4,000 steps, then it stays, so that a creep adds up against it
_FEWEST = 20  # blocks before anything is told: their noise is known to a sixth
_RECENT = 50  # blocks in which a change may lie: 1,000 steps
# Standard errors that a suspicion takes. Simulated (benchmarks/watch): less than one false alarm in 10^6 steps, also
# under AR(1) noise of 0.6 and Student's t of three degrees.
_THRESHOLD = 6.0
_AGAIN = 5  # blocks after which a suspicion that was not confirmed is looked at again


@dataclass(frozen=True)
class LevelChange:
    """The level changed at ``step``. Seconds are means of a step's parts (``TIMED``) in the levels on either side."""

    step: int
    before_s: NDArray[np.float64]
    after_s: NDArray[np.float64]


@dataclass(eq=False)
class LevelChanges:
    """Follows the level of one series of step times.

    ``level_s`` is the level that the reference says, None before it is known.
    """

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
        # Student's t of a noise that is known from few blocks: as many standard errors of a Gaussian are fewer.
        clear = np.abs(recent) / (noise * np.sqrt(1.0 / size + 1.0 / m)) * math.sqrt(1.0 - 4.0 / (m + 4.0))
        clear[np.abs(recent) < SMALLEST_EFFECT] = 0.0
        best = int(clear[1:].argmax()) + 1
        return best + 1 if clear[best] > _THRESHOLD else None

    def restart(self, step_s: NDArray[np.float64]) -> None:
        """Begin a new reference with the steps after a change."""
        self._left, self._blocks, self._looked = np.empty(0), [], 0
        self.add(step_s)

    def doubt(self) -> None:
        """Look again after some more blocks: the suspicion was not confirmed."""
        self._looked = -_AGAIN


def confirmed(first_step: int, seconds: NDArray[np.float64], ago: int) -> LevelChange | None:
    """Return the change that the model of step times finds nearest to ``ago`` steps before the end, if there is one.

    Args:
        first_step: the number of the first of these steps.
        seconds: (n, TIMED) around the suspected change, its steps last.
        ago: how many steps ago the change is suspected.
    """
    if len(seconds) < 4 * BLOCK:
        return None
    model = fit(seconds[:, -1], warms_up=False)
    edges = model.edges[1:-1]
    if not edges:
        return None
    at = min(edges, key=lambda edge: abs(len(seconds) - ago - edge))
    around = next(
        (a, b, c) for (a, b), (_, c) in zip(pairwise(model.edges), pairwise(model.edges[1:]), strict=False) if b == at
    )
    means = [seconds[a:b][~model.odd[a:b]].mean(axis=0) for a, b in pairwise(around)]
    if abs(math.log(means[1][-1] / means[0][-1])) < SMALLEST_EFFECT:
        return None
    return LevelChange(first_step + at, *means)

"""Which steps are odd, and what the others agree on: so that a single step cannot steer shares, nor a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.analysis.steps.statistics import FAR_OUT, fences, finite

AGREEMENT = 0.95
"""Of the resamples that must give an answer before it is more than this run's luck."""

_FEWEST = 4
_SMALLEST = 0.10  # of the median: less moves no share by anything to speak of
_RARE = 20
_RESAMPLES = 200


def odd_steps(step_s: ArrayLike) -> list[int]:
    """Indices of the steps far out by Tukey's fences (1977) and at least 10 % off the median, the farthest first.

    None below four steps.
    """
    x = finite(step_s)
    if x.size < _FEWEST:
        return []
    (low, high), median = fences(x, FAR_OUT), float(np.median(x))
    if median <= 0.0:
        return []
    off = np.abs(x - median)
    odd = np.flatnonzero(((x < low) | (x > high)) & (off > _SMALLEST * median))
    return [int(i) for i in odd[np.argsort(-off[odd], kind="stable")]]


def typical_steps(step_s: ArrayLike) -> list[int]:
    """Indices of the steps that shares are of: all but the odd ones, while those are at most one, or one in twenty.

    More of them belong to the run: a loader that stalls at each eighth batch costs what it costs.
    """
    x = finite(step_s)
    odd = odd_steps(x)
    left_out = set(odd if len(odd) <= max(1, x.size // _RARE) else ())
    return [i for i in range(x.size) if i not in left_out]


def resamples(count: int) -> Iterator[NDArray[np.intp]]:
    """Indices of ``count`` steps drawn with replacement, again and again, with a fixed seed (Efron 1979)."""
    rng = np.random.default_rng(0)
    return (rng.integers(count, size=count) for _ in range(_RESAMPLES))


def agree(answers: Sequence[object], with_: object) -> bool:
    """Whether `AGREEMENT` of ``answers``, and at least one, equal ``with_``."""
    return bool(answers) and sum(answer == with_ for answer in answers) >= AGREEMENT * len(answers)

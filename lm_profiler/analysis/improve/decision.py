"""Is B faster than A? An interval for pairs of fresh processes, which holds after however many it is looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.compare.ratio import MARGIN, RatioInterval
from lm_profiler.analysis.steps.statistics import finite

PROCESSES = 0.05
"""By how much (std of the logarithm) processes of one program are taken to differ, until pairs have shown it."""

FEWEST_PAIRS = 2
"""Of which a word is said: one slow process must not decide."""

_BORROWED = 6
"""Pairs of its own for which a comparison takes what the others showed. More would be narrower, and wrong of a change
that makes processes differ more."""

_EFFECTS = 20.0
"""Variance of the changes for which the interval is narrowest, in variances of a pair. It holds for all."""


def spread(settings: Sequence[Sequence[float]]) -> float:
    """How far processes of one setting differ: the std of the logarithms of their seconds, over all settings.

    It begins at ``PROCESSES``, which weighs as much as one process beyond a setting's first.
    """
    logs = [np.log(finite(processes)) for processes in settings if len(processes)]
    freedom = sum(processes.size - 1 for processes in logs)
    return math.sqrt((PROCESSES**2 + sum(map(_squares, logs))) / (1 + freedom))


def anytime_interval(ratios: Sequence[float], error: float, spread: float) -> RatioInterval | None:
    """Geometric mean of pairs' ratios, with an interval that holds after all of their numbers at once.

    A confidence sequence: the means that a mixture of normal changes, with a scale unknown beforehand, does not
    outweigh by 1 / ``error`` (Robbins 1970, Annals of Mathematical Statistics 41:1397; of an unknown scale: Lai 1976,
    Annals of Statistics 4:265). What is known of it (``spread`` of processes) counts like a few pairs more.
    None of fewer than ``FEWEST_PAIRS``, or where so few bound nothing.

    Raises:
        ValueError: for NaN or infinite values.
    """
    logs = np.log(finite(ratios))
    n = logs.size
    if n < FEWEST_PAIRS:
        return None
    weight = 1.0 + n * _EFFECTS
    outweighed = (math.sqrt(weight) / error) ** (2.0 / (_BORROWED + n))
    if outweighed >= weight:
        return None
    squares = _BORROWED * 2.0 * spread**2 + _squares(logs)
    half_width = math.sqrt(squares * (outweighed - 1.0) / (1.0 - outweighed / weight) / n)
    ratio = math.exp(float(logs.mean()))
    return RatioInterval(ratio, ratio * math.exp(-half_width), ratio * math.exp(half_width), 1.0 - error)


def hopeless(ratios: Sequence[float], spread: float) -> bool:
    """Whether more pairs are not worth their time: with one standard error for it, B does not save ``MARGIN``."""
    logs = np.log(finite(ratios))
    n = logs.size
    if n < FEWEST_PAIRS:
        return False
    error = math.sqrt((_BORROWED * 2.0 * spread**2 + _squares(logs)) / (_BORROWED + n - 1) / n)
    return float(logs.mean()) - error > math.log1p(-MARGIN)


def _squares(logs: NDArray[np.float64]) -> float:
    """The sum of their squared distances from their mean."""
    return float(((logs - logs.mean()) ** 2).sum())

"""Finds a repeating pattern in a series: every p-th value is higher, two levels alternate, or a saw-tooth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import Series, noise_of

_LONGEST_PERIOD = 50  # in steps
_REPEATS = 3  # of the period, at least
_FEWEST_SLOW = 4  # steps that differ, at least
# of the two classes of phases: simulated, see benchmarks/statistics
_NEEDED_GAIN = 28.0
# of the best split's gain: the shortest such period is the pattern's
_LEAST_GAIN_SHARE = 0.7
# standard deviations that one step may count for: two spikes make no pattern
_CLIP = 4.0
# how probable the best of all splits may be if the same values stand in random order
_LOG_CHANCE = math.log(0.01)


@dataclass(frozen=True)
class Pattern:
    """What repeats after ``period`` values."""

    period: int
    offsets: Series  # (period,) how far each phase lies above the base, as a logarithm; 0 for the base

    def repeated(self, count: int) -> Series:
        """(count,) the pattern itself, from phase 0 on."""
        return np.asarray(self.offsets[np.arange(count) % self.period])


def find_pattern(residuals: Series, smallest: float) -> Pattern | None:
    """Return the pattern of ``residuals``, logarithms about their level; None if none is as large as ``smallest``.

    Epoch folding: for every period the phases are split into two classes, the one with most phases being the base. The
    split counts by the square of its t statistic, less what choosing it among all splits and periods gains by chance.
    The parts of a split are split again, so that a saw-tooth gets as many levels as it needs.
    """
    longest = min(residuals.size // _REPEATS, _LONGEST_PERIOD)
    splits = [_best_split(residuals, period) for period in range(2, longest + 1)]
    if not splits:
        return None
    split = _split_of_shortest_period(splits)
    period = split.period

    unexplained = residuals.copy()
    offsets = np.zeros(period)
    for _ in range(period):
        if split.gain < _NEEDED_GAIN or not _separates(split, unexplained):
            break
        is_slow = split.is_slow(unexplained.size)
        base = np.median(unexplained[~is_slow])
        difference = float(np.median(unexplained[is_slow]) - base)
        if abs(difference) < smallest / 2:
            break
        unexplained[is_slow] -= difference
        offsets[list(split.phases)] += difference
        split = _best_split(unexplained, period)

    if np.ptp(offsets) < smallest:
        return None
    if period == 2:
        # Either level is as frequent as the other.
        return Pattern(period, offsets - float(offsets.min()))
    return Pattern(period, offsets - float(np.median(offsets)))


@dataclass(frozen=True)
class _Split:
    """The phases of a period in two classes."""

    gain: float
    period: int
    phases: tuple[int, ...]  # those of the class with fewer phases

    def is_slow(self, count: int) -> NDArray[np.bool_]:
        """(count,) which values belong to ``phases``."""
        return np.isin(np.arange(count) % self.period, self.phases)


def _split_of_shortest_period(splits: Sequence[_Split]) -> _Split:
    """Return the first split that gains nearly as much as the best one: a pattern repeats after two periods, too."""
    most_gain = max(split.gain for split in splits)
    for split in splits:
        if split.gain >= _LEAST_GAIN_SHARE * most_gain:
            return split
    return max(splits, key=lambda split: split.gain)  # no split gains anything


def _best_split(residuals: Series, period: int) -> _Split:
    """Return the split of a period's positions into fast and slow ones that explains the residuals best.

    Its gain is reduced by what the best of so many splits gains by chance.
    """
    count = residuals.size
    # the pattern cancels out
    noise = noise_of(residuals[period:] - residuals[:-period])
    periods = count // period
    by_period = residuals[: periods * period].reshape(periods, period)
    medians = np.median(by_period, axis=0)
    scores = np.clip((residuals - np.median(medians)) / noise, -_CLIP, _CLIP)

    # [period], the phase with the lowest median first
    phases = np.arange(count) % period
    order = np.argsort(medians)
    sums = np.bincount(phases, scores, period)[order]
    counts = np.bincount(phases, minlength=period)[order]

    # [period - 1], the phases below each split and those above it
    sums_below = np.cumsum(sums)[:-1]
    sums_above = sums.sum() - sums_below
    counts_below = np.cumsum(counts)[:-1]
    counts_above = count - counts_below
    differences = sums_above / counts_above - sums_below / counts_below
    variances = 1.0 / counts_below + 1.0 / counts_above
    numbers = [_number_of_splits(period, slow) for slow in range(1, period)]
    gains_by_chance = 2.0 * np.log(numbers)
    gains = differences**2 / variances - gains_by_chance

    best = int(gains.argmax())
    phases_below = order[: best + 1]
    phases_above = order[best + 1 :]
    fewer = phases_above if phases_above.size <= phases_below.size else phases_below
    return _Split(
        gain=float(gains[best]), period=period, phases=tuple(sorted(fewer.tolist()))
    )


def _number_of_splits(period: int, slow_phases: int) -> int:
    """Return among how many splits the best one is chosen: longer periods have more of them."""
    return period * math.comb(period, slow_phases)


def _separates(split: _Split, residuals: Series) -> bool:
    """Return whether the split's values differ from the others in one direction by more than chance explains.

    Three in four of them must lie beyond nine in ten of the others.
    """
    is_slow = split.is_slow(residuals.size)
    slow_values = residuals[is_slow]
    usual_values = residuals[~is_slow]
    count_above = int((slow_values > np.quantile(usual_values, 0.9)).sum())
    count_below = int((slow_values < np.quantile(usual_values, 0.1)).sum())
    if max(count_above, count_below) < max(_FEWEST_SLOW, 0.75 * slow_values.size):
        return False
    if count_above >= count_below:
        order = np.argsort(-residuals, kind="stable")
    else:
        order = np.argsort(residuals, kind="stable")
    overlap = int(is_slow[order[: slow_values.size]].sum())
    log_chance = _log_chance_of_overlap(residuals.size, slow_values.size, overlap)
    number_of_splits = _number_of_splits(split.period, len(split.phases))
    return log_chance + math.log(number_of_splits) <= _LOG_CHANCE


def _log_chance_of_overlap(count: int, size: int, overlap: int) -> float:
    """Return the log of the chance that two random sets of ``size`` out of ``count`` share ``overlap`` or more."""
    ways = 0
    for shared in range(overlap, size + 1):
        ways += math.comb(size, shared) * math.comb(count - size, size - shared)
    return math.log(ways) - math.log(math.comb(count, size))

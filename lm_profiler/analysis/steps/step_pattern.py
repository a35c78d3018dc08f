"""Finds a repeating pattern in a series: every p-th value is higher, two levels alternate, or it is a sawtooth.

A pattern has a period of p values. The positions within the period are its phases, 0 to p - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import Series, noise_of

_LONGEST_PERIOD = 50  # in steps
_FEWEST_REPEATS = 3  # a period must be repeated at least this often
_FEWEST_DIFFERENT_STEPS = 4  # at least this many steps must differ from the others
# what a split of the phases into two classes must gain: from simulation, see benchmarks/statistics
_NEEDED_GAIN = 28.0
# The pattern has the shortest period whose best split gains this share of what the best split of any period gains.
_LEAST_GAIN_SHARE = 0.7
# A single step counts for at most this many standard deviations, so that two spikes do not make a pattern.
_MOST_DEVIATIONS = 4.0
# The best split must be less likely than this if the same values are in random order.
_MOST_LOG_CHANCE = math.log(0.01)


@dataclass(frozen=True)
class Pattern:
    """Offsets that repeat after ``period`` values."""

    period: int
    offsets: Series  # (period,) how far each phase is above the base, as a logarithm; 0 for the base

    def repeated(self, count: int) -> Series:
        """Return (count,) the offsets of values that start with phase 0."""
        return np.asarray(self.offsets[np.arange(count) % self.period])


def find_pattern(residuals: Series, smallest: float) -> Pattern | None:
    """Return the pattern of ``residuals``; None if there is none, or if it is smaller than ``smallest``.

    For every period, the phases are split into two classes (epoch folding). The gain of a split is the square of its t
    statistic, minus what the best of so many splits gains by chance. What remains is split again, so that a sawtooth
    gets as many different offsets as it needs.

    Args:
        residuals: (n,) logarithms, relative to their level.
        smallest: the smallest range of the offsets that is a pattern.
    """
    longest = min(residuals.size // _FEWEST_REPEATS, _LONGEST_PERIOD)
    best_splits = [
        next(_splits_by_gain(residuals, period)) for period in range(2, longest + 1)
    ]
    if not best_splits:
        return None
    period = _shortest_nearly_best(best_splits).period
    offsets = _offsets(residuals, period, smallest)
    if np.ptp(offsets) < smallest:
        return None
    return Pattern(period, offsets - _offset_of_base(offsets))


def _offsets(residuals: Series, period: int, smallest: float) -> Series:
    """Return (period,) how far each phase is above (+) or below (-) the base, found by one split after another.

    ``smallest`` is the smallest range of the offsets that is a pattern.
    """
    unexplained = residuals.copy()
    offsets = np.zeros(period)
    # each split sets at least one more phase apart, so that there are fewer splits than phases
    for _ in range(period):
        split = _best_split_beyond_chance(unexplained, period)
        if split is None:
            break
        is_minority = split.is_minority(unexplained.size)
        base_level = np.median(unexplained[~is_minority])
        difference = float(np.median(unexplained[is_minority]) - base_level)
        # half of the range is enough here: two differences in opposite directions may add up to it
        if abs(difference) < smallest / 2:
            break
        unexplained[is_minority] -= difference
        offsets[list(split.minority)] += difference
    return offsets


def _offset_of_base(offsets: Series) -> float:
    """Return the offset of the base, which is the most frequent level; of two alternating levels, the lower one."""
    if offsets.size == 2:
        return float(offsets.min())
    return float(np.median(offsets))


@dataclass(frozen=True)
class _Split:
    """A split of the phases of a period into two classes."""

    gain: float  # how well it explains the values, beyond what the best split gains by chance
    period: int
    # the phases of the smaller class, whose steps are usually slower; the other phases are the base
    minority: tuple[int, ...]

    def is_minority(self, count: int) -> NDArray[np.bool_]:
        """Return (count,) which values are in the phases of the minority."""
        phases = np.arange(count) % self.period
        return np.isin(phases, self.minority)


def _shortest_nearly_best(splits: Sequence[_Split]) -> _Split:
    """Return the split of the shortest period that gains nearly as much as the best one.

    A pattern also repeats after two or more periods, so that longer periods may gain about as much. ``splits`` are
    ordered by period.
    """
    most_gain = max(split.gain for split in splits)
    for split in splits:
        if split.gain >= _LEAST_GAIN_SHARE * most_gain:
            return split
    return max(splits, key=lambda split: split.gain)  # all gains are negative


def _best_split_beyond_chance(residuals: Series, period: int) -> _Split | None:
    """Return the split of ``period`` that gains most among those that chance does not explain; None if there is none.

    The split with the highest gain may fail this check. For example, a long step may make the next one a little longer.
    Then the phases of both steps together gain most, because a step counts for at most ``_MOST_DEVIATIONS``, but the
    values of the second phase are not beyond the others.
    """
    for split in _splits_by_gain(residuals, period):
        if split.gain < _NEEDED_GAIN:
            return None
        if _has_separate_minority(split, residuals):
            return split
    return None


def _splits_by_gain(residuals: Series, period: int) -> Iterator[_Split]:
    """Yield the splits of the phases of ``period`` by how well they explain the residuals, the best first.

    The phases are sorted by their median, and divided at one place into lower and higher ones.
    """
    count = residuals.size
    # in differences over a whole period, the pattern cancels out
    noise = noise_of(residuals[period:] - residuals[:-period])
    periods = count // period
    whole_periods = residuals[: periods * period].reshape(periods, period)
    medians = np.median(whole_periods, axis=0)
    standardized = (residuals - np.median(medians)) / noise
    scores = np.clip(standardized, -_MOST_DEVIATIONS, _MOST_DEVIATIONS)

    # (period,) the sum of the scores and the number of steps of each phase, the phase with the lowest median first
    phases = np.arange(count) % period
    order = np.argsort(medians)
    sums = np.bincount(phases, scores, period)[order]
    counts = np.bincount(phases, minlength=period)[order]

    # (period - 1,) the same for the phases below and above each place at which the ordered phases can be divided
    sums_below = np.cumsum(sums)[:-1]
    sums_above = sums.sum() - sums_below
    counts_below = np.cumsum(counts)[:-1]
    counts_above = count - counts_below
    differences = sums_above / counts_above - sums_below / counts_below
    # the variances of the differences; the scores have a variance of 1
    variances = 1.0 / counts_below + 1.0 / counts_above
    choices = [
        _number_of_splits(period, phases_below) for phases_below in range(1, period)
    ]
    gains_by_chance = 2.0 * np.log(choices)
    gains = differences**2 / variances - gains_by_chance

    for place in np.argsort(-gains, kind="stable"):
        phases_below = order[: place + 1]
        phases_above = order[place + 1 :]
        minority = phases_below
        if phases_above.size <= phases_below.size:
            minority = phases_above
        yield _Split(
            gain=float(gains[place]),
            period=period,
            minority=tuple(sorted(minority.tolist())),
        )


def _number_of_splits(period: int, phases: int) -> int:
    """Return the number of splits from which one with ``phases`` phases in a class is chosen.

    The factor ``period`` is for the choice among periods.
    """
    return period * math.comb(period, phases)


def _has_separate_minority(split: _Split, residuals: Series) -> bool:
    """Return whether the values of the minority differ from the others in one direction, and not just by chance.

    Two conditions must hold:

    - At least 75 % of the minority are higher (or lower) than 90 % of the others.
    - So many of the minority are among the highest (or lowest) values that this is unlikely in random order.
    """
    is_minority = split.is_minority(residuals.size)
    minority_values = residuals[is_minority]
    other_values = residuals[~is_minority]
    minority_size = minority_values.size

    # the values of the minority that are beyond 90 % of the others, on either side
    count_above = int((minority_values > np.quantile(other_values, 0.9)).sum())
    count_below = int((minority_values < np.quantile(other_values, 0.1)).sum())
    fewest_beyond = max(_FEWEST_DIFFERENT_STEPS, 0.75 * minority_size)
    if max(count_above, count_below) < fewest_beyond:
        return False

    is_higher = count_above >= count_below
    extremeness = residuals if is_higher else -residuals
    most_extreme_first = np.argsort(-extremeness, kind="stable")
    most_extreme = most_extreme_first[:minority_size]
    overlap = int(is_minority[most_extreme].sum())
    log_chance = _log_chance_of_overlap(residuals.size, minority_size, overlap)
    # The split was chosen among many, each of which had this chance.
    splits = _number_of_splits(split.period, len(split.minority))
    return log_chance + math.log(splits) <= _MOST_LOG_CHANCE


def _log_chance_of_overlap(count: int, size: int, overlap: int) -> float:
    """Return the log of the chance that two random sets of ``size`` out of ``count`` share ``overlap`` or more."""
    # the number of second sets that share so many with a given first set (hypergeometric)
    sets = 0
    for shared in range(overlap, size + 1):
        sets += math.comb(size, shared) * math.comb(count - size, size - shared)
    all_sets = math.comb(count, size)
    return math.log(sets) - math.log(all_sets)

"""Fits the course of a series with autocorrelated noise: levels, a straight line, or an excess that decays.

The noise is AR(1) with an unknown coefficient. Likelihoods are averaged over the coefficient, so that a series with
strongly correlated noise is not mistaken for one that jumps. The noise is estimated within segments, never from data
that contain the change.

A course must also be clearer than chance: the same values in random order must not show a course that is as clear
(``beats_random_order``). This way the rate of false alarms does not depend on the distribution of the noise.

Scores are -2 log likelihood: the lower, the better. Gains are differences of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import LEAST_NOISE, Series

FEWEST_PER_SEGMENT = 3  # values per segment: one or two are outliers, not a level

# Coefficients of AR(1) noise over which likelihoods are averaged, with their prior weights. The first one is 0.
_COEFFICIENTS = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.95])
_PRIOR = np.array([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12.0

_MOST_CHANGES = 10  # the most changes of level that are searched for
# A longer series is divided into this many blocks, and their means are searched: the search takes quadratic time.
_MOST_BLOCKS = 400
_IMPOSSIBLE_SCORE = 1e300  # the score of a course that cannot exist

# What a course must gain. Determined by simulation (benchmarks/statistics).
_BURST_BONUS = 1.5  # a burst needs less than two changes, because it has one level less
_TREND_COST = 6.5  # for a line or a decay

# How clear a change must be. Determined by simulation.
_NEARBY_VALUES = (
    12  # values on each side of a change from whose spread its noise is estimated
)
# the levels of two short segments must differ by so many standard errors
_NEEDED_STANDARD_ERRORS = 4.0
# Long segments must differ by up to this factor more, because means of autocorrelated values scatter more. With more
# values than the second number, autocorrelation is known well, and the factor falls to 1.
_LARGEST_LENGTH_FACTOR = 2.0
_LENGTH_FACTOR_UP_TO = 80

# An exponential decay falls to 1/e within this many values.
_DECAYS = (1.5, 2.1, 3.0, 4.2, 6.0, 8.5, 12.0, 17.0, 24.0, 34.0, 48.0, 68.0, 96.0)
# A power-law decay falls with the square root of the steps since its beginning. The first value is this many steps
# after it: without a warm-up, and with a usual one.
_POWER_LAW_BEGINNINGS = (1.0, 6.0)

# A course is chance if more than 3 of 60 random orders of the values show one that is as clear.
_SHUFFLE_COUNT = 60
_MOST_CLEAR_SHUFFLES = 3
# for a longer series, the means of this many blocks are shuffled instead
_MOST_SHUFFLED_BLOCKS = 100
# A shorter series is not shuffled. Among 20 values, three slow ones are neighbours in one random order of 63. With
# fewer values that is more frequent, and no course could pass the test.
FEWEST_TO_SHUFFLE = 20


@dataclass(frozen=True)
class Course:
    """The fitted course of a series of n values."""

    # the indices at which segments begin (0 first), and n at the end
    edges: tuple[int, ...]
    levels: tuple[float, ...]  # the mean of each segment, without ``trend``
    trend: Series  # (n,) what a line or a decay adds to the level, with mean 0; zeros if there is none
    # (n,) for a decay: the excess of each value over the level to which the series decays
    excess: Series | None = None

    @property
    def fitted(self) -> Series:
        """(n,) the fitted values."""
        return np.repeat(self.levels, np.diff(self.edges)) + self.trend

    @property
    def is_flat(self) -> bool:
        return len(self.levels) == 1 and not np.any(self.trend)

    def starting_at(self, edge: int) -> Course:
        """Return the course of the values from ``edge`` on; a segment must begin there."""
        first_segment = self.edges.index(edge)
        later_edges = self.edges[first_segment:]
        return Course(
            edges=tuple(later_edge - edge for later_edge in later_edges),
            levels=self.levels[first_segment:],
            trend=self.trend[edge:],
            excess=None if self.excess is None else self.excess[edge:],
        )


def flat_course(values: Series) -> Course:
    """Return a course with a single level."""
    return Course(
        edges=(0, values.size),
        levels=(float(values.mean()),),
        trend=np.zeros(values.size),
    )


def find_course(values: Series, smallest: float) -> Course:
    """Return the course of ``values``: of levels, or of a line or a decay if that fits better.

    Args:
        values: (n,) logarithms, without outliers.
        smallest: the smallest change of a level, or over a whole trend, that is fitted.
    """
    count = values.size
    block = _block_size(count)
    means = _block_means(values, block)
    # Both margins are gains over a single level, minus the gain that such a course needs.
    cuts, levels_margin = _find_levels(means, smallest)
    trend = _find_trend(means)
    trend_margin = trend.gain - _TREND_COST
    is_large = abs(trend.values[-1] - trend.values[0]) >= smallest
    is_trend = trend_margin > levels_margin and is_large
    if not is_trend:
        # ``cuts`` are indices of blocks
        edges = (0, *(block * cut for cut in cuts), count)
        return Course(
            edges, levels=_means_between(values, edges), trend=np.zeros(count)
        )

    # The trend was fitted to the means of blocks. Each mean is taken to be the value in the middle of its block.
    block_middles = (np.arange(means.size) + 0.5) * block - 0.5
    trend_by_value = np.interp(np.arange(count), block_middles, trend.values)
    centred_trend = trend_by_value - trend_by_value.mean()
    edges = (0, count)
    levels = _means_between(values - centred_trend, edges)
    excess = trend_by_value if trend.is_decay else None
    return Course(edges, levels, centred_trend, excess)


def beats_random_order(values: Series) -> bool:
    """Return whether ``values`` (logarithms, without outliers) show a clearer course than in random order."""
    if values.size < FEWEST_TO_SHUFFLE:
        return True
    observed_clearness = _clearness_in_order(values)
    rng = np.random.default_rng(values.size)
    as_clear = 0
    for _ in range(_SHUFFLE_COUNT):
        shuffled = rng.permutation(values)
        if _clearness_in_order(shuffled) >= observed_clearness:
            as_clear += 1
        if as_clear > _MOST_CLEAR_SHUFFLES:
            return False
    return True


def _clearness_in_order(values: Series) -> float:
    """Return how clear the best course of ``values`` is: its gain over a single level, minus the gain that it needs.

    The noise is taken to be independent, as it is in random order.
    """
    means = _block_means(values, _block_size(values.size, _MOST_SHUFFLED_BLOCKS))
    centred = means - np.median(means)
    most_changes = _most_changes(means.size)
    costs = _SegmentCosts.from_values(centred, coefficient=0.0)
    candidates = costs.best_segmentations(most_changes)
    scores = np.array([candidate.score for candidate in candidates])
    gains = scores[0] - scores
    margins = gains - _needed_gains(means.size, most_changes)
    levels_margin = float(margins[1:].max())
    trend = _find_trend(means, coefficients=1)
    trend_margin = trend.gain - _TREND_COST
    return max(levels_margin, trend_margin)


def _block_size(count: int, most_blocks: int = _MOST_BLOCKS) -> int:
    """Return how many values a block has, so that ``count`` values are at most ``most_blocks`` blocks."""
    return math.ceil(count / most_blocks)


def _block_means(values: Series, block: int) -> Series:
    """Return the means of blocks of ``block`` values; the values after the last full block are ignored."""
    blocks = values.size // block
    means = values[: blocks * block].reshape(blocks, block).mean(axis=1)
    return np.asarray(means)


def _means_between(values: Series, edges: Sequence[int]) -> tuple[float, ...]:
    """Return the mean of the values from each of ``edges`` to the next one."""
    return tuple(float(values[begin:end].mean()) for begin, end in pairwise(edges))


# -- levels ------------------------------------------------------------------------------------------------------------


def change_costs(count: int, changes: int) -> float:
    """Return the gain that a course of ``count`` values with this number of changes needs over a single level.

    The form is that of Schwarz's criterion (Yao 1988, Statistics & Probability Letters 6:181). The constants are from
    simulation (benchmarks/statistics): false alarms in at most 1 % of series with independent normal noise, and in 3 %
    with AR(1) noise of 0.6.
    """
    return 8.5 + changes * (2.0 + math.log(count))


def _most_changes(count: int) -> int:
    return min(_MOST_CHANGES, count // 10)


def _needed_gains(count: int, most_changes: int) -> Series:
    """Return (most_changes + 2,) the gains that courses with 0 to ``most_changes`` changes need, and last a burst."""
    gains = [change_costs(count, changes) for changes in range(most_changes + 1)]
    burst_gain = change_costs(count, changes=2) - _BURST_BONUS
    return np.array([*gains, burst_gain])


def _find_levels(values: Series, smallest: float) -> tuple[list[int], float]:
    """Return the indices at which the level changes, and by how much the gain over one level exceeds the needed one.

    The best cuts for each number of changes come from dynamic programming (Auger & Lawrence 1989, Bulletin of
    Mathematical Biology 51:39). The likelihood is marginal in levels and scale (Harville 1974), and averaged over the
    AR(1) coefficient. A burst, with the same level before and after it, is another candidate (Olshen et al. 2004,
    Biostatistics 5:557).
    """
    most_changes = _most_changes(values.size)
    # values far from 0 would lose digits in sums of squares
    centred = values - np.median(values)
    candidates_by_coefficient: list[list[_Segmentation]] = []
    for coefficient in _COEFFICIENTS:
        costs = _SegmentCosts.from_values(centred, float(coefficient))
        candidates_by_coefficient.append(costs.best_segmentations(most_changes))

    # (coefficients, candidates); the first candidate has no change, the last is the burst
    scores = np.array(
        [
            [candidate.score for candidate in candidates]
            for candidates in candidates_by_coefficient
        ]
    )
    # (candidates,) and (coefficients, candidates)
    mean_scores, posterior = _averaged_over_coefficients(scores)
    gains = mean_scores[0] - mean_scores
    margins = gains - _needed_gains(values.size, most_changes)
    margins[0] = 0.0  # a single level needs no gain
    best = int(margins.argmax())
    # the cuts depend on the coefficient
    likeliest_coefficient = int(posterior[:, best].argmax())
    best_candidate = candidates_by_coefficient[likeliest_coefficient][best]
    cuts = _clear_cuts(centred, best_candidate.cuts, smallest)
    if not cuts:
        return [], 0.0
    return cuts, float(margins[best])


def _clear_cuts(values: Series, cuts: Sequence[int], smallest: float) -> list[int]:
    """Return the ``cuts`` whose change of level is at least ``smallest``, and large compared with the noise around."""
    clear_cuts = list(cuts)
    while clear_cuts:
        clearness = []
        begins = [0, *clear_cuts[:-1]]
        ends = [*clear_cuts[1:], values.size]
        for begin, cut, end in zip(begins, clear_cuts, ends, strict=True):
            earlier = values[begin:cut]
            later = values[cut:end]
            clearness.append(_clearness(earlier, later, values.size, smallest))
        weakest = int(np.argmin(clearness))
        if clearness[weakest] >= 1.0:
            break
        # Only one cut is removed at a time: the cuts beside it then have longer levels, and may be clear.
        del clear_cuts[weakest]
    return clear_cuts


def _clearness(earlier: Series, later: Series, count: int, smallest: float) -> float:
    """Return the ratio of a change of level to the smallest change that is accepted.

    Args:
        earlier: the values of the level before the change.
        later: the values of the level after it.
        count: the number of values of the whole series.
        smallest: the smallest accepted change, whatever the noise is.
    """
    earlier_level = earlier.mean()
    later_level = later.mean()
    # the noise, from the residuals just before and just after the change; two levels were estimated
    last_residuals = (earlier - earlier_level)[-_NEARBY_VALUES:]
    next_residuals = (later - later_level)[:_NEARBY_VALUES]
    residuals = np.concatenate([last_residuals, next_residuals])
    variance = float(residuals @ residuals) / max(residuals.size - 2, 1)
    noise = math.sqrt(variance + LEAST_NOISE**2)
    standard_error = noise * math.sqrt(1 / earlier.size + 1 / later.size)

    # 1 for the shortest level; longer levels must differ more, because the noise may be autocorrelated
    shorter_size = min(earlier.size, later.size)
    largest_factor = max(min(_LARGEST_LENGTH_FACTOR, _LENGTH_FACTOR_UP_TO / count), 1.0)
    factor = min(math.sqrt(shorter_size / FEWEST_PER_SEGMENT), largest_factor)

    change = abs(float(later_level - earlier_level))
    smallest_by_noise = _NEEDED_STANDARD_ERRORS * factor * standard_error
    return min(change / smallest, change / smallest_by_noise)


@dataclass(frozen=True)
class _SegmentWeights:
    """The part of the likelihood of every segment of n values that does not depend on the values.

    All arrays are (n, n + 1): row b and column e belong to the segment [b, e). The weight of a segment is the sum of
    squares of a constant, whitened for AR(1) noise. It is the weight with which the segment's mean is known.
    """

    weights: Series
    log_weights: Series
    weights_around: Series  # the weight of everything before the segment and after it
    is_long_enough: NDArray[np.bool_]
    # whether the segment, the values before it, and those after it are long enough
    may_be_burst: NDArray[np.bool_]


# One entry: all random orders of a series need the same weights, and those of a long series take megabytes.
@lru_cache(maxsize=1)
def _segment_weights(count: int, coefficient: float) -> _SegmentWeights:
    """Return the weights of all segments of ``count`` values under AR(1) noise of ``coefficient``."""
    begins = np.arange(count)[:, None]
    ends = np.arange(count + 1)[None, :]
    lengths = ends - begins  # zero or negative if there is no segment

    # Whitening subtracts the coefficient times the previous value, which leaves 1 - coefficient of a constant. It
    # scales the first value, which has none before it, by sqrt(1 - coefficient²). The weight sums the squares.
    first_weight = 1.0 - coefficient**2
    later_weights = (lengths - 1) * (1.0 - coefficient) ** 2
    # at least that of one value, so that the logarithm exists even if there is no segment
    weights = np.maximum(first_weight + later_weights, first_weight)

    has_neighbours = (begins >= FEWEST_PER_SEGMENT) & (
        ends <= count - FEWEST_PER_SEGMENT
    )
    is_long_enough = lengths >= FEWEST_PER_SEGMENT
    return _SegmentWeights(
        weights,
        log_weights=np.log(weights),
        weights_around=_sums_around(weights),
        is_long_enough=is_long_enough,
        may_be_burst=is_long_enough & has_neighbours,
    )


def _sums_around(sums: Series) -> Series:
    """Return (n, n + 1) the sums over all before and after each segment, from the (n, n + 1) sums of segments."""
    count = len(sums)
    # of the segments [0, b), by b in rows
    sums_before = sums[0, :count, None]
    # of the segments [e, n), by e in columns; nothing comes after n
    sums_after = np.append(sums[:, count], 0.0)[None, :]
    return np.asarray(sums_before + sums_after)


class _Segmentation(NamedTuple):
    """A division of a series into segments."""

    score: float
    cuts: Sequence[int]  # the indices at which the second and later segments begin


@dataclass(frozen=True)
class _SegmentCosts:
    """Sums over every segment of a series of n values, whitened for AR(1) noise; from these, the best segmentations.

    Whitening subtracts from each value the coefficient times the value before it. It starts again in each segment: a
    segment's first value is only scaled, so that all whitened values have the same variance. Arrays are (n, n + 1): row
    b, column e belong to the segment [b, e).
    """

    count: int  # the number of values, n
    # the square of the factor that scales a segment's first value: 1 - coefficient squared
    first_weight: float
    squares: Series  # the sum of squares of the whitened values
    sums: Series  # the sum of the products of the whitened values with a whitened 1
    weights: _SegmentWeights

    @classmethod
    def from_values(cls, values: Series, coefficient: float) -> _SegmentCosts:
        """Return the sums over all segments of ``values``."""
        # All values of a segment except the first. If each value were 1, each would be 1 - coefficient when whitened.
        whitened = values[1:] - coefficient * values[:-1]
        whitened_one = 1.0 - coefficient
        later_sums = whitened_one * _sums_without_first(whitened)
        later_squares = _sums_without_first(whitened**2)

        # The first value of a segment is scaled by the square root of ``first_weight``, as is the 1 that stands for it.
        first_weight = 1.0 - coefficient**2
        first_sums = first_weight * values
        first_squares = first_weight * values * values
        return cls(
            count=values.size,
            first_weight=first_weight,
            squares=later_squares + first_squares[:, None],
            sums=later_sums + first_sums[:, None],
            weights=_segment_weights(values.size, coefficient),
        )

    @cached_property
    def _squares_of_segments(self) -> Series:
        """(n, n + 1) the sum of squares of each segment about its own mean; infinite if it is too short."""
        about_level = self.squares - self.sums**2 / self.weights.weights
        return np.where(self.weights.is_long_enough, about_level, np.inf)

    def best_segmentations(self, most_changes: int) -> list[_Segmentation]:
        """Return the best segmentation with each number of changes, 0 to ``most_changes``, and last the best burst."""
        return [*self._best_by_changes(most_changes), self._best_burst()]

    def _best_by_changes(self, most_changes: int) -> list[_Segmentation]:
        """Return the best segmentation with each number of changes, from 0 to ``most_changes``.

        Dynamic programming: the best division of the values before an end into k segments consists of a last segment,
        and of the best division of the values before that segment into k - 1 segments.
        """
        count = self.count
        residuals = self._squares_of_segments
        log_weights = self.weights.log_weights
        ends = np.arange(count + 1)

        # (n + 1,) sums over the best division of the values before each end; with one level, over the segment from 0 on
        best_residuals = residuals[0]
        best_log_weights = log_weights[0]
        last_cuts: list[NDArray[np.intp]] = []
        segmentations = []
        for levels in range(1, most_changes + 2):
            if levels > 1:
                # (n, n + 1) the sum for each last cut (row) and each end (column)
                residuals_by_cut = best_residuals[:count, None] + residuals
                last_cut = residuals_by_cut.argmin(axis=0)
                best_residuals = residuals_by_cut[last_cut, ends]
                best_log_weights = (
                    best_log_weights[last_cut] + log_weights[last_cut, ends]
                )
                last_cuts.append(last_cut)
            score = self._score_of_segmentation(
                float(best_residuals[count]),
                float(best_log_weights[count]),
                levels=levels,
                segments=levels,
            )
            cuts = _cuts_of_best_segmentation(last_cuts, count)
            segmentations.append(_Segmentation(score, cuts))
        return segmentations

    def _best_burst(self) -> _Segmentation:
        """Return the best burst, which has two cuts: a segment with the same level before and after it.

        If the series is too short for a burst, its score is ``_IMPOSSIBLE_SCORE``.
        """
        weights_around = self.weights.weights_around
        if not self.weights.may_be_burst.any():
            return _Segmentation(_IMPOSSIBLE_SCORE, cuts=[])

        # (n, n + 1) the sums of squares about the level around each segment, and about both levels
        squares_around = _sums_around(self.squares)
        sums_around = _sums_around(self.sums)
        residuals_around = squares_around - sums_around**2 / weights_around
        residuals = self._squares_of_segments + residuals_around
        residuals[~self.weights.may_be_burst] = np.inf
        best = np.unravel_index(int(residuals.argmin()), residuals.shape)
        log_weight_of_burst = math.log(self.weights.weights[best])
        log_weight = math.log(weights_around[best]) + log_weight_of_burst
        score = self._score_of_segmentation(
            float(residuals[best]), log_weight, levels=2, segments=3
        )
        begin, end = best
        return _Segmentation(score, cuts=[int(begin), int(end)])

    def _score_of_segmentation(
        self, residual: float, log_weight: float, *, levels: int, segments: int
    ) -> float:
        """Return the score of a segmentation: -2 log likelihood, marginal in the levels and the scale.

        Args:
            residual: the sum of squares about the levels.
            log_weight: the sum of the logarithms of the weights of the levels.
            levels: the number of different levels.
            segments: the number of segments: one more than levels if there is a burst.
        """
        finest_variance = LEAST_NOISE**2 * self.first_weight
        variance = residual / max(self.count - levels, 1) + finest_variance
        log_variances = (self.count - 1) * math.log(variance)
        # whitening scales the first value of each segment, which changes the density of the values by that factor
        log_scales = segments * math.log(self.first_weight)
        return log_variances - log_scales + log_weight


def _sums_without_first(whitened: Series) -> Series:
    """Return (n, n + 1) the sums over the values of each segment except its first one.

    ``whitened`` has n - 1 values: there is none for the first value of the series.
    """
    # (n + 1,) at index i, the sum over the values of the series with the indices 1 to i - 1
    sums_before = np.concatenate([[0.0, 0.0], np.cumsum(whitened)])
    sums_before_end = sums_before[None, :]
    sums_before_second = sums_before[1:, None]
    return np.asarray(sums_before_end - sums_before_second)


def _cuts_of_best_segmentation(
    last_cuts: Sequence[NDArray[np.intp]], count: int
) -> list[int]:
    """Return the cuts of the best segmentation of all ``count`` values.

    ``last_cuts`` has one array for each number of segments from 2 on: the last cut of the best division, by its end.
    """
    cuts: list[int] = []
    end = count
    for last_cut in reversed(last_cuts):
        end = int(last_cut[end])
        cuts.insert(0, end)
    return cuts


def _averaged_over_coefficients(
    scores: Series, prior: Series = _PRIOR
) -> tuple[Series, Series]:
    """Average likelihoods over the AR(1) coefficient.

    Args:
        scores: (coefficients, …) the score for each coefficient.
        prior: (coefficients,) the prior probability of each coefficient.

    Returns:
        (…) the scores of the averaged likelihoods, and (coefficients, …) the posterior probability of each coefficient.
    """
    # likelihoods relative to that of the best coefficient, because they would underflow otherwise
    best_scores = scores.min(axis=0)
    likelihoods = np.exp(-0.5 * (scores - best_scores))
    other_axes = tuple(range(1, scores.ndim))
    weighted = likelihoods * np.expand_dims(prior, other_axes)
    totals = weighted.sum(axis=0)
    mean_scores = best_scores - 2.0 * np.log(totals)
    posterior = weighted / totals
    return mean_scores, posterior


# -- lines and decays --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trend:
    """A straight line or a decay."""

    gain: float  # how much better the trend fits than a single level
    values: Series  # (n,) for a line, relative to its mean; for a decay, the excess over its final level
    is_decay: bool


def _find_trend(values: Series, coefficients: int = _COEFFICIENTS.size) -> _Trend:
    """Return the best of a straight line and several decays.

    The likelihood is averaged over the first ``coefficients`` AR(1) coefficients (1: independent noise only).
    """
    centred = values - np.median(values)
    shapes, is_decay = _unit_shapes(values.size)
    # one fit for each coefficient, each of a level alone, and of a level plus each shape
    fits = [
        _fit_shapes(centred, float(coefficient))
        for coefficient in _COEFFICIENTS[:coefficients]
    ]
    level_scores = np.array([fit.level_score for fit in fits])
    shape_scores = np.stack([fit.shape_scores for fit in fits])
    slopes = np.stack([fit.slopes for fit in fits])

    prior = _PRIOR[:coefficients] / _PRIOR[:coefficients].sum()
    mean_level_score, _ = _averaged_over_coefficients(level_scores, prior)
    mean_shape_scores, posterior = _averaged_over_coefficients(shape_scores, prior)
    mean_slopes = (posterior * slopes).sum(axis=0)
    gains = mean_level_score - mean_shape_scores  # the lower a score, the better
    # A decay with a negative slope rises to its final level, which is not a warm-up.
    rises_to_level = is_decay & (mean_slopes <= 0)
    gains[rises_to_level] = -np.inf
    best = int(gains.argmax())
    trend = mean_slopes[best] * shapes[best]
    return _Trend(gain=float(gains[best]), values=trend, is_decay=bool(is_decay[best]))


@dataclass(frozen=True)
class _Regressors:
    """The whitened series, and sums of them, that a regression on a constant and unit shapes needs."""

    constant: Series  # (n,) the constant
    shapes: Series  # (shapes, n) the unit shapes
    constant_weight: float  # the sum of squares of ``constant``
    shapes_on_constant: Series  # (shapes,) the products of each shape with ``constant``
    weights: Series  # (shapes,) the sum of squares of each shape about its mean


@lru_cache(maxsize=16)
def _regressors(count: int, coefficient: float) -> _Regressors:
    """Return the regressors for ``count`` values under AR(1) noise of ``coefficient``."""
    constant = _whitened(np.ones(count), coefficient)
    shapes = _whitened(_unit_shapes(count)[0], coefficient)
    constant_weight = float(constant @ constant)
    shapes_on_constant = shapes @ constant
    weights = (shapes**2).sum(axis=1) - shapes_on_constant**2 / constant_weight
    return _Regressors(constant, shapes, constant_weight, shapes_on_constant, weights)


class _ShapeFits(NamedTuple):
    """Fits to one series under one AR(1) coefficient: of a level alone, and of a level plus each unit shape."""

    level_score: float  # of the level alone
    shape_scores: Series  # (shapes,) of the level plus each shape
    slopes: Series  # (shapes,) the factor by which each shape is multiplied


def _fit_shapes(values: Series, coefficient: float) -> _ShapeFits:
    """Fit a level to ``values``, and a level plus each of the unit shapes, under AR(1) noise of ``coefficient``."""
    count = values.size
    first_weight = 1.0 - coefficient**2
    regressors = _regressors(count, coefficient)
    constant_weight = regressors.constant_weight
    response = _whitened(values, coefficient)
    response_on_constant = float(regressors.constant @ response)

    # sums of squares and products about the mean, that is, without what the constant explains
    squares = float(response @ response) - response_on_constant**2 / constant_weight
    products_by_constant = regressors.shapes_on_constant * response_on_constant
    products = regressors.shapes @ response - products_by_constant / constant_weight
    slopes = products / regressors.weights

    # the scores: -2 log likelihood, marginal in the level, the slope and the scale
    finest_variance = LEAST_NOISE**2 * first_weight
    common_score = -math.log(first_weight) + math.log(constant_weight)
    level_variance = squares / (count - 1) + finest_variance
    level_score = (count - 1) * math.log(level_variance) + common_score
    unexplained = np.maximum(squares - slopes**2 * regressors.weights, 0.0)
    variances = unexplained / (count - 2) + finest_variance
    shape_scores = (count - 1) * np.log(variances) + np.log(regressors.weights)
    return _ShapeFits(level_score, shape_scores + common_score, slopes)


def _whitened(values: Series, coefficient: float) -> Series:
    """Return (…, n) ``values`` whose AR(1) noise is made independent, with the same variance for all.

    From each value the coefficient times the value before it is subtracted; the first value is only scaled.
    """
    first_value = values[..., :1]
    earlier_values = values[..., :-1]
    later_values = values[..., 1:]
    scaled_first = math.sqrt(1.0 - coefficient**2) * first_value
    whitened = later_values - coefficient * earlier_values
    return np.concatenate([scaled_first, whitened], axis=-1)


@lru_cache(maxsize=64)
def _unit_shapes(count: int) -> tuple[Series, NDArray[np.bool_]]:
    """Return a straight line and decays as (shapes, n) with mean square 1, and (shapes,) which of them are decays."""
    steps = np.arange(count)
    straight_line = steps - (count - 1) / 2.0
    shapes = [straight_line]
    for decay in _DECAYS:
        if decay <= count / 2:
            shapes.append(np.exp(-steps / decay))
    for beginning in _POWER_LAW_BEGINNINGS:
        shapes.append((steps + beginning) ** -0.5)
    stacked = np.stack(shapes)
    root_mean_squares = np.sqrt((stacked**2).mean(axis=1, keepdims=True))
    is_decay = np.arange(len(shapes)) > 0  # all shapes after the straight line
    return np.asarray(stacked / root_mean_squares), is_decay

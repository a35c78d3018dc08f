"""The course of a series under autocorrelated noise: levels, a straight line, or an excess that dies away.

The noise is AR(1) with an unknown coefficient. Likelihoods are averaged over the coefficient, so that a series that
wanders is not mistaken for one that jumps. Noise is estimated within the segments, never from data that still contain
the change.

A course must also beat chance: the same values in random order may not show one as clear (``beats_random_order``).
So the rate of false alarms does not depend on the distribution of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import FINEST, Series

FEWEST = 3  # values of a segment: one or two are odd values, not a level

# Coefficients of AR(1) noise over which likelihoods are averaged, with their prior weights. The first one is 0.
_COEFFICIENTS = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.95])
_PRIOR = np.array([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12.0

_MOST_CHANGES = 10  # of level that are searched for
# of more values, means of a few at once are searched: the search is quadratic
_MOST_VALUES = 400
_IMPOSSIBLE = 1e300  # score of a course that cannot be

# Costs, in units of twice the log likelihood: simulated (benchmarks/statistics)
_BURST_BONUS = 1.5  # a burst has one level less than two changes have
_TREND_COST = 6.5  # of a line or a decay

# How clear a change must be: simulated
_NEARBY = 12  # values on each side of a change whose spread is its noise
_STANDARD_ERRORS = 4.0  # by which the levels of two short segments must differ
_LONG_FACTOR = 2.0  # how many times as much long segments must differ: means of alike neighbours scatter more
_LONG_FACTOR_UP_TO = 80  # values; with more of them the likeness of neighbours is known, and the factor falls to 1

# Decays: values in which an excess falls to 1/e; a power law falls with the root of the steps since its beginning.
_DECAYS = (1.5, 2.1, 3.0, 4.2, 6.0, 8.5, 12.0, 17.0, 24.0, 34.0, 48.0, 68.0, 96.0)
# steps before the first value, itself included: without and with a usual warm-up
_POWER_LAW_BEGINNINGS = (1.0, 6.0)

# Orders of a series that are tried, of which at most so many may show as clear a course. Three of twenty values that
# are apart are neighbours in one order of 63: with fewer values the test could not be passed.
_SHUFFLES = 60
_MOST_SHUFFLED = 100  # of more values, means of a few at once are shuffled
_CLEAR_SHUFFLES = 3  # shuffled series that may look as clear by chance
FEWEST_TO_SHUFFLE = 20  # values: of fewer, too few orders differ


@dataclass(frozen=True)
class Course:
    """The fitted course of a series of n values."""

    edges: tuple[int, ...]  # indices at which segments begin, 0 first, and n at the end
    levels: tuple[float, ...]  # the mean of each segment, without ``trend``
    trend: Series  # (n,) what a line or a decay adds to the level, 0 on average; zeros if there is none
    # (n,) of a decay: how far each value lies above what it falls to
    excess: Series | None = None

    @property
    def fitted(self) -> Series:
        """(n,) the course itself."""
        return np.repeat(self.levels, np.diff(self.edges)) + self.trend

    @property
    def is_flat(self) -> bool:
        return len(self.levels) == 1 and not np.any(self.trend)

    def starting_at(self, edge: int) -> Course:
        """Return the course from ``edge`` on, at which a segment begins."""
        segment = self.edges.index(edge)
        edges = tuple(later_edge - edge for later_edge in self.edges[segment:])
        excess = None if self.excess is None else self.excess[edge:]
        return Course(edges, self.levels[segment:], self.trend[edge:], excess)


def flat_course(values: Series) -> Course:
    """Return the course that is one level."""
    return Course(
        edges=(0, values.size),
        levels=(float(values.mean()),),
        trend=np.zeros(values.size),
    )


def find_course(values: Series, smallest: float) -> Course:
    """Return the course of ``values``, logarithms without odd ones. A trend smaller than ``smallest`` is left out."""
    count = values.size
    block = _block_size(count)
    means = _block_means(values, block)
    cuts, levels_gain = _find_levels(means, smallest)
    trend = _find_trend(means)
    gains_more = trend.gain - _TREND_COST > levels_gain
    is_large = abs(trend.values[-1] - trend.values[0]) >= smallest
    if not gains_more or not is_large:
        edges = (0, *(block * cut for cut in cuts), count)
        return Course(
            edges, levels=_means_between(values, edges), trend=np.zeros(count)
        )

    block_middles = (np.arange(means.size) + 0.5) * block - 0.5
    trend_by_value = np.interp(np.arange(count), block_middles, trend.values)
    centred_trend = trend_by_value - trend_by_value.mean()
    edges = (0, count)
    levels = _means_between(values - centred_trend, edges)
    excess = trend_by_value if trend.dies_away else None
    return Course(edges, levels, centred_trend, excess)


def beats_random_order(values: Series) -> bool:
    """Return whether ``values``, logarithms without odd ones, show a clearer course than they do in random order."""
    if values.size < FEWEST_TO_SHUFFLE:
        return True
    observed_clearness = _clearness_in_order(values)
    rng = np.random.default_rng(values.size)
    as_clear = 0
    for _ in range(_SHUFFLES):
        shuffled = rng.permutation(values)
        if _clearness_in_order(shuffled) >= observed_clearness:
            as_clear += 1
        if as_clear > _CLEAR_SHUFFLES:
            return False
    return True


def _clearness_in_order(values: Series) -> float:
    """Return the most that a course gains over one level, less its cost, if noise is independent."""
    means = _block_means(values, _block_size(values.size, _MOST_SHUFFLED))
    centred = means - np.median(means)
    most_changes = _most_changes(means.size)
    costs = _SegmentCosts.from_values(centred, coefficient=0.0)
    scores, _ = costs.segmentations(most_changes)
    burst_score, _ = costs.burst()
    candidate_scores = np.array([*scores, burst_score])
    gains = scores[0] - candidate_scores - _needed_gains(means.size, most_changes)
    levels_gain = float(gains[1:].max())
    trend_gain = _find_trend(means, coefficients=1).gain - _TREND_COST
    return max(levels_gain, trend_gain)


def _block_size(count: int, most_blocks: int = _MOST_VALUES) -> int:
    return math.ceil(count / most_blocks)


def _block_means(values: Series, block: int) -> Series:
    """Return the means of ``block`` values at a time; those after the last full block do not count."""
    blocks = values.size // block
    means = values[: blocks * block].reshape(blocks, block).mean(axis=1)
    return np.asarray(means)


def _means_between(values: Series, edges: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(values[begin:end].mean()) for begin, end in pairwise(edges))


# -- levels ------------------------------------------------------------------------------------------------------------


def change_costs(count: int, changes: int) -> float:
    """Return by how much ``changes`` must raise twice the log likelihood of ``count`` values.

    Simulated (benchmarks/statistics): false alarms of at most 1 % if values are independent and normal, 3 % at AR(1) of
    0.6; in the form of Schwarz's criterion (Yao 1988, Statistics & Probability Letters 6:181).
    """
    return 8.5 + changes * (2.0 + math.log(count))


def _most_changes(count: int) -> int:
    return min(_MOST_CHANGES, count // 10)


def _needed_gains(count: int, most_changes: int) -> Series:
    """Return what 0 to ``most_changes`` changes must gain, and a burst."""
    gains = [change_costs(count, changes) for changes in range(most_changes + 1)]
    burst_gain = change_costs(count, 2) - _BURST_BONUS
    return np.array([*gains, burst_gain])


def _find_levels(values: Series, smallest: float) -> tuple[list[int], float]:
    """Return where the level changes, and how much that gains over one level; dynamic programming over all cuts.

    The segmentation is that of Auger & Lawrence (1989, Bulletin of Mathematical Biology 51:39); the likelihood is
    marginal in levels and scale (Harville 1974) and averaged over the AR(1) coefficient. A burst, with one level
    before and after it, is a candidate of its own (Olshen et al. 2004, Biostatistics 5:557).
    """
    most_changes = _most_changes(values.size)
    # sums of squares about 0 lose digits far from it
    centred = values - np.median(values)
    score_rows = []
    candidate_rows = []
    for coefficient in _COEFFICIENTS:
        costs = _SegmentCosts.from_values(centred, float(coefficient))
        scores, candidates = costs.segmentations(most_changes)
        burst_score, burst = costs.burst()
        score_rows.append([*scores, burst_score])
        candidate_rows.append([*candidates, burst])

    # [candidate], and [coefficient, candidate]; the first candidate has no change
    mean_scores, posterior = _averaged(np.array(score_rows))
    gains = mean_scores[0] - mean_scores
    margins = gains - _needed_gains(values.size, most_changes)
    margins[0] = 0.0
    best = int(margins.argmax())
    likeliest_coefficient = int(posterior[:, best].argmax())
    best_cuts = candidate_rows[likeliest_coefficient][best]
    cuts = _clear_cuts(centred, best_cuts, smallest)
    if not cuts:
        return [], 0.0
    return cuts, float(margins[best])


def _clear_cuts(values: Series, cuts: Sequence[int], smallest: float) -> list[int]:
    """Return those of ``cuts`` that are large enough, and not explained by the noise around them."""
    clear_cuts = list(cuts)
    while clear_cuts:
        edges = [0, *clear_cuts, values.size]
        clearness = []
        for begin, cut, end in zip(edges, clear_cuts, edges[2:], strict=False):
            clearness.append(
                _clearness(values[begin:cut], values[cut:end], values.size, smallest)
            )
        weakest = int(np.argmin(clearness))
        if clearness[weakest] >= 1.0:
            break
        # one at a time: its neighbours have longer levels now, and may be clear
        del clear_cuts[weakest]
    return clear_cuts


def _clearness(earlier: Series, later: Series, count: int, smallest: float) -> float:
    """Return how many times as large a change is as it has to be.

    It lies between the values of two levels, ``earlier`` and ``later``, in a series of ``count`` values.
    """
    earlier_level = earlier.mean()
    later_level = later.mean()
    last_residuals = (earlier - earlier_level)[-_NEARBY:]
    next_residuals = (later - later_level)[:_NEARBY]
    residuals = np.concatenate([last_residuals, next_residuals])
    variance = float(residuals @ residuals) / max(residuals.size - 2, 1)
    noise = math.sqrt(variance + FINEST**2)
    standard_error = noise * math.sqrt(1 / earlier.size + 1 / later.size)

    shorter_size = min(earlier.size, later.size)
    most_factor = max(min(_LONG_FACTOR, _LONG_FACTOR_UP_TO / count), 1.0)
    factor = min(math.sqrt(shorter_size / FEWEST), most_factor)

    change = abs(float(later_level - earlier_level))
    least_by_noise = _STANDARD_ERRORS * factor * standard_error
    return min(change / smallest, change / least_by_noise)


@dataclass(frozen=True)
class _SegmentWeights:
    """What every segment [begin, end) of n values weighs under AR(1) noise, whatever the values are."""

    weights: Series  # (n, n + 1) the sum of squares of the segment's whitened constant
    log_weights: Series
    weights_around: Series  # the same of everything before the segment and after it
    is_long_enough: NDArray[np.bool_]
    # long enough, and so is what lies before it and after it
    may_be_burst: NDArray[np.bool_]


# Each order that is tried needs the same weights; of many values they take megabytes.
@lru_cache(maxsize=1)
def _segment_weights(count: int, coefficient: float) -> _SegmentWeights:
    """Return what all segments of ``count`` values weigh under AR(1) noise of ``coefficient``."""
    first_weight = 1.0 - coefficient**2
    lengths = np.arange(count + 1)[None, :] - np.arange(count)[:, None]
    weights = first_weight + (lengths - 1) * (1.0 - coefficient) ** 2
    weights = np.maximum(weights, first_weight)

    begins = np.arange(count)[:, None]
    ends = np.arange(count + 1)[None, :]
    has_neighbours = (begins >= FEWEST) & (ends <= count - FEWEST)
    is_long_enough = lengths >= FEWEST
    return _SegmentWeights(
        weights,
        log_weights=np.log(weights),
        weights_around=_sums_around(weights),
        is_long_enough=is_long_enough,
        may_be_burst=is_long_enough & has_neighbours,
    )


def _sums_around(sums: Series) -> Series:
    """Return the sums over everything before each segment and after it."""
    count = len(sums)
    sums_before = sums[0, :count, None]
    sums_after = np.append(sums[:, count], 0.0)[None, :]
    return np.asarray(sums_before + sums_after)


@dataclass(frozen=True)
class _SegmentCosts:
    """Sums over every segment [begin, end) of a series under AR(1) noise that begins anew at each change.

    Rows are begins from 0 to n - 1, columns are ends from 0 to n.
    """

    count: int  # n
    # of a segment's first value beside the others: 1 - coefficient squared
    first_weight: float
    squares: Series  # (n, n + 1) the sum of squares of the segment's whitened values
    sums: Series  # the product of the whitened values with a whitened constant
    weights: _SegmentWeights

    @classmethod
    def from_values(cls, values: Series, coefficient: float) -> _SegmentCosts:
        """Return the sums of all segments of ``values``, from cumulative sums of the whitened values."""
        count = values.size
        whitened_one = 1.0 - coefficient
        first_weight = 1.0 - coefficient**2

        # Sums from index 1 to before index i, which is 0 and 1 for none.
        whitened = values[1:] - coefficient * values[:-1]
        sums_before = np.concatenate([[0.0, 0.0], np.cumsum(whitened)])
        squares_before = np.concatenate([[0.0, 0.0], np.cumsum(whitened**2)])

        # The first value of a segment has no value before it; the others are whitened.
        second_indices = np.arange(1, count + 1)
        later_sums = sums_before[None, :] - sums_before[second_indices][:, None]
        later_squares = (
            squares_before[None, :] - squares_before[second_indices][:, None]
        )
        first_sums = (first_weight * values)[:, None]
        first_squares = (first_weight * values * values)[:, None]

        sums = whitened_one * later_sums + first_sums
        squares = later_squares + first_squares
        weights = _segment_weights(count, coefficient)
        return cls(count, first_weight, squares, sums, weights)

    @cached_property
    def _residuals(self) -> Series:
        """The sum of squares of each segment about its own level; infinite if it is too short."""
        about_level = self.squares - self.sums**2 / self.weights.weights
        return np.where(self.weights.is_long_enough, about_level, np.inf)

    def segmentations(self, most_changes: int) -> tuple[list[float], list[list[int]]]:
        """Return the score of the best segmentation with 0 to ``most_changes`` changes, and where these are."""
        count = self.count
        residuals = self._residuals
        log_weights = self.weights.log_weights
        ends = np.arange(count + 1)

        # of the best segmentation of the values before each end
        best_residuals = residuals[0]
        best_log_weights = log_weights[0]
        last_cuts: list[NDArray[np.intp]] = []
        scores = []
        candidates = []
        for levels in range(1, most_changes + 2):
            if levels > 1:
                # [last cut, end]
                sums = best_residuals[:count, None] + residuals
                last_cut = sums.argmin(axis=0)
                best_residuals = sums[last_cut, ends]
                best_log_weights = (
                    best_log_weights[last_cut] + log_weights[last_cut, ends]
                )
                last_cuts.append(last_cut)
            score = self._score(
                float(best_residuals[count]),
                float(best_log_weights[count]),
                levels=levels,
                segments=levels,
            )
            scores.append(score)
            candidates.append(_traced_back(last_cuts, count))
        return scores, candidates

    def burst(self) -> tuple[float, list[int]]:
        """Return the score of the best segment that has one level before and after it, and where it is."""
        weights_around = self.weights.weights_around
        if not self.weights.may_be_burst.any():
            return _IMPOSSIBLE, []

        squares_around = _sums_around(self.squares)
        sums_around = _sums_around(self.sums)
        totals = self._residuals + squares_around - sums_around**2 / weights_around
        totals[~self.weights.may_be_burst] = np.inf
        place = np.unravel_index(int(totals.argmin()), totals.shape)
        weight = self.weights.weights[place]
        log_weight = math.log(weights_around[place]) + math.log(weight)
        score = self._score(float(totals[place]), log_weight, levels=2, segments=3)
        begin, end = place
        return score, [int(begin), int(end)]

    def _score(
        self, residual: float, log_weight: float, *, levels: int, segments: int
    ) -> float:
        """Return -2 log of the likelihood, marginal in the levels and the scale.

        A burst has one level before and after it: two levels in three segments.
        """
        variance = (
            residual / max(self.count - levels, 1) + FINEST**2 * self.first_weight
        )
        log_variances = (self.count - 1) * math.log(variance)
        return log_variances - segments * math.log(self.first_weight) + log_weight


def _traced_back(last_cuts: Sequence[NDArray[np.intp]], count: int) -> list[int]:
    """Return the cuts of the best segmentation of all values; ``last_cuts`` has the last cut before each end."""
    cuts: list[int] = []
    end = count
    for last_cut in reversed(last_cuts):
        end = int(last_cut[end])
        cuts.insert(0, end)
    return cuts


def _averaged(scores: Series, prior: Series = _PRIOR) -> tuple[Series, Series]:
    """Return -2 log of the likelihood averaged over the coefficient (the first axis), and its posterior."""
    best_scores = scores.min(axis=0)
    prior_by_row = prior.reshape(-1, *[1] * (scores.ndim - 1))
    # relative to the best coefficient, whose likelihood would underflow otherwise
    weighted = np.exp(-0.5 * (scores - best_scores)) * prior_by_row
    totals = weighted.sum(axis=0)
    return best_scores - 2.0 * np.log(totals), weighted / totals


# -- lines and decays --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trend:
    gain: float  # over one level, in twice the log likelihood
    values: Series  # (n,) of a line: about its mean; of a decay: above what it falls to
    dies_away: bool


def _find_trend(values: Series, coefficients: int = _COEFFICIENTS.size) -> _Trend:
    """Return the best of a straight line and of decays; only the first few ``coefficients`` of the noise are tried."""
    centred = values - np.median(values)
    shapes, dies_away = _unit_shapes(values.size)
    level_scores = np.empty(coefficients)
    shape_scores = np.empty((coefficients, len(shapes)))
    slopes = np.empty((coefficients, len(shapes)))
    for index in range(coefficients):
        coefficient = float(_COEFFICIENTS[index])
        fitted = _fit_shapes(centred, coefficient)
        level_scores[index], shape_scores[index], slopes[index] = fitted

    prior = _PRIOR[:coefficients] / _PRIOR[:coefficients].sum()
    mean_level_score, _ = _averaged(level_scores, prior)
    mean_shape_scores, posterior = _averaged(shape_scores, prior)
    mean_slopes = (posterior * slopes).sum(axis=0)
    gains = mean_level_score - mean_shape_scores
    # A decay with a negative slope rises to a level, which is no warm-up.
    rises_to_level = dies_away & (mean_slopes <= 0)
    gains[rises_to_level] = -np.inf
    best = int(gains.argmax())
    trend = mean_slopes[best] * shapes[best]
    return _Trend(
        gain=float(gains[best]), values=trend, dies_away=bool(dies_away[best])
    )


@dataclass(frozen=True)
class _Regressors:
    """A whitened level and the whitened unit shapes [S, n], with the products that no value changes."""

    constant: Series
    shapes: Series
    constant_weight: float
    shapes_on_constant: Series
    weights: Series  # of each shape, about its mean


@lru_cache(maxsize=16)
def _regressors(count: int, coefficient: float) -> _Regressors:
    """Return what every line and decay through ``count`` values needs under AR(1) noise of ``coefficient``."""
    constant = _whitened(np.ones(count), coefficient)
    shapes = _whitened(_unit_shapes(count)[0], coefficient)
    constant_weight = float(constant @ constant)
    shapes_on_constant = shapes @ constant
    weights = (shapes**2).sum(axis=1) - shapes_on_constant**2 / constant_weight
    return _Regressors(constant, shapes, constant_weight, shapes_on_constant, weights)


def _fit_shapes(values: Series, coefficient: float) -> tuple[float, Series, Series]:
    """Fit ``values`` by a level alone, and by a level and one of the unit shapes [S, n], under AR(1) noise.

    Return -2 log of the likelihood of the level, that of each shape, and the slope of each shape.
    """
    count = values.size
    first_weight = 1.0 - coefficient**2
    regressors = _regressors(count, coefficient)
    constant_weight = regressors.constant_weight
    response = _whitened(values, coefficient)
    response_on_constant = float(regressors.constant @ response)

    # What follows is about the mean: without what the constant explains.
    squares = float(response @ response) - response_on_constant**2 / constant_weight
    products_by_constant = regressors.shapes_on_constant * response_on_constant
    products = regressors.shapes @ response - products_by_constant / constant_weight
    slopes = products / regressors.weights

    finest_variance = FINEST**2 * first_weight
    common_score = -math.log(first_weight) + math.log(constant_weight)
    level_variance = squares / (count - 1) + finest_variance
    level_score = (count - 1) * math.log(level_variance) + common_score
    unexplained = np.maximum(squares - slopes**2 * regressors.weights, 0.0)
    variances = unexplained / (count - 2) + finest_variance
    shape_scores = (count - 1) * np.log(variances) + np.log(regressors.weights)
    return level_score, shape_scores + common_score, slopes


def _whitened(values: Series, coefficient: float) -> Series:
    """Return ``values`` (along the last axis) without what each has from the one before it."""
    first_value = math.sqrt(1.0 - coefficient**2) * values[..., :1]
    later_values = values[..., 1:] - coefficient * values[..., :-1]
    return np.concatenate([first_value, later_values], axis=-1)


@lru_cache(maxsize=64)
def _unit_shapes(count: int) -> tuple[Series, NDArray[np.bool_]]:
    """Return (shapes of unit mean square, which of them die away): a straight line first, then decays."""
    steps = np.arange(count)
    shapes = [steps - (count - 1) / 2.0]
    for decay in _DECAYS:
        if decay <= count / 2:
            shapes.append(np.exp(-steps / decay))
    for beginning in _POWER_LAW_BEGINNINGS:
        shapes.append((steps + beginning) ** -0.5)
    stacked = np.stack(shapes)
    root_mean_squares = np.sqrt((stacked**2).mean(axis=1, keepdims=True))
    is_decay = np.arange(len(shapes)) > 0
    return np.asarray(stacked / root_mean_squares), is_decay

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
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import FINEST, Series

FEWEST = 3  # values of a segment: one or two are odd values, not a level

# Coefficients of AR(1) noise over which likelihoods are averaged, with their prior weights. The first one is 0.
_COEFFICIENTS = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.95])
_PRIOR = np.array([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12.0

_MOST_CHANGES = 10
# of more values, means of a few at once are searched: the search is quadratic
_MOST_VALUES = 400
_IMPOSSIBLE = 1e300

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
_CLEAR_SHUFFLES = 3
FEWEST_TO_SHUFFLE = 20


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
        kept = self.edges.index(edge)
        edges = tuple(later - edge for later in self.edges[kept:])
        excess = None if self.excess is None else self.excess[edge:]
        return Course(edges, self.levels[kept:], self.trend[edge:], excess)


def flat_course(values: Series) -> Course:
    """Return the course that is one level."""
    return Course((0, values.size), (float(values.mean()),), np.zeros(values.size))


def find_course(values: Series, smallest: float) -> Course:
    """Return the course of ``values``, logarithms without odd ones; a trend smaller than ``smallest`` is none."""
    count = values.size
    block = _block_size(count)
    means = _block_means(values, block)
    cuts, levels_gain = _find_levels(means, smallest)
    trend = _find_trend(means)
    has_trend = (
        trend.gain - _TREND_COST > levels_gain
        and abs(trend.values[-1] - trend.values[0]) >= smallest
    )
    if not has_trend:
        edges = (0, *(block * cut for cut in cuts), count)
        return Course(edges, _means_between(values, edges), np.zeros(count))

    middles = (np.arange(means.size) + 0.5) * block - 0.5
    by_value = np.interp(np.arange(count), middles, trend.values)
    centred = by_value - by_value.mean()
    edges = (0, count)
    return Course(
        edges,
        _means_between(values - centred, edges),
        centred,
        by_value if trend.dies_away else None,
    )


def beats_random_order(values: Series) -> bool:
    """Return whether ``values``, logarithms without odd ones, show a clearer course than they do in random order."""
    if values.size < FEWEST_TO_SHUFFLE:
        return True
    own = _clearness_in_order(values)
    rng = np.random.default_rng(values.size)
    as_clear = 0
    for _ in range(_SHUFFLES):
        if _clearness_in_order(rng.permutation(values)) >= own:
            as_clear += 1
        if as_clear > _CLEAR_SHUFFLES:
            return False
    return True


def _clearness_in_order(values: Series) -> float:
    """Return the most that a course gains over one level, less its cost, if noise is independent."""
    means = _block_means(values, _block_size(values.size, _MOST_SHUFFLED))
    centred = means - np.median(means)
    most_changes = _most_changes(means.size)
    costs = _SegmentCosts.of(centred, 0.0)
    scores, _ = costs.segmentations(most_changes)
    burst_score, _ = costs.burst()
    needed = _needed_gains(means.size, most_changes)
    level_gains = scores[0] - np.array([*scores, burst_score]) - needed
    trend_gain = _find_trend(means, coefficients=1).gain - _TREND_COST
    return max(float(level_gains[1:].max()), trend_gain)


def _block_size(count: int, most_blocks: int = _MOST_VALUES) -> int:
    return -(-count // most_blocks)


def _block_means(values: Series, block: int) -> Series:
    whole = values.size // block * block
    return np.asarray(values[:whole].reshape(-1, block).mean(axis=1))


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
    needed = [change_costs(count, changes) for changes in range(most_changes + 1)]
    return np.array([*needed, change_costs(count, 2) - _BURST_BONUS])


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
        costs = _SegmentCosts.of(centred, float(coefficient))
        scores, candidates = costs.segmentations(most_changes)
        burst_score, burst = costs.burst()
        score_rows.append([*scores, burst_score])
        candidate_rows.append([*candidates, burst])

    total, posterior = _averaged(np.array(score_rows))
    margin = total[0] - total - _needed_gains(values.size, most_changes)
    margin[0] = 0.0
    best = int(margin.argmax())
    likeliest = int(posterior[:, best].argmax())
    cuts = _clear_cuts(centred, candidate_rows[likeliest][best], smallest)
    gain = float(margin[best]) if cuts else 0.0
    return cuts, gain


def _clear_cuts(values: Series, cuts: Sequence[int], smallest: float) -> list[int]:
    """Return those of ``cuts`` that are large enough, and not explained by the noise around them."""
    kept = list(cuts)
    while kept:
        edges = [0, *kept, values.size]
        clearness = [
            _clearness(values, begin, cut, end, smallest)
            for begin, cut, end in zip(edges, kept, edges[2:], strict=False)
        ]
        weakest = int(np.argmin(clearness))
        if clearness[weakest] >= 1.0:
            break
        # one at a time: its neighbours have longer levels now, and may be clear
        del kept[weakest]
    return kept


def _clearness(
    values: Series, begin: int, cut: int, end: int, smallest: float
) -> float:
    """Return how many times as large a change is as it has to be."""
    before = values[begin:cut]
    after = values[cut:end]
    nearby = np.concatenate(
        [(before - before.mean())[-_NEARBY:], (after - after.mean())[:_NEARBY]]
    )
    noise = math.sqrt(float(nearby @ nearby) / max(nearby.size - 2, 1) + FINEST**2)
    standard_error = noise * math.sqrt(1 / before.size + 1 / after.size)

    shorter = min(before.size, after.size)
    most_factor = max(min(_LONG_FACTOR, _LONG_FACTOR_UP_TO / values.size), 1.0)
    factor = min(math.sqrt(shorter / FEWEST), most_factor)

    change = abs(float(after.mean() - before.mean()))
    return min(change / smallest, change / (_STANDARD_ERRORS * factor * standard_error))


@dataclass(frozen=True)
class _SegmentCosts:
    """Sums over every segment [begin, end) of a series under AR(1) noise that begins anew at each change.

    Rows are begins from 0 to n - 1, columns are ends from 0 to n.
    """

    count: int  # n
    remainder: float  # 1 - coefficient squared
    squares: Series  # (n, n + 1) the sum of squares of the segment's whitened values
    sums: Series  # the product of the whitened values with a whitened constant
    weights: Series  # the sum of squares of the whitened constant

    @classmethod
    def of(cls, values: Series, coefficient: float) -> _SegmentCosts:
        count = values.size
        step_weight = 1.0 - coefficient
        remainder = 1.0 - coefficient**2
        whitened = values[1:] - coefficient * values[:-1]
        summed = np.concatenate([[0.0, 0.0], np.cumsum(whitened)])
        summed_squares = np.concatenate([[0.0, 0.0], np.cumsum(whitened**2)])

        # the index after each begin
        second = np.minimum(np.arange(1, count + 1), count)
        first_squares = (remainder * values * values)[:, None]
        first_sums = (remainder * values)[:, None]
        lengths = np.arange(count + 1)[None, :] - np.arange(count)[:, None]
        squares = (
            summed_squares[None, :] - summed_squares[second][:, None] + first_squares
        )
        sums = step_weight * (summed[None, :] - summed[second][:, None]) + first_sums
        weights = np.maximum(remainder + (lengths - 1) * step_weight**2, remainder)
        return cls(count, remainder, squares, sums, weights)

    @property
    def _is_long_enough(self) -> NDArray[np.bool_]:
        return (
            np.arange(self.count + 1)[None, :] - np.arange(self.count)[:, None]
            >= FEWEST
        )

    @property
    def _residuals(self) -> Series:
        """The sum of squares of each segment about its own level; infinite if it is too short."""
        return np.where(
            self._is_long_enough, self.squares - self.sums**2 / self.weights, np.inf
        )

    def segmentations(self, most_changes: int) -> tuple[list[float], list[list[int]]]:
        """Return the score of the best segmentation with 0 to ``most_changes`` changes, and where these are."""
        count = self.count
        residuals = self._residuals
        log_weights = np.log(self.weights)
        ends = np.arange(count + 1)

        # of the best segmentation of the values before each end
        best = residuals[0]
        best_log_weight = log_weights[0].copy()
        last_cuts: list[NDArray[np.intp]] = []
        scores = [
            self._score(
                float(best[count]), levels=1, log_weight=float(best_log_weight[count])
            )
        ]
        candidates: list[list[int]] = [[]]
        for changes in range(1, most_changes + 1):
            with_last = best[:count, None] + residuals
            last_cut = with_last.argmin(axis=0)
            best = with_last[last_cut, ends]
            best_log_weight = best_log_weight[last_cut] + log_weights[last_cut, ends]
            last_cuts.append(last_cut)
            candidates.append(_traced_back(last_cuts, count))
            log_weight = float(best_log_weight[count])
            scores.append(
                self._score(
                    float(best[count]), levels=changes + 1, log_weight=log_weight
                )
            )
        return scores, candidates

    def burst(self) -> tuple[float, list[int]]:
        """Return the score of the best segment that has one level before and after it, and where it is."""
        count = self.count
        begins = np.arange(count)[:, None]
        ends = np.arange(count + 1)[None, :]
        is_inside = self._is_long_enough & (begins >= FEWEST) & (ends <= count - FEWEST)
        if not is_inside.any():
            return _IMPOSSIBLE, []
        squares = self._outside(self.squares)
        sums = self._outside(self.sums)
        weights = self._outside(self.weights)
        totals = np.where(
            is_inside, self._residuals + squares - sums**2 / weights, np.inf
        )
        place = np.unravel_index(int(totals.argmin()), totals.shape)
        log_weight = math.log(weights[place]) + math.log(self.weights[place])
        score = self._score(
            float(totals[place]), levels=2, log_weight=log_weight, segments=3
        )
        return score, [int(place[0]), int(place[1])]

    def _outside(self, sums: Series) -> Series:
        """Return the sums over everything before each segment and after it."""
        before = sums[0, : self.count, None]
        after = np.append(sums[:, self.count], 0.0)[None, :]
        return np.asarray(before + after)

    def _score(
        self,
        residual: float,
        levels: int,
        log_weight: float,
        segments: int | None = None,
    ) -> float:
        """Return -2 log of the likelihood, marginal in the levels and the scale."""
        begun = levels if segments is None else segments
        variance = residual / max(self.count - levels, 1) + FINEST**2 * self.remainder
        return (
            (self.count - 1) * math.log(variance)
            - begun * math.log(self.remainder)
            + log_weight
        )


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
    best = scores.min(axis=0)
    weights = prior.reshape(-1, *[1] * (scores.ndim - 1))
    likelihood = np.exp(-0.5 * (scores - best)) * weights
    total = likelihood.sum(axis=0)
    return best - 2.0 * np.log(total), likelihood / total


# -- lines and decays --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trend:
    gain: float  # over one level, in twice the log likelihood
    values: Series  # (n,) of a line: about its mean; of a decay: above what it falls to
    dies_away: bool


def _find_trend(values: Series, coefficients: int = _COEFFICIENTS.size) -> _Trend:
    """Return the best of a straight line and of decays; only the first few ``coefficients`` of the noise are tried."""
    count = values.size
    centred = values - np.median(values)
    shapes, dies_away = _unit_shapes(count)
    level_scores = np.empty(coefficients)
    shape_scores = np.empty((coefficients, len(shapes)))
    slopes = np.empty((coefficients, len(shapes)))
    for index, coefficient in enumerate(_COEFFICIENTS[:coefficients]):
        remainder = 1.0 - float(coefficient) ** 2
        constant = _whitened(np.ones(count), float(coefficient))
        regressors = _whitened(shapes, float(coefficient))
        response = _whitened(centred, float(coefficient))

        weight = float(constant @ constant)
        response_on_constant = float(constant @ response)
        regressors_on_constant = regressors @ constant
        regressor_weight = (regressors**2).sum(
            axis=1
        ) - regressors_on_constant**2 / weight
        covariance = (
            regressors @ response
            - regressors_on_constant * response_on_constant / weight
        )
        slopes[index] = covariance / regressor_weight

        finest = FINEST**2 * remainder
        level_squares = float(response @ response) - response_on_constant**2 / weight
        shape_squares = np.maximum(
            level_squares - slopes[index] ** 2 * regressor_weight, 0.0
        )
        common = -math.log(remainder) + math.log(weight)
        level_scores[index] = (count - 1) * math.log(
            level_squares / (count - 1) + finest
        ) + common
        shape_variances = shape_squares / (count - 2) + finest
        shape_scores[index] = (
            (count - 1) * np.log(shape_variances) + common + np.log(regressor_weight)
        )

    prior = _PRIOR[:coefficients] / _PRIOR[:coefficients].sum()
    level_total, _ = _averaged(level_scores, prior)
    shape_totals, posterior = _averaged(shape_scores, prior)
    slope = (posterior * slopes).sum(axis=0)
    gains = level_total - shape_totals
    rises_to_a_level = dies_away & (slope <= 0)  # which is no warm-up
    gains[rises_to_a_level] = -np.inf
    best = int(gains.argmax())
    return _Trend(float(gains[best]), slope[best] * shapes[best], bool(dies_away[best]))


def _whitened(values: Series, coefficient: float) -> Series:
    """Return ``values`` (along the last axis) without what each has from the one before it."""
    first = math.sqrt(1.0 - coefficient**2) * values[..., :1]
    later = values[..., 1:] - coefficient * values[..., :-1]
    return np.concatenate([first, later], axis=-1)


@lru_cache(maxsize=64)
def _unit_shapes(count: int) -> tuple[Series, NDArray[np.bool_]]:
    """Return (shapes of unit mean square, which of them die away): a straight line first, then decays."""
    steps = np.arange(count)
    shapes = [steps - (count - 1) / 2.0]
    shapes += [np.exp(-steps / decay) for decay in _DECAYS if decay <= count / 2]
    shapes += [(steps + beginning) ** -0.5 for beginning in _POWER_LAW_BEGINNINGS]
    stacked = np.stack(shapes)
    units = stacked / np.sqrt((stacked**2).mean(axis=1, keepdims=True))
    return np.asarray(units), np.arange(len(shapes)) > 0

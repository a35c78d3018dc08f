"""Statistics of step times: their location, their spread, and the uncertainty of their mean.

Everything takes seconds and returns seconds; shares (cv, half widths) are plain ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.record.run_record import TimeSummary

Series = NDArray[np.float64]

FEWEST_VALUES = 3  # an interval needs three values

FINEST = 0.0003  # noise, as a share of the value, below which timers and rounding hide a finer one

# coefficients of AR(1) noise that are weighed against each other
PHI = np.arange(0.0, 0.96, 0.05)

# An interval that reaches farther than the mean itself is not reported: the values are too few, or too unlike.
WIDEST_REPORTED = 1.0

_TO_NORMAL = 1.4826  # the standard deviation of normal values over their median distance from the median

_DRAWS = 4000  # of Student's t
# of the density of Student's t: its quantiles are right to five digits
_ANGLES = 20_000
_NORMAL_97_5 = 1.96

_HAMPEL_NEIGHBOURS = 5
_HAMPEL_DEVIATIONS = 4.0  # from the median of the neighbours
_LARGEST_TICK = 0.06  # of a step: a larger difference is no clock's tick
_LOWER_QUARTERS_MEAN = 0.5146  # mean of the lower three quarters of |normal|


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, and the lag-1 autocorrelation that the interval allows for."""

    mean: float
    low: float
    high: float
    lag1: float = 0.0

    @property
    def relative_half_width(self) -> float | None:
        """Half the interval as a share of the mean, its wider side's; None if the mean is 0."""
        if self.mean <= 0.0:
            return None
        return self.high / self.mean - 1.0

    @property
    def is_informative(self) -> bool:
        """Whether the interval is narrow enough to be reported."""
        half_width = self.relative_half_width
        return half_width is None or half_width <= WIDEST_REPORTED


def require_finite(values: ArrayLike) -> Series:
    """Return ``values`` as a flat float array; ValueError if one is NaN or infinite: it must not be averaged."""
    array = np.asarray(values, dtype=np.float64).ravel()
    unusable = int(np.count_nonzero(~np.isfinite(array)))
    if unusable:
        raise ValueError(
            f"times must be finite, but {unusable} of {array.size} are NaN or infinite: drop them first"
        )
    return array


def mean_interval(values: ArrayLike) -> Interval | None:
    """Return the mean of ``values`` with its 95 % interval, in their unit; None of fewer than three.

    Student's t about the mean of an AR(1) process, averaged over its coefficient under Jeffreys' prior: neighbours
    that resemble each other carry less information than as many independent values.
    """
    array = require_finite(values)
    count = array.size
    if count < FEWEST_VALUES:
        return None
    mean = float(array.mean())
    scale = mean or 1.0
    # one entry for each coefficient
    scores, centres, standard_errors = ar1_means(array / scale - 1.0)
    likelihoods = np.exp(-0.5 * (scores - scores.min()))
    posterior = likelihoods / np.sqrt(1.0 - PHI**2)
    posterior /= posterior.sum()

    # Each draw takes one coefficient; the likelier a coefficient, the more draws take it.
    quantiles = (np.arange(_DRAWS) + 0.5) / _DRAWS
    coefficients = np.searchsorted(np.cumsum(posterior)[:-1], quantiles)
    errors = _draws_of_student(count - 1) * standard_errors[coefficients]
    distances = np.abs(errors + centres[coefficients])
    half = abs(scale) * float(np.quantile(distances, 0.95))
    lag1 = float(posterior @ PHI)
    return Interval(mean, low=mean - half, high=mean + half, lag1=lag1)


def ar1_means(values: Series) -> tuple[Series, Series, Series]:
    """Return for each of ``PHI``: -2 log of the marginal likelihood of the values; their mean; its standard error.

    The mean is the generalised one: values count for what they add to those before them. A value is whitened by
    subtracting from it the coefficient times the value before it; the first value has none before it, and its variance
    is larger than the others' by 1 / ``first_weight``.
    """
    count = values.size
    whitened_one = 1.0 - PHI
    first_weight = 1.0 - PHI**2
    whitened = values[1:] - PHI[:, None] * values[:-1]
    weight = first_weight + (count - 1) * whitened_one**2
    weighted_sum = first_weight * values[0] + whitened_one * whitened.sum(axis=1)
    squares = first_weight * values[0] ** 2 + (whitened**2).sum(axis=1)
    squares_about_mean = np.maximum(squares - weighted_sum**2 / weight, 0.0)
    variance = squares_about_mean / (count - 1) + FINEST**2 * first_weight
    score = (count - 1) * np.log(variance) - np.log(first_weight) + np.log(weight)
    return score, weighted_sum / weight, np.sqrt(variance / weight)


def poisson_factors(events: float) -> tuple[float, float]:
    """Return the 95 % interval of the rate of ``events`` that were counted, as factors of the estimated rate.

    The score interval (Garwood's exact one is a little wider): one event has a rate between 0.18 and 5.7 times as high.
    """
    half_square = _NORMAL_97_5**2 / 2.0
    reach = _NORMAL_97_5 * math.sqrt(events + half_square / 2.0)
    least_events = events + half_square - reach
    most_events = events + half_square + reach
    return least_events / events, most_events / events


def median_interval(values: ArrayLike) -> tuple[float, float] | None:
    """Return the 95 % interval of the median, whatever the distribution; None of fewer than six values.

    Between two order statistics: of n values fewer than k lie below the median with the odds of n coins (David and
    Nagaraja 2003, section 7.1).
    """
    ordered = np.sort(require_finite(values))
    count = ordered.size
    rank = 0
    chance_below = 1 / 2**count
    while chance_below <= 0.025:
        rank += 1
        chance_below += math.comb(count, rank) / 2**count
    if rank == 0:
        return None
    return float(ordered[rank - 1]), float(ordered[-rank])


@lru_cache(maxsize=64)
def student_quantile(freedom: float, confidence: float) -> float:
    """Return the two-sided quantile of Student's t, in standard errors; scipy's, which only reports may need."""
    if math.isinf(freedom):
        return NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    # t is the tangent of an angle, times the root of the freedom; the angle's density is a power of its cosine.
    width = math.pi / 2.0 / _ANGLES
    middles = (np.arange(_ANGLES) + 0.5) * width
    ends = (np.arange(_ANGLES) + 1.0) * width
    summed = np.cumsum(np.cos(middles) ** (freedom - 1.0))
    angle = np.interp(confidence, summed / summed[-1], ends)
    return math.tan(angle) * math.sqrt(freedom)


@lru_cache(maxsize=128)
def _draws_of_student(freedom: int) -> Series:
    return np.random.default_rng(0).standard_t(freedom, _DRAWS)


def noise_of(differences: Series) -> float:
    """Return the standard deviation of values whose ``differences`` these are.

    It comes from the lower three quarters of them, which neither spikes nor changes of level reach (von Neumann 1941).
    For a coarse clock it is half a tick at least; it is never less than ``FINEST``.
    """
    ordered = np.sort(np.abs(differences))
    lower = ordered[: max(1, 3 * ordered.size // 4)]
    spread = float(lower.mean()) / _LOWER_QUARTERS_MEAN / math.sqrt(2.0)
    return max(spread, FINEST, _tick_of(ordered, lower) / 2.0)


def rank_correlation(values: ArrayLike) -> float:
    """Return Kendall's rank correlation of two or more ``values`` with their order: 1 if they only rise."""
    series = np.asarray(values)
    earlier, later = np.triu_indices(len(series), 1)
    return float(np.sign(series[later] - series[earlier]).mean())


def robust_std(values: Series) -> float:
    """Return the standard deviation of normal ``values``, by their median distance from the median (Hampel 1974).

    Up to half of them may lie anywhere.
    """
    return _TO_NORMAL * float(np.median(np.abs(values - np.median(values))))


def _tick_of(ordered: Series, lower: Series) -> float:
    """Return the tick of a coarse clock; 0.0 if the clock is not coarse."""
    larger = ordered[np.searchsorted(ordered, FINEST) :]
    if not larger.size:
        return 0.0
    least_difference = float(larger[0])
    # With a coarse clock most differences are zero. So are they if a few steps differ from equal ones.
    are_mostly_equal = lower[lower.size // 2] < FINEST
    if not are_mostly_equal or least_difference > _LARGEST_TICK:
        return 0.0
    return least_difference


def without_outliers(values: Series) -> tuple[Series, NDArray[np.bool_]]:
    """Return ``values`` with outliers moved to the median of the five around them, and which these are (Hampel 1974).

    The scale is the differences of neighbours, which neither a change of level nor a spike makes larger.
    """
    if values.size < _HAMPEL_NEIGHBOURS:
        return values, np.zeros(values.size, bool)
    windows = np.lib.stride_tricks.sliding_window_view(values, _HAMPEL_NEIGHBOURS)
    inner = np.median(windows, axis=1)
    reach = _HAMPEL_NEIGHBOURS // 2
    medians = np.pad(inner, reach, mode="edge")
    most_distance = _HAMPEL_DEVIATIONS * noise_of(np.diff(values))
    is_outlier = np.abs(values - medians) > most_distance
    return np.where(is_outlier, medians, values), is_outlier


def summarise_times(
    values: Sequence[float] | Series, interval: Interval | None = None
) -> TimeSummary:
    """Return a summary of times in seconds with the ``interval`` of their mean, whose mean it takes over.

    std is the sample's (ddof=1, None below two values), percentiles interpolate linearly (Hyndman & Fan 1996, type 7).
    An interval that reaches farther than the mean itself is left out.
    """
    array = require_finite(values)
    if array.size == 0:
        return TimeSummary(n=0)
    mean = float(array.mean())
    mean_low = None
    mean_high = None
    if interval is not None:
        mean = interval.mean
        if interval.is_informative:
            mean_low = interval.low
            mean_high = interval.high
    std = None
    cv = None
    if array.size > 1:
        std = float(array.std(ddof=1))
        cv = std / mean if mean else None
    p5, median, p95 = np.percentile(array, [5, 50, 95]).tolist()
    return TimeSummary(
        n=array.size,
        mean=mean,
        mean_low=mean_low,
        mean_high=mean_high,
        std=std,
        cv=cv,
        median=median,
        p5=p5,
        p95=p95,
        min=float(array.min()),
        max=float(array.max()),
    )

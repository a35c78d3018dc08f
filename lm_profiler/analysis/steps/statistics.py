"""Statistics of step times: their location, their spread, and the uncertainty of their mean.

Times are in seconds; shares (cv, half widths) are plain ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.record.run_record import TimeSummary

Series = NDArray[np.float64]

FEWEST_VALUES = 3  # fewer values have no interval

LEAST_NOISE = 0.0003  # the smallest noise, as a share of the value: less cannot be seen behind timers and rounding

# the coefficients of AR(1) noise over which likelihoods are averaged
AR1_COEFFICIENTS = np.arange(0.0, 0.96, 0.05)

# The widest half interval that is reported, as a share of the mean. It is wider if values are few or differ too much.
WIDEST_REPORTED = 1.0

# for normal values, the ratio of the standard deviation to the median distance from the median
_STD_PER_MEDIAN_DISTANCE = 1.4826

_DRAW_COUNT = 4000  # random numbers from Student's t
# number of intervals for integrating the density of Student's t; quantiles are then correct to five digits
_ANGLE_COUNT = 20_000
_NORMAL_97_5 = 1.96  # quantile of the normal distribution

# A value is an outlier if it is this many standard deviations from the median of the five values around it.
_HAMPEL_WINDOW = 5
_HAMPEL_DEVIATIONS = 4.0
_LARGEST_TICK = 0.06  # of a step: a larger difference is not the tick of a coarse clock
_LOWER_QUARTERS_MEAN = 0.5146  # mean of the lowest 75 % of the absolute values of a standard normal distribution


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, and the lag-1 autocorrelation that the interval allows for."""

    mean: float
    low: float
    high: float
    lag1: float = 0.0

    @property
    def relative_half_width(self) -> float | None:
        """The upper half of the interval, as a share of the mean; None if the mean is 0."""
        if self.mean <= 0.0:
            return None
        return self.high / self.mean - 1.0

    @property
    def is_informative(self) -> bool:
        """Whether the interval is narrow enough to be reported."""
        half_width = self.relative_half_width
        return half_width is None or half_width <= WIDEST_REPORTED


def require_finite(values: ArrayLike) -> Series:
    """Return ``values`` as a flat float array; raise ValueError if one of them is NaN or infinite."""
    array = np.asarray(values, dtype=np.float64).ravel()
    unusable = int(np.count_nonzero(~np.isfinite(array)))
    if unusable:
        raise ValueError(
            f"times must be finite, but {unusable} of {array.size} are NaN or infinite: drop them first"
        )
    return array


def mean_interval(values: ArrayLike) -> Interval | None:
    """Return the mean of ``values`` with its 95 % interval, in their unit; None if there are fewer than three.

    The interval accounts for autocorrelation: the values are an AR(1) process of unknown coefficient. For a given
    coefficient, the mean follows Student's t. This is averaged over the coefficient, under Jeffreys' prior.
    """
    array = require_finite(values)
    count = array.size
    if count < FEWEST_VALUES:
        return None
    mean = float(array.mean())
    scale = mean or 1.0
    # From here on, all values are deviations from the arithmetic mean, as a share of it.
    fits = ar1_means(array / scale - 1.0)
    posterior = _posterior_of_coefficients(fits.scores)

    # (draws,) Evenly spaced draws from the averaged distribution: the index of each coefficient occurs in proportion to
    # its posterior probability.
    quantiles = (np.arange(_DRAW_COUNT) + 0.5) / _DRAW_COUNT
    indices = np.searchsorted(np.cumsum(posterior)[:-1], quantiles)
    errors = _draws_of_student(count - 1) * fits.standard_errors[indices]
    # The interval is centred on the arithmetic mean, which is 0 here, because that is the mean that is reported. The
    # distances from it allow for the fitted means, which differ from it.
    distances = np.abs(errors + fits.means[indices])
    half = abs(scale) * float(np.quantile(distances, 0.95))
    lag1 = float(posterior @ AR1_COEFFICIENTS)
    return Interval(mean, low=mean - half, high=mean + half, lag1=lag1)


def _posterior_of_coefficients(scores: Series) -> Series:
    """Return (coefficients,) the posterior probability of each AR(1) coefficient, under Jeffreys' prior.

    ``scores`` are -2 log likelihood.
    """
    likelihoods = np.exp(-0.5 * (scores - scores.min()))
    jeffreys_prior = 1.0 / np.sqrt(1.0 - AR1_COEFFICIENTS**2)
    weights = likelihoods * jeffreys_prior
    return np.asarray(weights / weights.sum())


class Ar1Means(NamedTuple):
    """The mean of a series, fitted for each coefficient of ``AR1_COEFFICIENTS``; arrays are (coefficients,)."""

    scores: Series  # -2 log of the marginal likelihood: the lower, the better
    means: Series
    standard_errors: Series


def ar1_means(values: Series) -> Ar1Means:
    """Fit the mean of AR(1) ``values`` for each coefficient of ``AR1_COEFFICIENTS``, by generalised least squares."""
    first_value = values[0]
    earlier_values = values[:-1]
    later_values = values[1:]
    count_later = values.size - 1

    # Whitening subtracts from each value the coefficient times the value before it, which makes the noise independent.
    # The first value has none before it: its variance is 1 / first_weight times that of the others.
    # (coefficients, n - 1)
    whitened = later_values - AR1_COEFFICIENTS[:, None] * earlier_values
    whitened_one = 1.0 - AR1_COEFFICIENTS
    first_weight = 1.0 - AR1_COEFFICIENTS**2

    # each value is weighted by the whitened 1 that stands for it
    weight = first_weight + count_later * whitened_one**2
    weighted_sum = first_weight * first_value + whitened_one * whitened.sum(axis=1)
    mean = weighted_sum / weight
    squares = first_weight * first_value**2 + (whitened**2).sum(axis=1)
    squares_about_mean = np.maximum(squares - weighted_sum**2 / weight, 0.0)
    # the variance of the whitened noise; the values themselves vary by at least ``LEAST_NOISE``
    variance = squares_about_mean / count_later + LEAST_NOISE**2 * first_weight
    score = count_later * np.log(variance) - np.log(first_weight) + np.log(weight)
    return Ar1Means(score, mean, np.sqrt(variance / weight))


def poisson_factors(events: float) -> tuple[float, float]:
    """Return the 95 % interval of a rate as two factors of its estimate, if ``events`` were counted (Poisson).

    It is the score interval, whose ends are the rates that differ from the estimate by 1.96 of their own standard
    errors. Garwood's exact one is a little wider. For one event the factors are 0.18 and 5.7.
    """
    half_square = _NORMAL_97_5**2 / 2.0
    reach = _NORMAL_97_5 * math.sqrt(events + half_square / 2.0)
    least_events = events + half_square - reach
    most_events = events + half_square + reach
    return least_events / events, most_events / events


def median_interval(values: ArrayLike) -> tuple[float, float] | None:
    """Return the 95 % interval of the median, whatever the distribution; None if there are fewer than six values.

    Its ends are two of the sorted values. Each value is below the median with probability 1/2, so that the number of
    values below it is binomial (David and Nagaraja 2003, section 7.1).
    """
    ordered = np.sort(require_finite(values))
    count = ordered.size
    # the rank of the lower end among the sorted values, from 1 on; 0 if the interval would begin below all of them
    rank = 0
    # the probability that at most ``rank`` values are below the median
    chance_below = 1 / 2**count
    while chance_below <= 0.025:
        rank += 1
        chance_below += math.comb(count, rank) / 2**count
    if rank == 0:
        return None
    return float(ordered[rank - 1]), float(ordered[-rank])


@lru_cache(maxsize=64)
def student_quantile(freedom: float, confidence: float) -> float:
    """Return the two-sided quantile of Student's t: the half width of an interval, in standard errors.

    It is computed here so that scipy is not needed.
    """
    if math.isinf(freedom):
        return NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    # With t = tan(angle) * sqrt(freedom), the density of the angle is a power of its cosine, which is integrated here.
    width = math.pi / 2.0 / _ANGLE_COUNT
    middles = (np.arange(_ANGLE_COUNT) + 0.5) * width
    ends = (np.arange(_ANGLE_COUNT) + 1.0) * width
    integral = np.cumsum(np.cos(middles) ** (freedom - 1.0))
    angle = np.interp(confidence, integral / integral[-1], ends)
    return math.tan(angle) * math.sqrt(freedom)


@lru_cache(maxsize=128)
def _draws_of_student(freedom: int) -> Series:
    """Return (_DRAW_COUNT,) the same random numbers from Student's t at every call."""
    return np.random.default_rng(0).standard_t(freedom, _DRAW_COUNT)


def noise_of(differences: Series) -> float:
    """Return the standard deviation of values, from the ``differences`` of neighbours (von Neumann 1941).

    Only the smaller 75 % of the differences are used, because spikes and changes of level cause large ones. The result
    is at least ``LEAST_NOISE``, and at least half a tick of a coarse clock.
    """
    ordered = np.sort(np.abs(differences))
    lower = ordered[: max(1, 3 * ordered.size // 4)]
    std_of_differences = float(lower.mean()) / _LOWER_QUARTERS_MEAN
    # the variance of a difference is twice that of a value
    std = std_of_differences / math.sqrt(2.0)
    half_tick = _tick_of(ordered, lower) / 2.0
    return max(std, LEAST_NOISE, half_tick)


def rank_correlation(values: ArrayLike) -> float:
    """Return Kendall's rank correlation of at least two ``values`` with their index: 1 if they only rise."""
    series = np.asarray(values)
    earlier, later = np.triu_indices(len(series), 1)  # the indices of all pairs
    return float(np.sign(series[later] - series[earlier]).mean())


def robust_std(values: Series) -> float:
    """Return the standard deviation of ``values``, by their median distance from the median (Hampel 1974).

    Fewer than half of the values may be outliers.
    """
    return _STD_PER_MEDIAN_DISTANCE * float(
        np.median(np.abs(values - np.median(values)))
    )


def _tick_of(ordered: Series, lower: Series) -> float:
    """Return the tick of a coarse clock; 0.0 if the clock is not coarse.

    Args:
        ordered: the sorted absolute differences of neighbours.
        lower: the smaller 75 % of them.
    """
    above_noise = ordered[np.searchsorted(ordered, LEAST_NOISE) :]
    if not above_noise.size:
        return 0.0
    least_difference = float(above_noise[0])
    # With a coarse clock most differences are zero. (They also are if only a few of many equal steps differ.)
    are_mostly_equal = lower[lower.size // 2] < LEAST_NOISE
    if not are_mostly_equal or least_difference > _LARGEST_TICK:
        return 0.0
    return least_difference


def without_outliers(values: Series) -> tuple[Series, NDArray[np.bool_]]:
    """Return ``values`` with outliers replaced by the median of the five values around them, and the mask of these.

    (Hampel 1974.) The standard deviation comes from differences of neighbours, which changes of level and spikes do not
    inflate.
    """
    if values.size < _HAMPEL_WINDOW:
        return values, np.zeros(values.size, bool)
    windows = np.lib.stride_tricks.sliding_window_view(values, _HAMPEL_WINDOW)
    window_medians = np.median(windows, axis=1)
    reach = _HAMPEL_WINDOW // 2
    # the first and the last values have no window of their own, and get the median of the nearest one
    medians = np.pad(window_medians, reach, mode="edge")
    most_distance = _HAMPEL_DEVIATIONS * noise_of(np.diff(values))
    is_outlier = np.abs(values - medians) > most_distance
    return np.where(is_outlier, medians, values), is_outlier


def summarise_times(
    values: Sequence[float] | Series, interval: Interval | None = None
) -> TimeSummary:
    """Return a summary of times in seconds; the mean and its interval are those of ``interval``, if there is one.

    std is that of a sample (ddof=1; None for fewer than two values), percentiles are interpolated linearly (Hyndman &
    Fan 1996, type 7). An interval wider than the mean itself is left out.
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

"""What a list of step times says: where they lie, how they spread, how sure their mean is.

Everything takes seconds and gives seconds; shares (cv, half widths) are plain ratios.
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

FINEST = 0.0003  # noise, as a share of the value, below which a finer one is not told from it: timers and rounding

PHI = np.arange(0.0, 0.96, 0.05)  # coefficients of AR(1) noise that are weighed against each other

_DRAWS = 4000
_ANGLES = 20_000  # of the density of Student's t: its quantiles are right to five digits


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, and the lag-1 autocorrelation that the interval allows for."""

    mean: float
    low: float
    high: float
    lag1: float = 0.0

    @property
    def known_to(self) -> float | None:
        """Half the interval as a share of the mean, its wider side's; None where the mean is 0."""
        return self.high / self.mean - 1.0 if self.mean > 0.0 else None


def finite(values: ArrayLike) -> Series:
    """``values`` as a flat float array; ValueError where one is NaN or infinite: it must not be averaged."""
    array = np.asarray(values, dtype=np.float64).ravel()
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(f"times must be finite, but {bad} of {array.size} are NaN or infinite: drop them first")
    return array


def mean_interval(values: ArrayLike) -> Interval | None:
    """The mean of ``values`` with its 95 % interval, in their unit; None of fewer than three.

    Student's t about the mean of an AR(1) process, averaged over its coefficient under Jeffreys' prior: neighbours
    that resemble each other say less than as many independent values.
    """
    x = finite(values)
    n = x.size
    if n < FEWEST_VALUES:
        return None
    mean = float(x.mean())
    scale = mean or 1.0
    score, centre, width = ar1_means(x / scale - 1.0)
    posterior = np.exp(-0.5 * (score - score.min())) / np.sqrt(1.0 - PHI**2)
    posterior /= posterior.sum()
    which = np.searchsorted(np.cumsum(posterior)[:-1], (np.arange(_DRAWS) + 0.5) / _DRAWS)
    half = abs(scale) * float(np.quantile(np.abs(_draws_of_student(n - 1) * width[which] + centre[which]), 0.95))
    return Interval(mean, mean - half, mean + half, float(posterior @ PHI))


def ar1_means(y: Series) -> tuple[Series, Series, Series]:
    """For each of ``PHI``: -2 log of the marginal likelihood of ``y``; the generalised mean; its standard error."""
    n, slow, stay = y.size, 1.0 - PHI, 1.0 - PHI**2
    whitened = y[1:] - PHI[:, None] * y[:-1]
    weight = stay + (n - 1) * slow**2
    on_one = stay * y[0] + slow * whitened.sum(axis=1)
    squares = stay * y[0] ** 2 + (whitened**2).sum(axis=1)
    variance = np.maximum(squares - on_one**2 / weight, 0.0) / (n - 1) + FINEST**2 * stay
    score = (n - 1) * np.log(variance) - np.log(stay) + np.log(weight)
    return score, on_one / weight, np.sqrt(variance / weight)


def median_interval(values: ArrayLike) -> tuple[float, float] | None:
    """The 95 % interval of the median, whatever the distribution; None of fewer than six values.

    Between two order statistics: of n values less than k lie below the median with the odds of n coins (David and
    Nagaraja 2003, section 7.1).
    """
    x, k, below = np.sort(finite(values)), 0, 0.0
    while (below := below + math.comb(x.size, k) / 2**x.size) <= 0.025:
        k += 1
    return (float(x[k - 1]), float(x[-k])) if k else None


@lru_cache(maxsize=64)
def student(freedom: float, confidence: float) -> float:
    """The two-sided quantile of Student's t, in standard errors; scipy's, which only reports may need."""
    if math.isinf(freedom):
        return NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    # t is the tangent of an angle, times the root of the freedom; the angle's density is a power of its cosine.
    width = math.pi / 2.0 / _ANGLES
    within = np.cumsum(np.cos((np.arange(_ANGLES) + 0.5) * width) ** (freedom - 1.0))
    angle = np.interp(confidence, within / within[-1], (np.arange(_ANGLES) + 1.0) * width)
    return math.tan(angle) * math.sqrt(freedom)


@lru_cache(maxsize=128)
def _draws_of_student(freedom: int) -> Series:
    return np.random.default_rng(0).standard_t(freedom, _DRAWS)


def summarise(values: Sequence[float] | Series, interval: Interval | None = None) -> TimeSummary:
    """Summary of times in seconds with the ``interval`` of their mean.

    std is the sample's (ddof=1, None below two values), percentiles interpolate linearly (Hyndman & Fan 1996, type 7).
    """
    x = finite(values)
    if x.size == 0:
        return TimeSummary(n=0)
    mean = float(x.mean())
    std = float(x.std(ddof=1)) if x.size > 1 else None
    p5, median, p95 = (float(q) for q in np.percentile(x, [5, 50, 95]))
    return TimeSummary(
        n=x.size,
        mean=mean,
        mean_low=None if interval is None else interval.low,
        mean_high=None if interval is None else interval.high,
        std=std,
        cv=std / mean if std is not None and mean else None,
        median=median,
        p5=p5,
        p95=p95,
        min=float(x.min()),
        max=float(x.max()),
    )

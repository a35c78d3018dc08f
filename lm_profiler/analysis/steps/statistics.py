"""What a list of step times says: location, spread, and how sure the median is.

Everything takes seconds and gives seconds; shares (cv, half widths) are plain ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.record.run import TimeSummary

FINEST_TARGET = 0.005
"""Half width (as a share of the median) below which one process proves nothing: memory layout, clocks and
neighbours move whole processes by about as much (Mytkowicz et al., ASPLOS 2009; Kalibera & Jones, ISMM
2013).
"""

_TAIL = (1.0 - 0.95) / 2.0

MINIMUM_STEPS = 10
"""Steps that a "stop when sure" rule waits for, however narrow the interval."""

_TUKEY = 1.5
FAR_OUT = 3.0
"""Interquartile ranges beyond the quartiles: Tukey's "far out"."""


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """`values` as a flat float array.

    Raises:
        ValueError: where one of them is NaN or infinite: a missing reading is no reading, and must not be
            averaged.
    """
    array = np.asarray(values, dtype=np.float64).ravel()
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(
            f"times must be finite seconds, but {bad} of {array.size} are NaN or infinite: drop them first"
        )
    return array


def summarise(values: Sequence[float] | NDArray[np.float64]) -> TimeSummary:
    """Summary of times in seconds; `TimeSummary(n=0)` for none.

    std is the sample's (ddof=1, None below two values), cv is std / mean, percentiles interpolate linearly
    (Hyndman & Fan 1996, type 7).

    Raises:
        ValueError: for NaN or infinite values.
    """
    x = finite(values)
    if x.size == 0:
        return TimeSummary(n=0)
    mean = float(x.mean())
    std = float(x.std(ddof=1)) if x.size > 1 else None
    low, high = median_interval(x) or (None, None)
    p5, median, p95 = (float(q) for q in np.percentile(x, [5, 50, 95]))
    return TimeSummary(
        n=x.size,
        mean=mean,
        std=std,
        cv=std / mean if std is not None and mean else None,
        median=median,
        ci_low=low,
        ci_high=high,
        p5=p5,
        p95=p95,
        min=float(x.min()),
        max=float(x.max()),
        outliers=int(np.count_nonzero(beyond_fences(x))),
    )


def fences(x: NDArray[np.float64], reach: float = _TUKEY) -> tuple[float, float]:
    """Tukey's fences (1977) in seconds, `reach` interquartile ranges beyond the quartiles (1.5: outside; 3: far)."""
    q1, q3 = (float(q) for q in np.percentile(x, [25, 75]))
    return q1 - reach * (q3 - q1), q3 + reach * (q3 - q1)


def beyond_fences(x: NDArray[np.float64], reach: float = _TUKEY) -> NDArray[np.bool_]:
    """Which of `x` do; of fewer than four values none."""
    low, high = fences(x, reach)
    return (x < low) | (x > high)


def clipped(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """`x` with values outside Tukey's fences moved onto them, so that a single spike cannot steer what
    follows.
    """
    return np.clip(x, *fences(x)) if x.size else x


def median_interval(values: ArrayLike) -> tuple[float, float] | None:
    """Distribution-free 95 % interval of the median, in seconds: two order statistics.

    The r-th smallest and r-th largest enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < r),
    whatever the distribution (Conover 1999, section 3.2; Hahn & Meeker 1991, section 5.2). Values are taken
    as independent: positive autocorrelation makes it too narrow. None below six values, which are too few to promise
    95 %.
    """
    x = finite(values)
    rank = median_rank(x.size)
    if rank is None:
        return None
    ordered = np.sort(x)
    return float(ordered[rank - 1]), float(ordered[-rank])


@lru_cache(maxsize=4096)
def median_rank(n: int) -> int | None:
    """Largest r for which the r-th smallest and the r-th largest of n enclose the median with 95 % confidence.

    For n = 10 it is 2, with a coverage of 97.85 %. None where not even r = 1 is enough.
    """
    k = np.arange(1, n + 1)
    log_mass = np.append(0.0, np.cumsum(np.log((n - k + 1) / k))) - n * math.log(2.0)  # of Binomial(n, 1/2)
    return int(np.searchsorted(np.cumsum(np.exp(log_mass)), _TAIL, side="right")) or None


def relative_half_width(values: ArrayLike) -> float | None:
    """Half the width of the median's interval as a share of the median; None where there is no interval."""
    x = finite(values)
    interval = median_interval(x)
    if interval is None:
        return None
    median = float(np.median(x))
    return (interval[1] - interval[0]) / 2.0 / median if median > 0 else None


def precise_enough(values: Sequence[float] | NDArray[np.float64], target: float) -> bool:
    """Whether the median is known to within ±`target` (a share, 0.005 is ±0.5 %) at 95 %: time to stop
    measuring.

    A target finer than `FINEST_TARGET` counts as `FINEST_TARGET`: one process cannot promise more. Asking
    again and again stops on lucky streaks: ask every five steps or so (benchmarks/statistics.py reports what
    it costs).
    """
    width = relative_half_width(values)
    return len(values) >= MINIMUM_STEPS and width is not None and width <= max(target, FINEST_TARGET)

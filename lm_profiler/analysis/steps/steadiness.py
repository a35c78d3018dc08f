"""From which step on was the run steady, did it stay so, and is its level known?

The cut is MSER's; two guards keep it honest on step times. Isolated slow steps (a garbage collection, one
late recompilation) are outliers and no warm-up, so they are clipped before MSER sees them. And a prefix is
cut only where it differs from the rest by an effect that is both real (rank tests) and worth a word (1 %).

That no change of level was found in a few noisy steps is no steadiness: where the median is not known to 5 %, a run is
`noisy`, whatever else is known of it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.analysis.steps.rank_tests import change_point, inflation, lag1_autocorrelation, prefix_differs
from lm_profiler.analysis.steps.statistics import FAR_OUT, clipped, fences, finite, relative_half_width
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import Steadiness

Level = Literal["steady", "slowing", "unsettled"]

KNOWN_TO = 0.05
"""A median that may be off by a larger share than this is not known, and the run is `noisy`."""

FEWEST_STEPS = 10
"""Below ten steps nothing is said about steadiness."""

SMALLEST_EFFECT = 0.01
"""Level changes under 1 % are not worth a word."""


def mser_cut(values: ArrayLike) -> int:
    """MSER-1: the smallest d <= n/2 that minimises var(x[d:]) / (n - d) (White 1997, Simulation 69:6)."""
    x = finite(values)
    n = x.size
    if n < 2:
        return 0
    x = x - np.median(x)  # sums of squares lose digits far from zero
    left = np.arange(n, 0, -1, dtype=np.float64)
    sums, squares = np.cumsum(x[::-1])[::-1], np.cumsum((x**2)[::-1])[::-1]
    score = (squares - sums**2 / left) / left**2
    return int(np.argmin(np.maximum(score[: n // 2 + 1], 0.0)))


def steady_from(values: ArrayLike) -> int:
    """Number of leading steps to leave out (0 <= cut <= n/2), by MSER-1 with the guards above; seconds in."""
    return _cut(finite(values))[0]


def known_to(values: ArrayLike) -> float | None:
    """How far the median of `values` (seconds) may be off, as a share of it; None below six values.

    Half the width of its 95 % interval, times the square root of what AR(1) autocorrelation inflates a mean's variance
    by: neighbours that resemble each other say less than as many independent steps.
    """
    x = finite(values)
    width = relative_half_width(x)
    return None if width is None else width * math.sqrt(inflation(clipped(x)))


def steadiness(values: ArrayLike, recompilations: int = 0) -> Steadiness:
    """Judge step times, in seconds, in the order in which they were taken (warm-up included).

    ``recompilations`` were counted meanwhile; they are handed on.

    Slowing and unsettled need a level change of at least 1 % that a rank test finds at the 1 % level
    after allowing for lag-1 autocorrelation: Pettitt (1979) for a change anywhere, Mann-Whitney for the cut
    itself.

    Raises:
        ValueError: for NaN or infinite values.
    """
    x = finite(values)
    cut, faster_prefix = _cut(x)
    level, reason = _judge(x, cut, faster_prefix)
    drift, lag1 = _drift(x), None
    if x.size >= FEWEST_STEPS:
        lag1 = lag1_autocorrelation(clipped(x[cut:]))
        shown = "unknown" if lag1 is None else f"{lag1:.2f}"
        reason += f"; second half {drift or 0.0:+.1%} against the first, lag-1 autocorrelation {shown}"
    known = known_to(x[cut:])
    noisy = known is None or known > KNOWN_TO
    if noisy:
        unknown = "unknown" if known is None else f"known to ±{known:.1%} only"
        if level == "steady":
            reason = f"noise hides any change of level; {reason.partition('; ')[2]}"
        reason = f"the median of {counted(x.size - cut, 'step')} is {unknown}; {reason}"
    return Steadiness(
        word="noisy" if noisy else level,
        cut=cut,
        drift=drift,
        lag1=lag1,
        bias_of_mean=_bias(x, cut),
        evidence=reason,
        recompilations=recompilations,
        also=level if noisy and level != "steady" else None,
        known_to=known,
    )


def _judge(x: NDArray[np.float64], cut: int, faster_prefix: bool) -> tuple[Level | None, str]:
    n = x.size
    if n < FEWEST_STEPS:
        return None, f"only {counted(n, 'step')}: too few to judge"
    if faster_prefix:
        change = float(np.median(x[cut:]) / np.median(x[:cut]) - 1.0)
        return "slowing", f"steps {cut + 1} to {n} are {change:.1%} slower than those before"
    point = change_point(clipped(x[cut:]), SMALLEST_EFFECT)
    if point is not None:
        at, change = cut + point.at, point.change
        how = "slower" if change > 0 else "faster"
        reason = f"steps {at + 1} to {n} are {abs(change):.1%} {how} than steps {cut + 1} to {at}"
        return ("slowing" if change > 0 else "unsettled"), reason
    if cut >= n // 2:
        return "unsettled", f"still settling after half of the {n} steps"
    return "steady", f"level after {cut} of {n} steps" if cut else f"level over all {n} steps"


def _cut(x: NDArray[np.float64]) -> tuple[int, bool]:
    """(steps to leave out, whether they were faster than what follows)."""
    if x.size < 4:
        return 0, False
    start = _far_out_prefix(x)
    half = x.size // 2
    cut = min(start + mser_cut(clipped(x[start:])), half)
    before, after = clipped(x[start:])[: cut - start], clipped(x[start:])[cut - start :]
    if not prefix_differs(before, after, SMALLEST_EFFECT):
        return start, False
    if np.median(before) > np.median(after):
        return cut, False
    # A faster prefix accuses the hardware: it must also stand out as a change point of the whole.
    point = change_point(clipped(x[start:]), SMALLEST_EFFECT)
    slower_later = point is not None and point.change > 0
    return (cut, True) if slower_later else (start, False)


def _far_out_prefix(x: NDArray[np.float64]) -> int:
    """Leading steps far above the second half's range (compilation, allocation); one normal step between is
    allowed.
    """
    half = x.size // 2
    rest = x[half:]
    limit = max(fences(rest, FAR_OUT)[1], float(np.median(rest)) * (1.0 + SMALLEST_EFFECT))
    slow = x[:half] > limit
    end = 0
    while slow[end : end + (2 if end else 1)].any():
        end += 1 if slow[end] else 2
    return min(end, half)


def _drift(x: NDArray[np.float64]) -> float | None:
    half = x.size // 2
    first = float(np.median(x[:half])) if half else 0.0
    return float(np.median(x[half:])) / first - 1.0 if first > 0 else None


def _bias(x: NDArray[np.float64], cut: int) -> float | None:
    kept = float(x[cut:].mean()) if x.size else 0.0
    return float(x.mean()) / kept - 1.0 if kept > 0 else None

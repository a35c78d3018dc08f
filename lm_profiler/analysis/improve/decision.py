"""Is B faster than A? Intervals for pairs of fresh processes that hold at every look, and when to look no further."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.compare.ratio import MARGIN, RatioInterval, change
from lm_profiler.analysis.improve.trials import Compared
from lm_profiler.analysis.steps.statistics import finite
from lm_profiler.record.improve import TriedVerdict
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread

# Pairs after which a comparison is looked at: each look more costs width. One slow process must not decide, so the
# first is at two.
LOOKS = (2, 4, 8, 12, 16, 24)

# Pairs of its own for which a comparison takes what the others showed. More would be narrower, and wrong of a change
# that makes processes differ more.
_BORROWED = 4

# standard errors by which a comparison must miss ``MARGIN`` before it is given up: one in twenty real gains of twice
# the margin are, at all looks together
_SURE = 1.64

_DRAWS = 40_000


def spread(settings: Sequence[Sequence[float]], known: ProcessSpread = ASSUMED_SPREAD) -> float:
    """Return how far processes of one setting differ: the std of the logarithms of their seconds, over all settings.

    It begins at what is ``known`` of the machine; what is assumed weighs as much as one process beyond the first.
    """
    logs = [np.log(finite(processes)) for processes in settings if len(processes)]
    weight = min(known.freedom, float(_BORROWED)) if known.learned else 1.0
    freedom = sum(processes.size - 1 for processes in logs)
    return math.sqrt((weight * known.std**2 + sum(map(_squares, logs))) / (weight + freedom))


def repeated_interval(
    ratios: Sequence[float], error: float, spread: float, looks: tuple[int, ...] = LOOKS
) -> RatioInterval | None:
    """Geometric mean of pairs' ratios at the latest look, with an interval that holds at all ``looks`` together.

    As many standard errors wide at each look, which is what Pocock (1977, Biometrika 64:191) has for tests and Jennison
    & Turnbull (1989, JRSS B 51:305) for intervals; how many is simulated. What is known of the scatter (``spread`` of
    processes) counts like a few pairs more. None before the first look.

    Raises:
        ValueError: for NaN or infinite values.
    """
    n = max((look for look in looks if look <= len(ratios)), default=0)
    if not n:
        return None
    logs = np.log(finite(ratios)[:n])
    half_width = _widths(error, looks) * _standard_error(logs, spread)
    ratio = math.exp(float(logs.mean()))
    return RatioInterval(ratio, ratio * math.exp(-half_width), ratio * math.exp(half_width), 1.0 - error)


def gain(ratios: Sequence[float], spread: float, errors: float = 0.0) -> float:
    """Return by how much B looks faster than ``MARGIN``, in logarithms, with so many standard ``errors`` taken off."""
    logs = np.log(finite(ratios))
    return math.log1p(-MARGIN) - float(logs.mean()) - errors * _standard_error(logs, spread)


def hopeless(ratios: Sequence[float], spread: float) -> bool:
    """Return whether more pairs are not worth their time: B hardly saves ``MARGIN``. It is asked at looks, after the
    first."""
    return len(ratios) in LOOKS[1:] and gain(ratios, spread, -_SURE) < 0.0


@lru_cache(maxsize=64)
def _widths(error: float, looks: tuple[int, ...]) -> float:
    """Standard errors by which the mean of equal pairs is off at any of ``looks`` in a share ``error`` of series."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_DRAWS, looks[-1]))
    before = rng.chisquare(_BORROWED, _DRAWS)
    sums, squares = np.cumsum(x, axis=1), np.cumsum(x * x, axis=1)
    most = np.zeros(_DRAWS)
    for n in looks:
        total, own = sums[:, n - 1], squares[:, n - 1] - sums[:, n - 1] ** 2 / n
        most = np.maximum(most, np.abs(total) / np.sqrt(n * (before + own) / (_BORROWED + n - 1)))
    return float(np.quantile(most, 1.0 - error))


def _standard_error(logs: NDArray[np.float64], spread: float) -> float:
    """Return the standard error of the mean of the pairs' logarithms, with ``spread`` counted as a few pairs."""
    squares = _BORROWED * 2.0 * spread**2 + _squares(logs)
    return math.sqrt(squares / (_BORROWED + logs.size - 1) / logs.size)


def _squares(logs: NDArray[np.float64]) -> float:
    """Return the sum of the squared distances of ``logs`` from their mean."""
    return float(((logs - logs.mean()) ** 2).sum())


FEWEST_PAIRS, MOST_PAIRS = LOOKS[0], LOOKS[-1]  # the fewest and the most pairs of runs in one proof

ENDED = "the budget ended it"
PASSED = "it did not look faster beside the others"
_UNLIKELY = "more pairs would hardly show it to be faster"


def judged(compared: Compared, most: int, spread: float) -> Compared:
    """Return the comparison with its interval and, once that decides or there is no more to be had, its verdict."""
    compared = failed(compared)
    if compared.verdict is not None or len(compared.a) != len(compared.b):
        return compared
    last = compared.candidate is None
    looks = (max(compared.pairs, FEWEST_PAIRS),) if last else LOOKS
    interval = repeated_interval(compared.ratios, compared.error, spread, looks)
    compared, word = replace(compared, interval=interval), change(interval)
    if word != "UNCLEAR" and not (last and compared.pairs < most):
        return replace(compared, verdict=word)
    if not last and hopeless(compared.ratios, spread):
        return replace(compared, verdict="UNDECIDED", why=_UNLIKELY)
    return replace(compared, verdict="UNDECIDED" if compared.pairs >= most else None)


def failed(compared: Compared) -> Compared:
    """Return the comparison with a verdict where the latest run of a side did not end well."""
    for side, runs in (("", compared.b), ("what it is compared with ", compared.a)):
        if runs and runs[-1].seconds is None:
            if runs[-1].cut:
                return replace(compared, verdict="UNDECIDED", why=ENDED)
            refused = runs[-1].refused
            verdict: TriedVerdict = "FAILED" if refused is None else "REFUSED"
            why = f"{side}{refused or runs[-1].failed or 'has no measured step'}"
            return replace(compared, verdict=verdict, why=why)
    return compared


def takes_place_of(new: Compared, old: Compared) -> bool:
    """Return whether ``old`` is the same comparison, or no more than a look at the same candidate."""
    looked = old.verdict is None or old.why == PASSED
    return new.candidate == old.candidate and (looked or new.a_options == old.a_options)


def name_of(compared: Compared) -> str:
    return "" if compared.candidate is None else compared.candidate.name


def may_go_on(compared: Compared) -> bool:
    return compared.verdict == "UNDECIDED" and compared.why is None and compared.pairs < MOST_PAIRS


def ratio_of(compared: Compared) -> float:
    return compared.b_s / compared.a_s if compared.a_s and compared.b_s else math.inf


def passed_over(compared: Compared, spread: float) -> Compared:
    """Return a screening's verdict on one that does not look faster beside the others; only a proof may say FASTER."""
    interval = repeated_interval(compared.ratios, compared.error, spread)
    compared, word = replace(compared, interval=interval), change(interval)
    if word == "SLOWER" or word == "SAME":
        return replace(compared, verdict=word)
    return replace(compared, verdict="UNDECIDED", why=PASSED)

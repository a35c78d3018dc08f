"""Is B faster than A? The results of a search, and intervals from pairs of processes that hold at every look.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.compare.ratio import MARGIN, RatioInterval, change
from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.analysis.steps.statistics import finite
from lm_profiler.record.improve_record import ENDED, UNLIKELY, TriedVerdict
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread


@dataclass(frozen=True)
class Ran:
    """The outcome of a run."""

    # mean seconds of a measured step, scaled to the first setting's tokens or samples, so that batches compare; None
    # if the run did not get that far
    seconds: float | None
    took_s: float  # seconds of the budget that the run took, start and end included
    failed: str | None = None  # why it failed, in a few words
    refused: str | None = None  # why it was not started: what the hardware lacks, or what would not fit
    memory_bytes: int | None = None  # its peak
    cut: bool = False  # whether the end of the budget cut it, which says nothing about the setting
    out_of_memory: bool = False  # whether it may have failed for lack of memory: it reported that, or was killed


@dataclass(frozen=True)
class Checked:
    """Whether a winner still computes the same."""

    within: bool | None  # whether all distances are within the tolerance; None where that is unknown
    took_s: float = 0.0  # seconds of the budget that it took
    # distance of the mean loss of the first steps, over the same batches and seed, as a share
    loss: float | None = None
    gradients: float | None = None  # distance of the gradients from those in float32, as a share
    why: str | None = None  # in a few words: the tolerance that was exceeded, or why that is unknown


LAST = Candidate("", {}, "")


@dataclass(frozen=True)
class Compared:
    """A comparison, ended or under way: B is A with the candidate."""

    candidate: Candidate  # what was tried; ``LAST`` for the last comparison, of the final setting with the first
    a_options: Mapping[str, str]  # options of A, besides those of the first setting
    b_options: Mapping[str, str]  # options of B
    a: tuple[Ran, ...] = ()  # runs of A, in the order of the pairs
    b: tuple[Ran, ...] = ()  # runs of B
    # interval of the ratio of seconds, B over A, which holds at all looks together; None if too little is known
    interval: RatioInterval | None = None
    error: float = 0.05  # share of tries in which an interval may be wrong, at any look
    verdict: TriedVerdict | None = None  # verdict on the step's time, or why there is none; None while it runs
    accepted: bool = False  # whether the rest is tried on top of B
    checked: Checked | None = None  # check of the numbers; None if not asked for
    why: str | None = None  # the reason in a few words, if the verdict alone does not give it

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def pairs(self) -> int:
        """The number of pairs in which both runs ended well."""
        return min(len(seconds(self.a)), len(seconds(self.b)))

    @property
    def ratios(self) -> list[float]:
        """Seconds of B over seconds of A, for each pair."""
        return [b / a for a, b in zip(seconds(self.a), seconds(self.b), strict=False)]

    @property
    def a_s(self) -> float | None:
        """Seconds of a step of A: the geometric mean of its runs."""
        return _geometric_mean(seconds(self.a)[: self.pairs])

    @property
    def b_s(self) -> float | None:
        return _geometric_mean(seconds(self.b)[: self.pairs])

    @property
    def ratio(self) -> float:
        return self.b_s / self.a_s if self.a_s and self.b_s else math.inf

    @property
    def saved_s(self) -> tuple[float, float, float] | None:
        """Seconds that B saves per step, and the least and most that the interval allows."""
        if self.interval is None or self.a_s is None:
            return None
        best, high, low = (self.a_s * (1.0 - x) for x in (self.interval.ratio, self.interval.low, self.interval.high))
        return best, low, high


def seconds(runs: Sequence[Ran]) -> list[float]:
    """Return the seconds of the runs that ended well."""
    return [run.seconds for run in runs if run.seconds is not None]


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values)) if values else None


# -- intervals ---------------------------------------------------------------------------------------------------------

# Pairs after which a comparison is checked: each further look widens the interval. One slow process must not decide,
# so the first look is after two pairs.
LOOKS = (2, 4, 8, 12, 16, 24)
FEWEST_PAIRS, MOST_PAIRS = LOOKS[0], LOOKS[-1]

# The spread of other comparisons counts like this many pairs. More would be narrower, and wrong for a change
# that increases the spread.
_BORROWED = 4

# standard errors by which a comparison must miss ``MARGIN`` to be given up: one in twenty real gains of twice
# the margin is given up, at all looks together
_SURE = 1.64

_DRAWS = 40_000


def spread(settings: Sequence[Sequence[float]], known: ProcessSpread = ASSUMED_SPREAD) -> float:
    """Return how far processes of one setting differ: the std of the logarithms of their seconds, over all settings.

    ``settings`` holds the seconds of each setting's processes. The variance is a mean, weighted by degrees of freedom,
    with the ``known`` spread of the machine; an assumed one weighs as much as one further process.
    """
    log_seconds = [np.log(finite(processes_s)) for processes_s in settings if len(processes_s)]
    freedom = sum(logs.size - 1 for logs in log_seconds)
    squares = sum(_squares(logs) for logs in log_seconds)
    known_freedom = min(known.freedom, float(_BORROWED)) if known.learned else 1.0
    known_squares = known_freedom * known.std**2
    variance = (known_squares + squares) / (known_freedom + freedom)
    return math.sqrt(variance)


def repeated_interval(
    ratios: Sequence[float], error: float, spread: float, looks: tuple[int, ...] = LOOKS
) -> RatioInterval | None:
    """Geometric mean of pairs' ratios at the latest look, with an interval that holds at all ``looks`` together.

    It is equally many standard errors wide at each look, as Pocock (1977, Biometrika 64:191) has for tests and Jennison
    & Turnbull (1989, JRSS B 51:305) for intervals, but more at the first looks (``_caution``); the number is simulated.
    The known ``spread`` of processes counts like a few more pairs. None before the first look.

    Raises:
        ValueError: for NaN or infinite values.
    """
    n = max((look for look in looks if look <= len(ratios)), default=0)
    if not n:
        return None
    logs = np.log(finite(ratios)[:n])
    half_width = _widths(error, looks) * _caution(n) * _standard_error(logs, spread)
    ratio = math.exp(float(logs.mean()))
    return RatioInterval(ratio, ratio * math.exp(-half_width), ratio * math.exp(half_width), 1.0 - error)


def gain(ratios: Sequence[float], spread: float, errors: float = 0.0) -> float:
    """Return by how much B looks faster than ``MARGIN``, in logarithms, minus this many standard ``errors``."""
    logs = np.log(finite(ratios))
    return math.log1p(-MARGIN) - float(logs.mean()) - errors * _standard_error(logs, spread)


def hopeless(ratios: Sequence[float], spread: float) -> bool:
    """Return whether to give up: at a look after the first, B very likely does not save ``MARGIN``."""
    return len(ratios) in LOOKS[1:] and gain(ratios, spread, -_SURE) < 0.0


@lru_cache(maxsize=64)
def _widths(error: float, looks: tuple[int, ...]) -> float:
    """Return the standard errors that the mean of equal pairs exceeds at some look in a share ``error`` of series."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_DRAWS, looks[-1]))
    before = rng.chisquare(_BORROWED, _DRAWS)
    sums, squares = np.cumsum(x, axis=1), np.cumsum(x * x, axis=1)
    most = np.zeros(_DRAWS)
    for n in looks:
        total, own = sums[:, n - 1], squares[:, n - 1] - sums[:, n - 1] ** 2 / n
        errors = np.abs(total) / np.sqrt(n * (before + own) / (_BORROWED + n - 1))
        most = np.maximum(most, errors / _caution(n))
    return float(np.quantile(most, 1.0 - error))


def _caution(pairs: int) -> float:
    """Return the factor that widens an interval of few pairs: they hardly show whether a change adds spread."""
    return 1.0 + 2.0 / pairs


def _standard_error(logs: NDArray[np.float64], spread: float) -> float:
    """Return the standard error of the mean of the pairs' logarithms, with ``spread`` counted as a few pairs."""
    squares = _BORROWED * 2.0 * spread**2 + _squares(logs)
    return math.sqrt(squares / (_BORROWED + logs.size - 1) / logs.size)


def _squares(logs: NDArray[np.float64]) -> float:
    return float(((logs - logs.mean()) ** 2).sum())


# -- verdicts ----------------------------------------------------------------------------------------------------------


def judged(compared: Compared, most: int, spread: float) -> Compared:
    """Return the comparison with its interval and, once that decides or no pair is left, its verdict."""
    compared = failed(compared)
    if compared.verdict is not None or len(compared.a) != len(compared.b):
        return compared
    last = compared.candidate is LAST
    looks = (max(compared.pairs, FEWEST_PAIRS),) if last else LOOKS
    interval = repeated_interval(compared.ratios, compared.error, spread, looks)
    compared, word = replace(compared, interval=interval), change(interval)
    if word != "UNCLEAR" and not (last and compared.pairs < most):
        return replace(compared, verdict=word)
    if not last and hopeless(compared.ratios, spread):
        return replace(compared, verdict="UNDECIDED", why=UNLIKELY)
    return replace(compared, verdict="UNDECIDED" if compared.pairs >= most else None)


def failed(compared: Compared) -> Compared:
    """Return the comparison with a verdict if the latest run of a side failed."""
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
    """Return whether ``old`` is the same comparison, or one of the same candidate that had decided nothing."""
    had_decided = old.verdict is not None and not may_go_on(old)
    return new.candidate == old.candidate and (not had_decided or new.a_options == old.a_options)


def may_go_on(compared: Compared) -> bool:
    return compared.verdict == "UNDECIDED" and compared.why is None and compared.pairs < MOST_PAIRS

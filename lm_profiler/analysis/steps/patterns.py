"""Patterns of steps: every p-th step takes longer, two levels in turn, a saw-tooth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lm_profiler.analysis.steps.statistics import FINEST, Series

_LONGEST = 50
_REPEATS = 3  # of the period, at least
_FEWEST = 4  # steps that differ, at least
_NEEDED = 28.0  # what the two classes of phases must gain: simulated, see benchmarks/statistics
_AS_GOOD = 0.7  # of the best split's gain: the shortest such period is the pattern's
_TICK = 0.06  # of a step: a larger difference is no clock's tick
_CLIP = 4.0  # standard deviations that one step may count for: two spikes make no pattern
_LOWER = 0.5146  # mean of the lower three quarters of |normal|


@dataclass(frozen=True)
class Phases:
    """A pattern of ``every`` values: what each phase lies above the base, as a logarithm; 0 for the base."""

    every: int
    offsets: Series

    def repeated(self, n: int) -> Series:
        """(n,) the pattern itself, from phase 0 on."""
        return self.offsets[np.arange(n) % self.every]


def noise_of(differences: Series) -> float:
    """Return the standard deviation of values whose ``differences`` these are.

    It is told by the lower three quarters of them, which neither spikes nor changes of level reach (von Neumann 1941).
    For a coarse clock it is half a tick at least; it is never less than ``FINEST``.
    """
    ordered = np.sort(np.abs(differences))
    lower = ordered[: max(1, 3 * ordered.size // 4)]
    tick = ordered[np.searchsorted(ordered, FINEST) :][:1]
    # Of a coarse clock most differences are none, as they are where a few steps differ from equal ones.
    ticking = bool(tick.size) and lower[lower.size // 2] < FINEST and tick[0] <= _TICK
    return max(float(lower.mean()) / _LOWER / math.sqrt(2.0), FINEST, float(tick[0]) / 2.0 if ticking else 0.0)


def pattern_of(residuals: Series, smallest: float) -> Phases | None:
    """Return the pattern of ``residuals``, logarithms about their level; None where there is none of at least
    ``smallest``.

    Epoch folding: for every period the phases are split into two classes, the one with most phases being the base. The
    split counts by the square of its t statistic, less what choosing it among all splits and periods gives for nothing.
    What a split leaves is split again, so that a saw-tooth has as many levels as it needs.
    """
    r = residuals.copy()
    splits = [_best_split(r, p) for p in range(2, min(r.size // _REPEATS, _LONGEST) + 1)]
    most = max((split.gain for split in splits), default=-math.inf)
    best = next((split for split in splits if split.gain >= _AS_GOOD * most), _NO_SPLIT)  # not its multiples
    every, offsets = best.every, np.zeros(max(best.every, 1))
    for _ in range(every):
        if best.gain < _NEEDED or not _is_apart(r, best):
            break
        phase = np.arange(r.size) % every
        mine = np.isin(phase, best.phases)
        by = float(np.median(r[mine]) - np.median(r[~mine]))
        if abs(by) < smallest / 2:
            break
        r[mine] -= by  # what is left is split again
        offsets[list(best.phases)] += by
        best = _best_split(r, every)
    if np.ptp(offsets) < smallest:
        return None
    base = offsets.min() if every == 2 else float(np.median(offsets))
    return Phases(every, offsets - base)


@dataclass(frozen=True)
class _Split:
    gain: float
    every: int
    phases: tuple[int, ...]


_NO_SPLIT = _Split(-math.inf, 0, ())


def _best_split(r: Series, p: int) -> _Split:
    n = r.size
    noise = noise_of(r[p:] - r[:-p])  # the pattern cancels out
    phase = np.arange(n) % p
    medians = _phase_medians(r, p)
    z = np.clip((r - np.median(medians)) / noise, -_CLIP, _CLIP)
    order = np.argsort(medians)
    sums, counts = np.bincount(phase, z, p)[order], np.bincount(phase, minlength=p)[order]
    below, steps = np.cumsum(sums)[:-1], np.cumsum(counts)[:-1]
    t = (sums.sum() - below) / (n - steps) - below / steps
    # What the best of so many splits gains by chance alone: longer periods have more of them.
    free = 2.0 * np.log([p * math.comb(p, k) for k in range(1, p)])
    gain = t**2 / (1.0 / steps + 1.0 / (n - steps)) - free
    at = int(gain.argmax())
    fewer_above = 2 * (at + 1) >= p
    phases = order[at + 1 :] if fewer_above else order[: at + 1]
    return _Split(float(gain[at]), p, tuple(sorted(phases.tolist())))


def _phase_medians(r: Series, p: int) -> Series:
    """Return the (p,) medians of the phases of ``r``, which has at least ``p`` values.

    The last row is filled with infinities, which sort behind all values: so the middle of each phase is found by its
    count. ``np.nanmedian`` returns the same, through masked arrays, in several times as long.
    """
    columns = np.sort(np.append(r, np.full(-r.size % p, np.inf)).reshape(-1, p), axis=0)
    counts = np.full(p, r.size // p)
    counts[: r.size % p] += 1
    phase = np.arange(p)
    lower, upper = columns[(counts - 1) // 2, phase], columns[counts // 2, phase]
    return np.asarray((lower + upper) / 2.0)


def _is_apart(r: Series, split: _Split) -> bool:
    """Return whether three in four of the split's steps lie beyond nine in ten of the others, on one side of them."""
    mine = np.isin(np.arange(r.size) % split.every, split.phases)
    some, rest = r[mine], r[~mine]
    beyond = max(int((some > np.quantile(rest, 0.9)).sum()), int((some < np.quantile(rest, 0.1)).sum()))
    return beyond >= max(_FEWEST, 0.75 * some.size)

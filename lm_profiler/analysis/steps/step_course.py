"""The course of a series under autocorrelated noise: levels, a line or a decay; and what repeats in it.

A series is taken to be piecewise constant, or one straight line, or a level plus an excess that dies away, with AR(1)
noise whose coefficient is unknown: likelihoods are averaged over it, so that a series that wanders is not taken for one
that jumps. Noise is estimated within the segments, never from data that still contain the change.

A pattern is that every p-th value is higher, two levels in turn, or a saw-tooth.
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

_PHI = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.95])
_PRIOR = np.array([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]) / 12.0
_MOST_CHANGES = 10
_BURST_BONUS = 1.5  # a burst has one level less than two changes have
_NEAR, _LOCAL_T = 12, 4.0  # values on each side of a change, and how far apart their levels are, in standard errors
_ALIKE, _KNOWN = 2.0, 80  # how much farther apart long levels must be, and of how few values: simulated
_LINE_COSTS = 6.5  # what a line or a decay must raise twice the log likelihood by: simulated
_NEVER = 1e300
_MOST_VALUES = 400  # of more values, means of a few at once are searched: the search is quadratic

_LONGEST_PERIOD = 50
_REPEATS = 3  # of the period, at least
_FEWEST_SLOW = 4  # steps that differ, at least
_NEEDED = 28.0  # what the two classes of phases must gain: simulated, see benchmarks/statistics
_AS_GOOD = 0.7  # of the best split's gain: the shortest such period is the pattern's
_TICK = 0.06  # of a step: a larger difference is no clock's tick
_CLIP = 4.0  # standard deviations that one step may count for: two spikes make no pattern
_LOWER = 0.5146  # mean of the lower three quarters of |normal|


@dataclass(frozen=True)
class Levels:
    """The fitted course of a series of n values."""

    edges: tuple[int, ...]  # indices where segments begin, 0 first, and n at the end
    levels: tuple[float, ...]  # the mean of each segment; without ``shape``
    shape: Series  # (n,) what a line or a decay adds to the level; zeros where there is none
    decay: float | None  # values in which a decay falls to 1/e; 0 of a line, None where ``shape`` is zero

    @property
    def fitted(self) -> Series:
        """(n,) the course itself."""
        return np.repeat(self.levels, np.diff(self.edges)) + self.shape


def course_of(y: Series, smallest: float) -> Levels:
    """Return the course of ``y``, a logarithm without odd values; a trend smaller than ``smallest`` counts as none."""
    n = y.size
    few = -(-n // _MOST_VALUES)
    means = y[: n // few * few].reshape(-1, few).mean(axis=1)
    cuts, gain = _segments(means, smallest)
    shape_gain, decay, short = _shape(means)
    shape, tau = np.zeros(n), None
    if shape_gain - _LINE_COSTS > gain and abs(short[-1] - short[0]) >= smallest:
        at = (np.arange(short.size) + 0.5) * few - 0.5
        cuts, shape, tau = [], np.interp(np.arange(n), at, short - short.mean()), decay * few
    edges = (0, *(few * cut for cut in cuts), n)
    rest = y - shape
    return Levels(edges, tuple(float(rest[a:b].mean()) for a, b in pairwise(edges)), shape, tau)


def change_costs(n: int, changes: int) -> float:
    """Return what so many changes must raise twice the log likelihood of ``n`` values by.

    Simulated (benchmarks/statistics): false alarms of at most 1 % where values are independent, 3 % at AR(1) of 0.6;
    in the form of Schwarz's criterion (Yao 1988, Statistics & Probability Letters 6:181).
    """
    return 8.5 + changes * (2.0 + math.log(n))


def _segments(y: Series, smallest: float) -> tuple[list[int], float]:
    """Return where the level changes, and by how much that is better than one level; dynamic programming over all cuts.

    The segmentation is that of Auger & Lawrence (1989, Bulletin of Mathematical Biology 51:39); the likelihood is
    marginal in levels and scale (Harville 1974) and averaged over the AR(1) coefficient. A burst, with one level
    before and after it, is a candidate of its own (Olshen et al. 2004, Biostatistics 5:557).
    """
    n = y.size
    most = min(_MOST_CHANGES, n // 10)
    y = y - np.median(y)  # sums of squares about 0 lose digits far from it
    scores, ways_of = [], []
    for phi in _PHI:
        costs = _Costs.of(y, float(phi))
        score, ways = costs.segmentations(most)
        burst_score, burst = costs.burst()
        scores.append([*score, burst_score])
        ways_of.append([*ways, burst])
    total, weight = _marginal(np.array(scores))
    needed = [change_costs(n, changes) for changes in range(most + 1)] + [change_costs(n, 2) - _BURST_BONUS]
    margin = total[0] - total - np.array(needed)
    margin[0] = 0.0
    best = int(margin.argmax())
    cuts = _clear(y, ways_of[int(weight[:, best].argmax())][best], smallest)
    return cuts, float(margin[best]) if cuts else 0.0


def _clear(y: Series, cuts: Sequence[int], smallest: float) -> list[int]:
    """Return those of ``cuts`` that are large enough, and not explained by the noise around them."""
    cuts = list(cuts)
    while cuts:
        edges = [0, *cuts, y.size]
        clear = [_clearness(y, *around, smallest) for around in zip(edges, cuts, edges[2:], strict=False)]
        weakest = int(np.argmin(clear))
        if clear[weakest] >= 1.0:
            break
        del cuts[weakest]  # one at a time: its neighbours have longer levels now, and may be clear
    return cuts


def _clearness(y: Series, begin: int, at: int, end: int, smallest: float) -> float:
    """Return how many times as large a change is as it has to be."""
    before, after = y[begin:at], y[at:end]
    near = np.concatenate([(before - before.mean())[-_NEAR:], (after - after.mean())[:_NEAR]])
    noise = math.sqrt(float(near @ near) / max(near.size - 2, 1) + FINEST**2)
    by = abs(float(after.mean() - before.mean()))
    # Means of alike neighbours scatter more than of independent ones, in long levels most; few values do not tell it.
    alike = max(min(_ALIKE, _KNOWN / y.size), 1.0)
    far = _LOCAL_T * min(math.sqrt(min(before.size, after.size) / FEWEST), alike)
    return min(by / smallest, by / (far * noise * math.sqrt(1 / before.size + 1 / after.size)))


@dataclass(frozen=True)
class _Costs:
    """Sums of squares of every segment [s, e) of a series under AR(1) noise that begins anew at each change."""

    n: int
    stay: float  # 1 - phi squared
    squares: Series  # (n, n + 1) a segment's y'y in the metric of the noise
    sums: Series  # 1'y
    weights: Series  # 1'1

    @classmethod
    def of(cls, y: Series, phi: float) -> _Costs:
        n, slow, stay = y.size, 1.0 - phi, 1.0 - phi * phi
        whitened = y[1:] - phi * y[:-1]
        sums = np.concatenate([[0.0, 0.0], np.cumsum(whitened)])
        squares = np.concatenate([[0.0, 0.0], np.cumsum(whitened**2)])
        after = np.minimum(np.arange(1, n + 1), n)
        length = np.arange(n + 1)[None, :] - np.arange(n)[:, None]
        return cls(
            n,
            stay,
            squares[None, :] - squares[after][:, None] + (stay * y * y)[:, None],
            slow * (sums[None, :] - sums[after][:, None]) + (stay * y)[:, None],
            np.maximum(stay + (length - 1) * slow * slow, stay),
        )

    @property
    def _long_enough(self) -> NDArray[np.bool_]:
        return np.arange(self.n + 1)[None, :] - np.arange(self.n)[:, None] >= FEWEST

    @property
    def _left(self) -> Series:
        return np.where(self._long_enough, self.squares - self.sums**2 / self.weights, np.inf)

    def segmentations(self, most: int) -> tuple[list[float], list[list[int]]]:
        """Return the score of the best segmentation with 0 to ``most`` changes, and where these are."""
        n, left, log_weights = self.n, self._left, np.log(self.weights)
        best, log_weight = left[0], log_weights[0].copy()
        back: list[NDArray[np.intp]] = []
        scores, ways_of = [], []
        ends = np.arange(n + 1)
        for changes in range(most + 1):
            cuts: list[int] = []
            if changes:
                through = best[:n, None] + left
                last = through.argmin(axis=0)
                best = through[last, ends]
                log_weight = log_weight[last] + log_weights[last, ends]
                back.append(last)
                at = n
                for step in reversed(back):
                    at = int(step[at])
                    cuts.insert(0, at)
            ways_of.append(cuts)
            scores.append(self._score(float(best[n]), changes + 1, float(log_weight[n])))
        return scores, ways_of

    def burst(self) -> tuple[float, list[int]]:
        """Return the score of the best segment that has one level before and after it, and where it is."""
        n = self.n
        outer = [
            sums[0, :n, None] + np.append(sums[:, n], 0.0)[None, :] for sums in (self.squares, self.sums, self.weights)
        ]
        begin, end = np.arange(n)[:, None], np.arange(n + 1)[None, :]
        inside = self._long_enough & (begin >= FEWEST) & (end <= n - FEWEST)
        if not inside.any():
            return _NEVER, []
        whole = np.where(inside, self._left + outer[0] - outer[1] ** 2 / outer[2], np.inf)
        at = np.unravel_index(int(whole.argmin()), whole.shape)
        log_weight = math.log(outer[2][at]) + math.log(self.weights[at])
        return self._score(float(whole[at]), 2, log_weight, segments=3), [int(at[0]), int(at[1])]

    def _score(self, left: float, levels: int, log_weight: float, segments: int | None = None) -> float:
        """-2 log of the likelihood, marginal in the levels and the scale."""
        scale = left / max(self.n - levels, 1) + FINEST**2 * self.stay
        return (self.n - 1) * math.log(scale) - (segments or levels) * math.log(self.stay) + log_weight


def _marginal(score: Series) -> tuple[Series, Series]:
    """-2 log of the likelihood averaged over the coefficient (the first axis), and the coefficient's posterior."""
    best = score.min(axis=0)
    like = np.exp(-0.5 * (score - best)) * _PRIOR.reshape(-1, *[1] * (score.ndim - 1))
    whole = like.sum(axis=0)
    return best - 2.0 * np.log(whole), like / whole


def _shape(y: Series) -> tuple[float, float, Series]:
    """(gain over one level, decay, (n,) the fitted shape) of the best of a straight line and of decays."""
    n, y = y.size, y - np.median(y)
    taus, shapes = _shapes(n)
    level = np.empty(_PHI.size)
    bent, slopes = np.empty((_PHI.size, taus.size)), np.empty((_PHI.size, taus.size))
    for i, phi in enumerate(_PHI):
        stay = 1.0 - phi * phi
        one, some, own = (_whitened(v, float(phi)) for v in (np.ones(n), shapes, y))
        weight, on_one = float(one @ one), float(one @ own)
        along = some @ one
        room = (some**2).sum(axis=1) - along**2 / weight
        rss = float(own @ own) - on_one**2 / weight
        slopes[i] = (some @ own - along * on_one / weight) / room
        level[i] = (n - 1) * math.log(rss / (n - 1) + FINEST**2 * stay) - math.log(stay) + math.log(weight)
        scale = np.maximum(rss - slopes[i] ** 2 * room, 0.0) / (n - 2) + FINEST**2 * stay
        bent[i] = (n - 1) * np.log(scale) - math.log(stay) + np.log(weight * room)
    total, posterior = _marginal(bent)
    gain, slope = _marginal(level)[0] - total, (posterior * slopes).sum(axis=0)
    gain[(taus > 0) & (slope <= 0)] = -np.inf  # what rises towards a level is no warm-up
    best = int(gain.argmax())
    return float(gain[best]), float(taus[best]), slope[best] * shapes[best]


def _whitened(v: Series, phi: float) -> Series:
    return np.concatenate([math.sqrt(1.0 - phi * phi) * v[..., :1], v[..., 1:] - phi * v[..., :-1]], axis=-1)


@lru_cache(maxsize=64)
def _shapes(n: int) -> tuple[Series, Series]:
    """(taus, shapes of unit mean square): a straight line has tau 0, the others die away."""
    t = np.arange(n)
    taus = [0.0, *(tau for tau in (1.5, 3.0, 6.0, 12.0, 24.0, 48.0, 96.0) if tau <= n / 4)]
    some = np.stack([t - (n - 1) / 2.0 if tau == 0.0 else np.exp(-t / tau) for tau in taus])
    return np.array(taus), np.asarray(some / np.sqrt((some**2).mean(axis=1, keepdims=True)))


@dataclass(frozen=True)
class Pattern:
    """What repeats after ``every`` values."""

    every: int
    offsets: Series  # (every,) what each phase lies above the base, as a logarithm; 0 for the base

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


def pattern_of(residuals: Series, smallest: float) -> Pattern | None:
    """Return the pattern of ``residuals``, logarithms about their level; None where none is as large as ``smallest``.

    Epoch folding: for every period the phases are split into two classes, the one with most phases being the base. The
    split counts by the square of its t statistic, less what choosing it among all splits and periods gives for nothing.
    What a split leaves is split again, so that a saw-tooth has as many levels as it needs.
    """
    r = residuals.copy()
    splits = [_best_split(r, p) for p in range(2, min(r.size // _REPEATS, _LONGEST_PERIOD) + 1)]
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
    return Pattern(every, offsets - base)


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
    medians = np.median(r[: n // p * p].reshape(-1, p), axis=0)
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


def _is_apart(r: Series, split: _Split) -> bool:
    """Return whether three in four of the split's steps lie beyond nine in ten of the others, on one side of them."""
    mine = np.isin(np.arange(r.size) % split.every, split.phases)
    some, rest = r[mine], r[~mine]
    beyond = max(int((some > np.quantile(rest, 0.9)).sum()), int((some < np.quantile(rest, 0.1)).sum()))
    return beyond >= max(_FEWEST_SLOW, 0.75 * some.size)

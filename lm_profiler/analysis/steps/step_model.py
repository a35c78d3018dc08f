"""One model of a run's step times: warm-up, then levels, a pattern, odd steps, and autocorrelated noise; and its word.

    log seconds = course (levels, or a line, or a decay) + pattern (every p-th step) + odd steps + AR(1) noise

Time is a sum, so what is told of a stretch of steps adds up to its mean: the level of the regular steps, what the
pattern adds to it, and what odd steps add. That no change of level was found in a few noisy steps is no steadiness:
where the level is not known to 5 %, a run is `noisy`, whatever else is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.analysis.steps.statistics import FEWEST_VALUES, Interval, Series, finite, mean_interval
from lm_profiler.analysis.steps.step_course import Levels, Pattern, course_of, noise_of, pattern_of
from lm_profiler.record.run_record import Steadiness, StepLevel, StepPattern

Word = Literal["steady", "slowing", "unsettled"]

KNOWN_TO = 0.05  # a level that may be off by a larger share than this is not known, and the run is `noisy`

SMALLEST_EFFECT = 0.01  # changes of level under 1 % are not worth a word

ODD = 0.10  # the share of its level by which a step is odd: one that is off by less hardly moves any figure

_FEWEST_BESIDE = 5
_ODD_OF_FEW = 0.5  # the same share where there are fewer than ten steps, whose noise is hardly known

FEWEST_STEPS = 10  # below ten steps no course and no pattern is looked for

# half an interval, as a share of the level, below which one process proves nothing: memory layout, clocks and
# neighbours move whole processes by about as much (Mytkowicz et al., ASPLOS 2009; Kalibera & Jones, ISMM 2013)
FINEST_TARGET = 0.005

_HAMPEL = 4.0  # standard deviations from the median of five neighbours
_SMALL = math.log1p(SMALLEST_EFFECT)
_NORMAL = 1.96
_WIDEST = 10.0  # half an interval in logarithms: beyond it nothing is known


class Parts(NamedTuple):
    """The parts of a mean, which they add up to."""

    level: float  # of the regular steps
    pattern: float  # what the pattern adds to it
    odd: float  # what odd steps add


@dataclass(frozen=True)
class StepModel:
    """The model of a run's step times, by index from 0."""

    seconds: Series  # (n,) the series
    cut: int  # leading steps that are warm-up
    edges: tuple[int, ...]  # where levels begin, ``cut`` first, and n at the end
    shape: Series  # (n,) what a trend adds to the logarithm of the level; zeros of levels
    settled: bool  # whether what died away at the beginning was over before half of the steps
    pattern: Pattern | None  # what repeats; None where nothing does
    odd: NDArray[np.bool_]  # (n,) which steps are odd: far from their neighbours, and 10 % or more off the level
    first: int  # the stretch that figures are told of, up to ``end``: the longest level, all steps of a trend
    end: int

    @cached_property
    def regular(self) -> NDArray[np.bool_]:
        """(n,) which steps are neither odd nor different by the pattern."""
        return np.asarray(~self.odd & (self._classes == 0))

    @property
    def rise(self) -> float:
        """The share by which a trend's last step lies above its first; 0 where there are levels."""
        return math.expm1(float(self.shape[-1] - self.shape[self.cut])) if self.shape.size else 0.0

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Seconds of each level: its regular steps' mean."""
        means = []
        for begin, end in pairwise(self.edges):
            level = self.seconds[begin:end]
            some = level[self.regular[begin:end]]
            means.append(float((some if some.size else level).mean()) if end > begin else 0.0)
        return tuple(means)

    @property
    def expected(self) -> Series:
        """(n,) seconds that each step would have taken without noise, were it not odd."""
        whole = np.concatenate([np.full(self.cut, self.levels[0]), np.repeat(self.levels, np.diff(self.edges))])
        repeated = 0.0 if self.pattern is None else self.pattern.repeated(whole.size)
        return np.asarray(whole * np.exp(self.shape + repeated))

    @cached_property
    def level(self) -> Interval | None:
        """The mean of the stretch's regular steps; None of fewer than three."""
        return self.interval_of(self.seconds, level=True)

    @property
    def slow(self) -> tuple[int, ...]:
        """The phases of the pattern that differ."""
        offsets = () if self.pattern is None else np.expm1(self.pattern.offsets)
        return tuple(at for at, offset in enumerate(offsets) if abs(offset) >= SMALLEST_EFFECT / 2)

    @property
    def extra(self) -> float:
        """What the step that differs most by the pattern takes beyond the level, a share of it; 0 without one."""
        *_, means = self._even(self.seconds)  # without odd steps, of which one would pass for its whole phase
        slow = means[1:][means[1:] > 0.0] / means[0] - 1.0 if means.size and means[0] > 0.0 else means[:0]
        return float(slow[np.abs(slow).argmax()]) if slow.size else 0.0

    def parts_of(self, x: Series) -> Parts:
        """Return what the mean of any series of the same steps consists of, over the stretch, in its own unit."""
        here, regular, odd = (self._stretch(of) for of in (x, self.regular, self.odd))
        if not regular.any():
            return Parts(float(here.mean()), 0.0, 0.0)
        level, with_pattern = float(here[regular].mean()), float(here[~odd].mean())
        return Parts(level, with_pattern - level, float(here.mean()) - with_pattern)

    def interval_of(self, x: Series, level: bool = False) -> Interval | None:
        """The mean of any series of the same steps over the stretch, with its interval; None of fewer than three.

        Noise is that of even steps about the trend and their own phase of the pattern. What odd steps add is as
        uncertain as a compound Poisson process: its variance is the sum of their squared excesses. With ``level`` it is
        the mean of the regular steps alone.
        """
        here, odd = self._stretch(x), self._stretch(self.odd)
        if here.size - odd.sum() < FEWEST_VALUES:
            return None
        (even, phase, means), shape = self._even(x), self._stretch(self.shape)[~odd]
        centre, rest = float(even.mean()), even - means[phase]
        if (bend := float((shape - shape.mean()) @ shape)) > 0.0:
            rest = rest - (shape - shape.mean()) * float(shape @ rest) / bend
        noise = mean_interval(centre + rest)
        assert noise is not None  # of three values or more
        half = noise.high - noise.mean
        if level and (regular := int((phase == 0).sum())):
            return _around(float(means[0]), half * math.sqrt(even.size / regular), noise.lag1)
        excess = float(((here[odd] - centre) ** 2).sum()) ** 0.5 / here.size
        return _around(float(here.mean()), math.hypot(half, _NORMAL * excess), noise.lag1)

    @cached_property
    def _classes(self) -> NDArray[np.intp]:
        """(n,) 0 of the pattern's base, else 1 + the phase."""
        phase = np.arange(self.odd.size) % (self.pattern.every if self.pattern else 1)
        return np.where(np.isin(phase, self.slow), phase + 1, 0)

    def _even(self, x: Series) -> tuple[Series, NDArray[np.intp], Series]:
        """Return the stretch's steps that are not odd, their classes, and each class's mean."""
        even = ~self._stretch(self.odd)
        here, phase = self._stretch(x)[even], self._stretch(self._classes)[even]
        return here, phase, np.bincount(phase, here) / np.maximum(np.bincount(phase), 1)

    def _stretch(self, x: NDArray[Any]) -> NDArray[Any]:
        return x[self.first : self.end]


def _around(mean: float, half: float, lag1: float) -> Interval:
    """Return the interval that reaches as far in logarithms on either side: a time is never negative."""
    if mean <= 0.0:
        return Interval(mean, mean - half, mean + half, lag1)
    off = math.exp(min(half / mean, _WIDEST))
    return Interval(mean, mean / off, mean * off, lag1)


def fit(step_s: ArrayLike, warms_up: bool = True) -> StepModel:
    """Fit the model to step times in seconds, in the order in which they were taken, warm-up included.

    Without ``warms_up`` what is high at the beginning is a level like others, or a decay, and nothing is cut.
    """
    x = finite(step_s)
    n = x.size
    if n < FEWEST_STEPS or not x.min() > 0.0:
        return plain(x)
    # In logarithms noise is a share of the step, the same at each level.
    y = np.log(x)
    phases = pattern_of(y - _fitted(y)[0].fitted, SMALLEST_EFFECT)
    if phases is not None:  # once more, since the course is found better without it
        phases = pattern_of(y - _fitted(y - phases.repeated(n))[0].fitted, SMALLEST_EFFECT)
    pattern = np.zeros(n) if phases is None else phases.repeated(n)
    cut = _far_out(y - pattern) if warms_up else 0
    course, away = _fitted(y[cut:] - pattern[cut:])
    settles = None
    if course.decay and warms_up:  # it dies away: from where it is below 1 %, once more
        below = np.flatnonzero(course.shape - course.shape[-1] < _SMALL)
        settles = cut + (int(below[0]) if below.size else n - cut)
        cut = min(settles, n // 2)
        course, away = _fitted(y[cut:] - pattern[cut:])
    begins = _high_levels(course, n // 2 - cut) if warms_up else 0
    cut, course = cut + begins, _without(course, begins)
    odd = np.zeros(n, bool)
    odd[cut:] = away[begins:] & (np.abs(np.expm1(y[cut:] - pattern[cut:] - course.fitted)) >= ODD)
    edges = tuple(cut + edge for edge in course.edges)
    # The longest level; of equally long ones the last, which the run goes on with.
    first, end = max(pairwise(edges), key=lambda stretch: (stretch[1] - stretch[0], stretch[0]))
    return StepModel(
        x,
        cut,
        edges,
        np.concatenate([np.zeros(cut), course.shape]),
        (settles is None or settles <= n // 2) and not (begins and 2 * cut >= n),
        phases,
        odd,
        first,
        end,
    )


def known_to(step_s: ArrayLike) -> float | None:
    """Half the 95 % interval of the level of step times, as a share of it; None where there is no interval."""
    level = fit(step_s).level
    return None if level is None else level.known_to


def plain(step_s: ArrayLike) -> StepModel:
    """The model in which all steps are of one level, none is left out and nothing repeats; odd ones are told."""
    x = finite(step_s)
    n = x.size
    odd = np.zeros(n, bool)
    if n >= FEWEST_STEPS and x.min() > 0.0:
        near, away = _hampel(np.log(x))
        odd = away & (np.abs(x / np.exp(near) - 1.0) >= ODD)
    elif n >= _FEWEST_BESIDE:
        off = np.abs(x - np.median(x))
        odd = (off > _HAMPEL * 1.4826 * float(np.median(off))) & (off >= _ODD_OF_FEW * float(np.median(x)))
    return StepModel(x, 0, (0, n), np.zeros(n), True, None, odd, 0, n)


def _fitted(y: Series) -> tuple[Levels, NDArray[np.bool_]]:
    """The course of ``y``, and which of its values are far from their neighbours."""
    clean, away = _hampel(y)
    return course_of(clean, _SMALL), away


def _hampel(y: Series) -> tuple[Series, NDArray[np.bool_]]:
    """Return ``y`` with values far from the median of the five around them moved there, and which (Hampel 1974).

    How far is told by the differences of neighbours, which neither a change of level nor a spike makes larger.
    """
    if y.size < 5:
        return y, np.zeros(y.size, bool)
    inner = np.median(np.lib.stride_tricks.sliding_window_view(y, 5), axis=1)
    middle = np.concatenate([[inner[0]] * 2, inner, [inner[-1]] * 2])
    away = np.abs(y - middle) > _HAMPEL * noise_of(np.diff(y))
    return np.where(away, middle, y), away


def _far_out(y: Series) -> int:
    """Leading steps far above the median of the first five that are left, one normal one between them."""
    cut, half = 0, y.size // 2
    while cut < half and y.size - cut >= 6:
        away = _hampel(y[cut:])[1] & (y[cut:] > np.median(y[cut:]))
        if not away[0] and not (cut and away[1]):
            break
        cut += 1 if away[0] else 2
    return min(cut, half)


def _high_levels(course: Levels, most: int) -> int:
    """Values of leading levels that lie above most of what follows; at most ``most``."""
    whole, begins = np.repeat(course.levels, np.diff(course.edges)), 0
    for edge, level in zip(course.edges[1:-1], course.levels, strict=False):
        if edge > most or level < float(np.median(whole[edge:])) + _SMALL:
            break
        begins = edge
    return begins


def _without(course: Levels, begins: int) -> Levels:
    """``course`` from ``begins`` on, where a level begins."""
    kept = course.edges.index(begins)
    edges = tuple(edge - begins for edge in course.edges[kept:])
    return Levels(edges, course.levels[kept:], course.shape[begins:], course.decay)


def steadiness(model: StepModel, recompilations: int = 0, parts_s: Mapping[str, Series] = {}) -> Steadiness:
    """Return the course of a run's measured steps; ``parts_s``, of the same steps, tell in which a pattern is."""
    level, pattern, word = model.level, model.pattern, word_of(model)
    known = None if level is None else level.known_to
    noisy = known is None or known > KNOWN_TO
    parts, kept = model.parts_of(model.seconds), float(model.seconds[model.cut :].mean())
    stretches = zip(pairwise(model.edges), model.levels, strict=True)
    return Steadiness(
        word="noisy" if noisy else word,
        also=word if noisy and word != "steady" else None,
        cut=model.cut,
        lag1=None if level is None else level.lag1,
        bias_of_mean=float(model.seconds.mean()) / kept - 1.0 if kept > 0.0 else None,
        recompilations=recompilations,
        known_to=known,
        first=model.first + 1,
        last=model.end,
        levels=[StepLevel(first=begin + 1, last=end, seconds=seconds) for (begin, end), seconds in stretches],
        rise=model.rise if np.any(model.shape) else None,
        pattern=None if pattern is None else _told(pattern, model, parts_s),
        level_s=parts.level,
        level_low_s=None if level is None else level.low,
        level_high_s=None if level is None else level.high,
        pattern_s=parts.pattern,
        odd_s=parts.odd,
    )


def _told(pattern: Pattern, model: StepModel, parts_s: Mapping[str, Series]) -> StepPattern:
    costs = {part: abs(model.parts_of(x).pattern) for part, x in parts_s.items()}
    part = max(costs, key=costs.__getitem__, default=None)
    return StepPattern(every=pattern.every, slow=[at + 1 for at in model.slow], extra=model.extra, part=part)


def word_of(model: StepModel) -> Word | None:
    """``slowing`` where a trend rises, or levels only rise; ``unsettled`` where they change otherwise, or where what
    dies away at the beginning takes more than half of the steps; ``steady`` else. None of fewer than ten steps."""
    if model.seconds.size < FEWEST_STEPS:
        return None
    if abs(model.rise) >= SMALLEST_EFFECT:
        return "slowing" if model.rise > 0.0 else "unsettled"
    levels = model.levels
    if min(levels) <= 0.0 or max(levels) / min(levels) - 1.0 < SMALLEST_EFFECT:
        return "steady" if model.settled else "unsettled"
    rises = levels[-1] / levels[0] - 1.0 >= SMALLEST_EFFECT
    falls = any(later / earlier < 1.0 - SMALLEST_EFFECT for earlier, later in pairwise(levels))
    return "slowing" if rises and not falls else "unsettled"

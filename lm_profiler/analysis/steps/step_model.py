"""The model of a run's step times, and the word that describes it, such as `steady`.

    log seconds = course (levels, a line, or a decay) + pattern (every p-th step) + kinds + odd steps + AR(1) noise

Warm-up at the beginning is cut off. Figures describe a stretch of the other steps. Its mean is the sum of the level of
the regular steps, what the pattern adds, and what odd steps add. A run is not `steady` just because no change of level
was found in a few noisy steps: if the level is not known to within 5 %, the run is `noisy`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_profiler.analysis.steps.part_changes import is_uniform, part_of_change
from lm_profiler.analysis.steps.statistics import (
    FEWEST_VALUES,
    Interval,
    Series,
    mean_interval,
    poisson_factors,
    require_finite,
    robust_std,
    without_outliers,
)
from lm_profiler.analysis.steps.step_course import (
    Course,
    beats_random_order,
    find_course,
    flat_course,
)
from lm_profiler.analysis.steps.step_kinds import RarerKind, find_kinds, offsets_of
from lm_profiler.analysis.steps.step_pattern import Pattern, find_pattern
from lm_profiler.record.run_record import (
    ALL_PARTS,
    Steadiness,
    StepKind,
    StepLevel,
    StepPattern,
)

Word = Literal["steady", "slowing", "unsettled"]

# A level is known if half its interval is at most this share of it; otherwise the run is `noisy`.
WIDEST_KNOWN_HALF = 0.05

SMALLEST_EFFECT = 0.01  # changes of level below 1 % are ignored

# a step is odd if it differs by at least this share: smaller differences hardly change any figure
LEAST_ODD_DIFFERENCE = 0.10

FEWEST_STEPS = 10  # with fewer steps, no course and no pattern is searched for

# A narrower half interval, as a share of the level, has no meaning for a single process: memory layout, clocks and
# other programs change the mean of a whole process by about as much (Mytkowicz et al., ASPLOS 2009; Kalibera & Jones,
# ISMM 2013).
FINEST_TARGET = 0.005

# Among 5 to 9 steps, whose noise is hardly known, a step is odd if it differs from their median by this share of the
# median, and by this many standard deviations of the others.
_FEWEST_FOR_A_MEDIAN = 5
_LEAST_ODD_DIFFERENCE_OF_FEW = 0.5
_LEAST_DEVIATIONS_OF_FEW = 4.0

# By simulation: if measuring stops with at least so many, the interval is correct in 93 % of the cases, for AR(1) noise
# of 0, 0.6 and 0.9.
_FEWEST_INDEPENDENT_STEPS = 20.0

_SMALLEST_LOG_EFFECT = math.log1p(SMALLEST_EFFECT)
_WIDEST_LOG_HALF = 10.0  # the widest half interval, in logarithms
# A slow step at the beginning is no warm-up if this many later steps are as slow.
_FEWEST_LATER_SLOW_STEPS = 2
_FEWEST_REMAINING_STEPS = 6  # with fewer steps, outliers among them are not recognised


class Parts(NamedTuple):
    """The parts of a mean; their sum is the mean."""

    level: float  # the mean of the regular steps
    pattern: float  # the time that the pattern adds
    odd: float  # the time that odd steps add


@dataclass(frozen=True)
class StepModel:
    """The model of the times of n steps; indices of steps start at 0.

    Figures describe a stretch of the steps, [begin, end): the longest level, or all steps of a trend. An inlier is a
    step that is not odd. The classes of steps are the base of the pattern (0) and each of its slow phases (1 + phase);
    regular steps are inliers of the base. Without a pattern, all steps are of class 0.
    """

    seconds: Series  # (n,) the times of the steps
    cut: int  # the number of warm-up steps at the beginning
    # the indices at which levels begin (``cut`` first), and n at the end
    edges: tuple[int, ...]
    # (n,) what a trend adds to the logarithm of the level; zeros without a trend
    trend: Series
    is_settled: bool  # whether the warm-up was over within the first half of the steps
    pattern: Pattern | None
    # (n,) which steps are odd: they differ by 10 % or more from their neighbours, or are of a rarer kind
    odd: NDArray[np.bool_]
    begin: int  # first step of the stretch
    end: int  # first step after it
    # the rarer kinds of steps, in random order; all their steps are odd
    kinds: tuple[RarerKind, ...] = field(default=())

    @cached_property
    def regular(self) -> NDArray[np.bool_]:
        """(n,) which steps are neither odd nor in a slow phase of the pattern."""
        return np.asarray(~self.odd & (self._classes == 0))

    @property
    def rise(self) -> float:
        """The share by which the last step of a trend is longer than the first; 0 without a trend."""
        if not self.trend.size:
            return 0.0
        return math.expm1(float(self.trend[-1] - self.trend[self.cut]))

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """The seconds of each level: the mean of its regular steps, or of all its steps if none is regular."""
        means = []
        for begin, end in pairwise(self.edges):
            steps_s = self.seconds[begin:end]
            regular_s = steps_s[self.regular[begin:end]]
            if regular_s.size:
                means.append(float(regular_s.mean()))
            elif steps_s.size:
                means.append(float(steps_s.mean()))
            else:
                means.append(0.0)
        return tuple(means)

    @property
    def expected(self) -> Series:
        """(n,) the seconds that each step would have taken without noise, and if it were not odd."""
        warm_up_s = np.full(self.cut, self.levels[0])
        later_s = np.repeat(self.levels, np.diff(self.edges))
        level_by_step_s = np.concatenate([warm_up_s, later_s])
        # (n,) what the trend and the pattern add to the logarithm of the level
        logs = self.trend
        if self.pattern is not None:
            logs = logs + self.pattern.repeated(level_by_step_s.size)
        return np.asarray(level_by_step_s * np.exp(logs))

    def expected_later(self, indices: NDArray[np.int64]) -> Series:
        """Return the seconds that later steps, at ``indices``, would take if the last level and the pattern continue.

        A trend is assumed to stay at its last value.
        """
        last_trend = float(self.trend[-1]) if self.trend.size else 0.0
        # (len(indices),) what the trend and the pattern add to the logarithm of the level
        logs = np.full(indices.size, last_trend)
        if self.pattern is not None:
            steps = int(indices.max()) + 1
            pattern_by_step = self.pattern.repeated(steps)
            logs += pattern_by_step[indices]
        return np.asarray(self.levels[-1] * np.exp(logs))

    def usual_value(self, step: int, values: Series) -> float:
        """Return the usual value of a series of the same steps, with which its value at the index ``step`` is compared.

        It is the mean over the inliers of the level and the class of ``step``. If there are none, it is the mean over
        all regular steps, or over all steps.
        """
        is_in_level = np.zeros(self.seconds.size, bool)  # none for a warm-up step
        for begin, end in pairwise(self.edges):
            if begin <= step < end:
                is_in_level[begin:end] = True
        is_in_class = self._classes == self._classes[step]
        is_comparable = is_in_level & is_in_class & ~self.odd
        if is_comparable.any():
            return float(values[is_comparable].mean())
        if self.regular.any():
            return float(values[self.regular].mean())
        return float(values.mean())

    @cached_property
    def level(self) -> Interval | None:
        """The mean of the regular steps of the stretch, with its interval; None with fewer than three inliers."""
        return self.level_interval(self.seconds)

    @property
    def slow_phases(self) -> tuple[int, ...]:
        """The phases of the pattern that differ from its base."""
        if self.pattern is None:
            return ()
        differences = np.abs(np.expm1(self.pattern.offsets))
        phases = np.flatnonzero(differences >= SMALLEST_EFFECT / 2)
        return tuple(phases.tolist())

    @property
    def largest_excess(self) -> float:
        """The largest excess of a phase of the pattern over the level, as a share of the level; 0 without a pattern."""
        # These means are without odd steps: a single one would distort the mean of its phase.
        means = self._class_means(self.seconds)
        base = means.pop(0, 0.0)
        if base <= 0.0 or not means:
            return 0.0
        excesses = [mean / base - 1.0 for mean in means.values()]
        return max(excesses, key=abs)

    def parts_of(self, values: Series) -> Parts:
        """Return the parts of the mean over the stretch of a series of the same steps, in the unit of ``values``."""
        mean = self.mean_of(values)
        is_regular = self._in_stretch(self.regular)
        if not is_regular.any():
            return Parts(level=mean, pattern=0.0, odd=0.0)
        level = float(self._in_stretch(values)[is_regular].mean())
        inlier_mean = self._inlier_mean(values)
        return Parts(level, pattern=inlier_mean - level, odd=mean - inlier_mean)

    def mean_of(self, values: Series) -> float:
        """Return the mean over the stretch of a series of the same steps.

        The stretch may not consist of whole periods of the pattern, so each phase is weighted as in a whole period.
        """
        return float(self.weights @ self._in_stretch(values))

    @cached_property
    def weights(self) -> Series:
        """The weight of each step of the stretch in its mean; the sum is 1.

        Each class has the weight that it has in a whole period, whatever the number of its steps in the stretch.
        """
        classes = self._in_stretch(self._classes)
        weights = np.zeros(classes.size)
        for label, share in self._class_shares.items():
            is_member = classes == label
            weights[is_member] = share / is_member.sum()
        return weights

    def interval_of(self, values: Series) -> Interval | None:
        """Return the mean over the stretch of a series of the same steps, with its interval.

        None if there are fewer than three inliers. The interval combines the uncertainty of the inliers' mean with
        that of the rate of odd steps, which are counted events (Zou & Donner 2008, Statistics in Medicine 27:1693).
        """
        inliers = self._weighted_inlier_interval(values)
        if inliers is None:
            return None
        odd_steps = self._margins_of_odd_steps(values)
        mean = self.mean_of(values)
        low = mean - math.hypot(inliers.mean - inliers.low, odd_steps.below)
        high = mean + math.hypot(inliers.high - inliers.mean, odd_steps.above)
        return Interval(mean, low, high, inliers.lag1)

    def level_interval(self, values: Series) -> Interval | None:
        """Return the mean of the regular steps of the stretch, with its interval.

        If no step is regular, it is the mean of all inliers; None if there are fewer than three inliers. ``values`` is
        a series of the same steps.

        The half width is h * sqrt(inliers / regular steps), where h is that of the mean of all inliers: those have the
        same noise per step, and the variance of a mean is inversely proportional to the number of values.
        """
        inliers = self._unweighted_inlier_interval(values)
        if inliers is None:
            return None
        is_regular = self._in_stretch(self.regular)
        if not is_regular.any():
            return inliers
        variance_ratio = self._inlier_count / int(is_regular.sum())
        half = (inliers.high - inliers.mean) * math.sqrt(variance_ratio)
        mean = float(self._in_stretch(values)[is_regular].mean())
        return _interval_around(mean, half, inliers.lag1)

    @cached_property
    def _classes(self) -> NDArray[np.intp]:
        """(n,) the class of each step: 0 for the base of the pattern, and 1 + phase for each of its slow phases."""
        phases = np.arange(self.odd.size) % self._period
        return np.where(np.isin(phases, self.slow_phases), phases + 1, 0)

    @property
    def _period(self) -> int:
        return 1 if self.pattern is None else self.pattern.period

    @cached_property
    def _class_shares(self) -> dict[int, float]:
        """The share of each class in a whole period, for the classes that occur in the stretch."""
        phase_counts: dict[int, int] = {}
        for label in np.unique(self._in_stretch(self._classes)).tolist():
            phase_counts[label] = 1  # a slow phase is a class of its own
        if 0 in phase_counts:
            # all other phases are of class 0
            phase_counts[0] = self._period - len(self.slow_phases)
        total = sum(phase_counts.values())
        return {label: count / total for label, count in phase_counts.items()}

    @property
    def _is_inlier(self) -> NDArray[np.bool_]:
        """Which steps of the stretch are not odd (of any class)."""
        return np.asarray(~self._in_stretch(self.odd))

    @property
    def _inlier_count(self) -> int:
        return int(self._is_inlier.sum())

    def _class_means(self, values: Series) -> dict[int, float]:
        """Return the mean of the inliers of each class in the stretch; if all steps of a class are odd, of these."""
        stretch = self._in_stretch(values)
        classes = self._in_stretch(self._classes)
        is_inlier = self._is_inlier
        means = {}
        for label in self._class_shares:
            is_counted = classes == label
            is_inlier_of_class = is_counted & is_inlier
            if is_inlier_of_class.any():
                is_counted = is_inlier_of_class
            means[label] = float(stretch[is_counted].mean())
        return means

    def _inlier_mean(self, values: Series) -> float:
        """Return the mean over the stretch without odd steps; each class has the weight that it has in a period."""
        means = self._class_means(values)
        return sum(share * means[label] for label, share in self._class_shares.items())

    def _unweighted_inlier_interval(self, values: Series) -> Interval | None:
        """Return the unweighted mean of the inliers; its interval is from the noise about the pattern and the trend.

        None if there are fewer than three inliers.
        """
        is_inlier = self._is_inlier
        if is_inlier.sum() < FEWEST_VALUES:
            return None
        inliers = self._in_stretch(values)[is_inlier]
        classes = self._in_stretch(self._classes)[is_inlier]
        class_means = self._class_means(values)
        usual_values = np.array([class_means[label] for label in classes.tolist()])
        residuals = inliers - usual_values
        trend = self._in_stretch(self.trend)[is_inlier]
        trend = trend - trend.mean()
        trend_squares = float(trend @ trend)
        if trend_squares > 0.0:
            # without what a regression on the trend explains
            residuals = residuals - trend * float(trend @ residuals) / trend_squares
        # a series with the mean of the inliers, and only the noise around it
        return mean_interval(float(inliers.mean()) + residuals)

    def _weighted_inlier_interval(self, values: Series) -> Interval | None:
        """Return the ``_inlier_mean``, in which classes are weighted, with its interval.

        None if there are fewer than three inliers.
        """
        unweighted = self._unweighted_inlier_interval(values)
        if unweighted is None:
            return None
        # The interval of the unweighted mean is widened by the ratio of the variances of the weighted mean of the
        # classes and of the unweighted mean. Both are in units of a single step's variance.
        inlier_classes = self._in_stretch(self._classes)[self._is_inlier]
        weighted_variance = 0.0
        for label, share in self._class_shares.items():
            steps_of_class = int((inlier_classes == label).sum())
            weighted_variance += share**2 / max(steps_of_class, 1)
        # the variance of the unweighted mean is 1 / size
        variance_ratio = weighted_variance * inlier_classes.size
        half = (unweighted.high - unweighted.mean) * math.sqrt(variance_ratio)
        return _interval_around(self._inlier_mean(values), half, unweighted.lag1)

    def _margins_of_odd_steps(self, values: Series) -> _Margins:
        """Return how far the mean may be from its value in the long run, because only a few odd steps were observed."""
        is_odd = self._in_stretch(self.odd)
        if not is_odd.any():
            return _Margins(below=0.0, above=0.0)
        class_means = self._class_means(values)
        odd_classes = self._in_stretch(self._classes)[is_odd]
        usual_values = np.array([class_means[label] for label in odd_classes.tolist()])
        # what each odd step adds to the mean; negative for a step that is faster than usual
        odd_values = self._in_stretch(values)[is_odd]
        costs = self.weights[is_odd] * (odd_values - usual_values)
        cost_of_slow = _margins_of_costs(costs[costs > 0.0])
        gain_of_fast = _margins_of_costs(-costs[costs < 0.0])
        # The mean is lower with fewer slow odd steps, or with more fast ones. Both numbers are independent, so that
        # their margins add up as squares.
        return _Margins(
            below=math.hypot(cost_of_slow.below, gain_of_fast.above),
            above=math.hypot(cost_of_slow.above, gain_of_fast.below),
        )

    def _in_stretch(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[self.begin : self.end]


class _Margins(NamedTuple):
    """How far an observed sum or mean may be from its value in the long run; both are positive."""

    below: float
    above: float


def _margins_of_costs(costs: Series) -> _Margins:
    """Return how much less, and how much more, events may cost in the long run than the observed ``costs``."""
    if not costs.size:
        return _Margins(below=0.0, above=0.0)
    total = float(costs.sum())
    # the effective number of events: so many equally costly ones would have a total as uncertain as this one
    events = total**2 / float(costs @ costs)
    low_factor, high_factor = poisson_factors(events)
    return _Margins(below=total * (1.0 - low_factor), above=total * (high_factor - 1.0))


def _interval_around(mean: float, half: float, lag1: float) -> Interval:
    """Return an interval around ``mean`` that is symmetric in logarithms, because a time is never negative.

    ``half`` is its approximate half width, in the unit of the mean.
    """
    if mean <= 0.0:
        return Interval(mean, low=mean - half, high=mean + half, lag1=lag1)
    factor = math.exp(min(half / mean, _WIDEST_LOG_HALF))
    return Interval(mean, low=mean / factor, high=mean * factor, lag1=lag1)


def fit(step_s: ArrayLike, warms_up: bool = True) -> StepModel:
    """Fit the model to step times in seconds, in order, including warm-up.

    If ``warms_up`` is False, slow steps at the beginning are not cut off: they are a level, or a decay.
    """
    seconds = require_finite(step_s)
    count = seconds.size
    if count < FEWEST_STEPS or not seconds.min() > 0.0:
        return one_level_model(seconds)

    # Logarithms, because noise is the same share of the step time at each level.
    logs = np.log(seconds)
    pattern = _pattern_beside_course(logs)
    if pattern is not None:
        logs = logs - pattern.repeated(count)
    kinds = find_kinds(logs)
    logs = logs - offsets_of(kinds, count)

    if warms_up:
        warm_up = _cut_warm_up(logs)
    else:
        course, is_outlier = _course_of(logs)
        warm_up = _WarmUp(0, is_settled=True, course=course, is_outlier=is_outlier)
    cut = warm_up.steps
    course = warm_up.course

    # by which share each step differs from its level
    distances = np.abs(np.expm1(logs[cut:] - course.fitted))
    odd = np.zeros(count, bool)
    odd[cut:] = warm_up.is_outlier & (distances >= LEAST_ODD_DIFFERENCE)
    for kind in kinds:
        odd |= kind.members
    edges = tuple(cut + edge for edge in course.edges)
    begin, end = _longest_stretch(edges)
    return StepModel(
        seconds=seconds,
        cut=cut,
        edges=edges,
        trend=np.concatenate([np.zeros(cut), course.trend]),
        is_settled=warm_up.is_settled,
        pattern=pattern,
        odd=odd,
        begin=begin,
        end=end,
        kinds=tuple(kinds),
    )


class _WarmUp(NamedTuple):
    """The warm-up of a run, and the course of the steps after it."""

    steps: int  # the number of steps of the warm-up
    is_settled: bool  # whether the warm-up was over within the first half of the run
    course: Course
    is_outlier: NDArray[np.bool_]  # which of the steps after it are outliers


def _cut_warm_up(logs: Series) -> _WarmUp:
    """Find the warm-up, which is at most the first half of the steps.

    It consists of single slow steps, then of a decay, then of levels that are higher than what follows.
    """
    count = logs.size
    # single slow steps
    cut = _leading_outliers(logs)
    is_settled = True
    course, is_outlier = _course_of(logs[cut:])
    # a decay, until the excess is small
    if course.excess is not None:
        is_low = course.excess < _SMALLEST_LOG_EFFECT
        settling_steps = int(is_low.argmax()) if is_low.any() else count - cut
        is_settled = cut + settling_steps <= count // 2
        cut = min(cut + settling_steps, count // 2)
        course, is_outlier = _course_of(logs[cut:])
    # levels that are higher than what follows
    high_steps = _leading_high_levels(course, most_values=count // 2 - cut)
    if high_steps:
        cut += high_steps
        course = course.starting_at(high_steps)
        is_outlier = is_outlier[high_steps:]
        is_settled = is_settled and 2 * cut < count
    return _WarmUp(cut, is_settled, course, is_outlier)


def _longest_stretch(edges: Sequence[int]) -> tuple[int, int]:
    """Return the start and the end of the longest level; of equally long ones the last, because the run stays there."""
    longest = (edges[0], edges[1])
    for begin, end in pairwise(edges):
        if end - begin >= longest[1] - longest[0]:
            longest = (begin, end)
    return longest


def level_half_width(step_s: ArrayLike) -> float | None:
    """Return half the 95 % interval of the level of step times, as a share of the level; None without an interval."""
    level = fit(step_s).level
    if level is None:
        return None
    return level.relative_half_width


def is_level_known(step_s: ArrayLike, target: float) -> bool:
    """Return whether measuring may stop, because half the interval of the level is at most the share ``target`` of it.

    A few autocorrelated steps do not show how strong the autocorrelation is, so that their interval may be too narrow.
    It is widened if they are worth fewer than ``_FEWEST_INDEPENDENT_STEPS`` independent steps.
    """
    model = fit(step_s)
    level = model.level
    if level is None:
        return False
    half_width = level.relative_half_width
    if half_width is None or half_width > target:
        return False
    stretch = slice(model.begin, model.end)
    regular_s = model.seconds[stretch][model.regular[stretch]]
    are_equal = float(np.ptp(regular_s)) <= target / 2.0 * level.mean
    if are_equal:
        return True
    # the effective sample size of AR(1) values
    independent_steps = regular_s.size * (1.0 - level.lag1) / (1.0 + level.lag1)
    widening = max(1.0, _FEWEST_INDEPENDENT_STEPS / independent_steps)
    return half_width * widening <= target


def one_level_model(step_s: ArrayLike) -> StepModel:
    """Return a model in which all steps are one level, without warm-up and pattern; odd steps are marked."""
    seconds = require_finite(step_s)
    count = seconds.size
    odd = np.zeros(count, bool)
    if count >= FEWEST_STEPS and seconds.min() > 0.0:
        usual_logs, is_outlier = without_outliers(np.log(seconds))
        distances = np.abs(seconds / np.exp(usual_logs) - 1.0)
        odd = is_outlier & (distances >= LEAST_ODD_DIFFERENCE)
    elif count >= _FEWEST_FOR_A_MEDIAN:
        median = float(np.median(seconds))
        distances_s = np.abs(seconds - median)
        is_outlier = distances_s > _LEAST_DEVIATIONS_OF_FEW * robust_std(seconds)
        odd = is_outlier & (distances_s >= _LEAST_ODD_DIFFERENCE_OF_FEW * median)
    return StepModel(
        seconds=seconds,
        cut=0,
        edges=(0, count),
        trend=np.zeros(count),
        is_settled=True,
        pattern=None,
        odd=odd,
        begin=0,
        end=count,
    )


def _pattern_beside_course(logs: Series) -> Pattern | None:
    """Return the pattern of ``logs``, which may also have a course.

    Each is found better after the other has been subtracted, so they are searched for in turn, twice.
    """
    course, _ = _course_of(logs, may_be_chance=True)
    pattern = find_pattern(logs - course.fitted, SMALLEST_EFFECT)
    if pattern is None:
        return None
    without_pattern = logs - pattern.repeated(logs.size)
    course, _ = _course_of(without_pattern, may_be_chance=True)
    return find_pattern(logs - course.fitted, SMALLEST_EFFECT)


def _course_of(
    logs: Series, may_be_chance: bool = False
) -> tuple[Course, NDArray[np.bool_]]:
    """Return the course of ``logs``, and which of them are outliers.

    Unless it ``may_be_chance``, a course that is no clearer than in random order is replaced by one level.
    """
    clean, is_outlier = without_outliers(logs)
    course = find_course(clean, _SMALLEST_LOG_EFFECT)
    if course.is_flat or may_be_chance:
        return course, is_outlier
    if not beats_random_order(clean):
        course = flat_course(clean)
    return course, is_outlier


def _leading_outliers(logs: Series) -> int:
    """Return the number of steps up to the last slow outlier at the beginning; 0 if the first step is none.

    There may be one normal step between two slow outliers. If later steps are as slow, an outlier is no warm-up.
    """
    cut = 0  # the steps that are warm-up so far
    half = logs.size // 2  # a warm-up is at most the first half
    while cut < half and logs.size - cut >= _FEWEST_REMAINING_STEPS:
        remaining_logs = logs[cut:]
        _, is_outlier = without_outliers(remaining_logs)
        is_slow = is_outlier & (remaining_logs > np.median(remaining_logs))
        # the index, among the remaining steps, of the next slow one
        if is_slow[0]:
            next_slow = 0
        elif cut > 0 and is_slow[1]:
            next_slow = 1
        else:
            break
        later_logs = remaining_logs[next_slow + 1 :]
        is_as_slow = later_logs >= remaining_logs[next_slow] - _SMALLEST_LOG_EFFECT
        are_later_slow = is_as_slow.sum() >= _FEWEST_LATER_SLOW_STEPS
        # if the very next step is as slow, both may be warm-up
        if are_later_slow and not is_as_slow[0]:
            break
        cut += next_slow + 1
    return min(cut, half)


def _leading_high_levels(course: Course, most_values: int) -> int:
    """Return the number of values in leading levels that are above the median of what follows; at most ``most_values``.

    A level counts only as a whole.
    """
    level_by_value = np.repeat(course.levels, np.diff(course.edges))
    high_values = 0
    # the last level, which nothing follows, has no end in this list
    for level_end, level in zip(course.edges[1:-1], course.levels, strict=False):
        usual_later = float(np.median(level_by_value[level_end:]))
        is_high = level >= usual_later + _SMALLEST_LOG_EFFECT
        if level_end > most_values or not is_high:
            break
        high_values = level_end
    return high_values


def steadiness(
    model: StepModel,
    recompilations: int = 0,
    parts_s: Mapping[str, Series] = {},
    first_step: int = 1,
) -> Steadiness:
    """Return the record's description of the course of a run's measured steps.

    Args:
        model: the model of these steps.
        recompilations: the number of recompilations in them.
        parts_s: by part, (n,) its seconds in the same steps; they show which part causes a pattern
            or a change of level.
        first_step: the number in the run of the first measured step.
    """
    level = model.level
    word = word_of(model)
    half_width = None if level is None else level.relative_half_width
    is_noisy = half_width is None or half_width > WIDEST_KNOWN_HALF
    parts = model.parts_of(model.seconds)
    mean_after_cut_s = float(model.seconds[model.cut :].mean())
    bias_of_mean = None
    if mean_after_cut_s > 0.0:
        bias_of_mean = float(model.seconds.mean()) / mean_after_cut_s - 1.0
    pattern = None
    if model.pattern is not None:
        pattern = _pattern_record(model.pattern, model, parts_s)
    return Steadiness(
        word="noisy" if is_noisy else word,
        also=word if is_noisy and word != "steady" else None,
        cut=model.cut,
        lag1=None if level is None else level.lag1,
        bias_of_mean=bias_of_mean,
        recompilations=recompilations,
        known_to=half_width,
        first=first_step + model.begin,
        last=first_step + model.end - 1,
        first_step=first_step,
        took_s=float(model.seconds[model.begin : model.end].sum()),
        levels=_level_records(model, parts_s, first_step),
        rise=model.rise if np.any(model.trend) else None,
        pattern=pattern,
        kinds=_kind_records(model),
        level_s=parts.level,
        level_low_s=None if level is None else level.low,
        level_high_s=None if level is None else level.high,
        pattern_s=parts.pattern,
        odd_s=parts.odd,
    )


def _level_records(
    model: StepModel, parts_s: Mapping[str, Series], first_step: int
) -> list[StepLevel]:
    """Return the record's entry for each level, with the part in which it differs from the level before."""
    records: list[StepLevel] = []
    for index, (begin, end) in enumerate(pairwise(model.edges)):
        change_in = None
        if index > 0 and parts_s:
            change_in = _part_of_change(
                model, parts_s, model.edges[index - 1], begin, end
            )
        records.append(
            StepLevel(
                first=first_step + begin,
                last=first_step + end - 1,
                seconds=model.levels[index],
                change_in=change_in,
            )
        )
    return records


def _part_of_change(
    model: StepModel, parts_s: Mapping[str, Series], before: int, begin: int, end: int
) -> str | None:
    """Return the part in which steps [begin, end) differ from steps [before, begin), as ``StepLevel.change_in``."""
    before_s = _mean_parts(model, parts_s, before, begin)
    after_s = _mean_parts(model, parts_s, begin, end)
    if float(before_s.sum()) <= 0.0:
        return None
    index = part_of_change(before_s, after_s)
    if index is not None:
        return list(parts_s)[index]
    return ALL_PARTS if is_uniform(before_s, after_s) else None


def _mean_parts(
    model: StepModel, parts_s: Mapping[str, Series], begin: int, end: int
) -> Series:
    """Return (parts,) the mean seconds of each part in the regular steps of [begin, end), or in all if none is."""
    is_used = model.regular[begin:end]
    if not is_used.any():
        is_used = np.ones(end - begin, dtype=bool)
    means = [float(part_s[begin:end][is_used].mean()) for part_s in parts_s.values()]
    return np.array(means)


def _pattern_record(
    pattern: Pattern, model: StepModel, parts_s: Mapping[str, Series]
) -> StepPattern:
    """Return the record's entry for a pattern: its period, slow phases, their excess, and the part that causes it.

    ``parts_s`` holds by part (n,) the seconds of each step.
    """
    # how much the pattern adds to the mean of each part of the step
    costs_s = {
        part: abs(model.parts_of(part_s).pattern) for part, part_s in parts_s.items()
    }
    part = max(costs_s, key=costs_s.__getitem__, default=None)
    return StepPattern(
        every=pattern.period,
        slow=[phase + 1 for phase in model.slow_phases],
        extra=model.largest_excess,
        part=part,
    )


def _kind_records(model: StepModel) -> list[StepKind]:
    """Return the record's entries for kinds that have steps in the stretch, the most frequent one first."""
    stretch_s = model.seconds[model.begin : model.end]
    parts_s = model.parts_of(model.seconds)
    regular_s = parts_s.level  # the mean of the most frequent kind
    records = []
    for kind in model.kinds:
        is_member = kind.members[model.begin : model.end]
        if is_member.any() and regular_s > 0.0:
            ratio = float(stretch_s[is_member].mean()) / regular_s
            records.append(StepKind(share=float(is_member.mean()), ratio=ratio))
    return sorted(records, key=lambda record: -record.share)


def word_of(model: StepModel) -> Word | None:
    """Return the word for the course of the steps; None if there are fewer than ten steps.

    It is ``slowing`` if a trend rises, or if levels only rise; ``unsettled`` if they change otherwise, or if the
    warm-up takes more than half of the steps; and otherwise ``steady``.
    """
    if model.seconds.size < FEWEST_STEPS:
        return None
    if abs(model.rise) >= SMALLEST_EFFECT:
        return "slowing" if model.rise > 0.0 else "unsettled"
    levels = model.levels
    lowest = min(levels)
    has_one_level = lowest <= 0.0 or max(levels) / lowest - 1.0 < SMALLEST_EFFECT
    if has_one_level:
        return "steady" if model.is_settled else "unsettled"
    for earlier, later in pairwise(levels):
        if later / earlier < 1.0 - SMALLEST_EFFECT:
            return "unsettled"
    rises = levels[-1] / levels[0] - 1.0 >= SMALLEST_EFFECT
    return "slowing" if rises else "unsettled"

"""Follows the level of a running training's steps: changes, drifts, and levels that wander or alternate.

The reference is the level that was reported last; it stays as it is until a change is reported, so that a slow drift
adds up against it. A change is found by a generalised likelihood ratio over blocks of steps (Lorden 1971, Annals of
Mathematical Statistics 42:1897; Siegmund & Venkatraman 1995, Annals of Statistics 23:255). The noise of a block is
estimated from the differences of successive blocks, which a drift does not inflate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import FINEST
from lm_profiler.analysis.steps.step_model import SMALLEST_EFFECT
from lm_profiler.record.parts import PARTS, TIMED

BLOCK = 20  # steps of a block
_TRIMMED = 6  # of them on either side; the block's value is the mean of the rest, which single slow steps do not move

_REFERENCE = 25  # blocks that estimate the level, from where it began
# blocks of a reference before a change against it is looked for
_FEWEST_AT_START, _FEWEST_AFTER_CHANGE = (5, 2)
_SETTLING = 22  # blocks in which a run warms up: it may become faster, and only large changes are reported
_SMALLEST_EARLY_CHANGE = 0.1  # of the logarithm of the step
_STEPS_COMPARED = 400  # steps before a change whose median is compared with that of the steps after it
_RECENT = 50  # blocks in which a change may lie: 1,000 steps
_NOISE_BLOCKS, _FEWEST_DIFFERENCES = 200, 3  # blocks that estimate the noise
# Standard errors of a change. Simulated (tests): less than one false alarm in 10^6 steps, also under AR(1) noise of
# 0.6 and Student's t of three degrees.
_THRESHOLD = 6.0
_SMALLEST_CHANGE = 0.015  # of the logarithm of the step: machines wander by one percent
_HISTORY = 800  # blocks in memory; the older half is merged in pairs beyond that
_PART_SHARE = 0.5  # share of a change that its phase must have
_ONLY_PART_SHARE = 0.8  # share of a change from which on it lies in this phase alone
_RETURN_SHARE = 0.25  # a level has gone back if it is nearer to the old one than this share of the change
# so many changes of direction among the last changes are a level that wanders
_REVERSALS, _REMEMBERED = (4, 7)
_STAIRS = 8  # successive changes in one direction that are reported one by one; more are a drift
# successive changes in one direction that are a drift if the level jumps nowhere
_FEWEST_OF_GRADUAL_RISE = 3
_BESIDE_JUMP = 10  # blocks on either side of a jump
_SHARE_OF_JUMPS = 0.5  # of a rise
# blocks after a change at which its size is estimated anew
_FURTHER_AFTER = (5, 10, 25, 100)
# share of the size by which an estimate must differ to be reported again
_CORRECTED = 0.03
_DRIFT_STEP = 0.1  # share by which a drift's size must grow to be reported again
# changes of a drift at which its beginning is estimated anew
_BEGIN_CORRECTED_AT = (4, 8)
_FEWEST_BEFORE_DRIFT = 10  # blocks whose mean is the level before a drift
_LATER_KNEE = 0.85  # share of the squared error that is left if a drift began later than with its first block
_JUMP_BEFORE_DRIFT = 3.0  # ratio to all that follows, from which on a change is no part of the drift after it
_DRIFT_SLOWER = 4.0  # ratio of the intervals between two changes of a drift
_OPEN = 12  # changes that may go back yet
_LAST_OF_DRIFT = 50  # blocks whose line ends at the current level of a drift
# A change is reported once it has lasted so many blocks, or has cost this share of the time watched so far, within
# limits in seconds. A short burst is taken out instead. What slows all phases alike is mostly the machine.
_LASTING, _LASTING_IF_UNIFORM = 10, 20
_COST_SHARE, _LEAST_COST_S, _MOST_COST_S = 5e-3, 0.05, 5.0
_COST_RATIO_IF_UNIFORM = 5.0
# share of the step from which on a part's change looks like a uniform one
_NEARLY_WHOLE_STEP = 0.75
_UNIFORM = 0.4  # share of a change that lies apart from equal ratios of all phases
_TREND = 0.7  # Kendall's rank correlation of the level with time, from which on it follows a trend
_TREND_GROUPS = 20  # groups of blocks whose medians are correlated
# shares of a drift's size
_SMALL_BESIDE_DRIFT, _SMALL_AGAINST_DRIFT, _VERY_SMALL_BESIDE_DRIFT = (0.5, 0.25, 0.1)

Course = Literal["drift", "wanders", "alternates"]


class StepBlock(NamedTuple):
    """Some successive steps."""

    first_step: int
    last_step: int
    log_s: float  # mean logarithm of the step's seconds, of those in the middle
    seconds: NDArray[np.float64]  # (TIMED,) means of the same steps

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


@dataclass(eq=False, kw_only=True)
class LevelChange:
    """A change of level as it is known by now: it is corrected while more steps come in."""

    since_step: int
    before_s: NDArray[np.float64]  # (TIMED,) the level before, by part
    after_s: NDArray[np.float64]
    found_step: int  # the step at which it was found
    began_level_before: int  # the first step of the level before
    course: Course | None = None
    is_gradual: bool = False  # a drift that is no stairs
    until_step: int | None = None  # the last step before the level went back
    times: int = 1  # changes that this one stands for
    is_withdrawn: bool = False  # another change stands for it
    _reported_s: float | None = None

    @property
    def size_s(self) -> float:
        return float(self.after_s[-1] - self.before_s[-1])

    @property
    def direction(self) -> int:
        return 1 if self.size_s > 0 else -1

    @property
    def part(self) -> str | None:
        """The part that makes up most of the change; None if no part does, or all have changed by the same ratio."""
        part = self._part_with(_PART_SHARE)
        if part is None or not self.is_uniform:
            return part
        share_of_step = float(self.before_s[PARTS.index(part)] / self.before_s[-1])
        return part if share_of_step >= _NEARLY_WHOLE_STEP else None

    @property
    def only_part(self) -> str | None:
        """The part of the step that makes up nearly all of the change; None if several do."""
        return self._part_with(_ONLY_PART_SHARE)

    def _part_with(self, share: float) -> str | None:
        differences_s = (self.after_s - self.before_s)[:-1]
        largest = int(np.abs(differences_s).argmax())
        if abs(differences_s[largest]) < share * abs(self.size_s):
            return None
        return PARTS[largest]

    @property
    def is_corrected(self) -> bool:
        """Whether the size differs from the one that was reported."""
        if self._reported_s is None:
            return True
        share = _DRIFT_STEP if self.course == "drift" else _CORRECTED
        return abs(self.size_s - self._reported_s) > share * abs(self._reported_s)

    @property
    def is_negligible(self) -> bool:
        """Whether nothing is left of the change, now that more steps are known."""
        return abs(math.log(self.after_s[-1] / self.before_s[-1])) < SMALLEST_EFFECT

    @property
    def is_uniform(self) -> bool:
        """Whether all parts have changed by about the same ratio."""
        differences_s = (self.after_s - self.before_s)[:-1]
        uniform_s = self.before_s[:-1] * (self.size_s / float(self.before_s[-1]))
        apart_s = float(np.abs(differences_s - uniform_s).sum())
        return apart_s < _UNIFORM * abs(self.size_s)

    def reported(self) -> None:
        self._reported_s = self.size_s


class _YoungChange(NamedTuple):
    """A change that may be a short burst."""

    change: LevelChange
    begin_step: int  # the first step of the block with which it began
    is_part_of_line: bool


@dataclass(eq=False)
class LevelFollower:
    """Takes steps as they come and keeps the changes of their level.

    ``take_changed`` returns those that are new or corrected.
    """

    # that have not gone back, the oldest first
    open_changes: list[LevelChange] = field(default_factory=list)
    _left_steps: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    _left_seconds: NDArray[np.float64] = field(
        default_factory=lambda: np.empty((0, len(TIMED)))
    )
    _recent_steps: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    _recent_seconds: NDArray[np.float64] = field(
        default_factory=lambda: np.empty((0, len(TIMED)))
    )
    _blocks: list[StepBlock] = field(default_factory=list)
    _level_begin: int = 0  # index of the first block of the current level
    # of each block: the square of its difference from the one before it; unknown if a new level begins
    _squares: list[float] = field(default_factory=list)
    _last_changes: deque[LevelChange] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED)
    )
    _reported: deque[LevelChange] = field(
        default_factory=lambda: deque(maxlen=4 * _REMEMBERED)
    )
    _wandering: LevelChange | None = None  # what stands for a level that wanders
    _range_s: tuple[float, float] = (0.0, 0.0)  # between which it wanders
    # successive changes in one direction
    _rise: list[LevelChange] = field(default_factory=list)
    _young: list[_YoungChange] = field(default_factory=list)
    _watched_s: float = 0.0
    _changed: list[LevelChange] = field(default_factory=list)

    @property
    def level_s(self) -> float | None:
        """The current level of the step in seconds; None before it is known."""
        if not self._blocks:
            return None
        return float(
            np.mean([block.seconds[-1] for block in self._blocks[-_REFERENCE:]])
        )

    def add(self, steps: NDArray[np.int64], seconds: NDArray[np.float64]) -> None:
        """Take the next steps: their numbers and (n, TIMED) seconds."""
        steps = np.concatenate([self._left_steps, steps])
        seconds = np.concatenate([self._left_seconds, seconds])
        whole = len(steps) // BLOCK * BLOCK
        self._left_steps = steps[whole:]
        self._left_seconds = seconds[whole:]
        if not whole:
            return
        kept = (_RECENT + 4) * BLOCK + whole
        self._recent_steps = np.concatenate([self._recent_steps, steps[:whole]])[-kept:]
        self._recent_seconds = np.concatenate([self._recent_seconds, seconds[:whole]])[
            -kept:
        ]
        for block in _blocks(steps[:whole], seconds[:whole]):
            previous_log = self._blocks[-1].log_s if self._blocks else math.nan
            self._squares.append((block.log_s - previous_log) ** 2)
            self._blocks.append(block)
            self._watched_s += block.steps * float(block.seconds[-1])
            self._inspect()
        self._merge_old()

    def forget_unfinished(self) -> None:
        """Forget the steps that fill no block yet, because steps are left out after them."""
        self._left_steps = self._left_steps[:0]
        self._left_seconds = self._left_seconds[:0]

    def take_changed(self) -> list[LevelChange]:
        """Return the changes that are new or differ from what was reported of them."""
        changed = []
        for change in self._changed:
            if change not in changed:
                changed.append(change)
                change.reported()
        self._changed = []
        return changed

    def finish(self) -> None:
        """Report what has not lasted for long, and correct what is still open, as the run is over."""
        if self._young and self._is_worth_reporting():
            self._report_young()
        self._correct(is_last=True)

    # -- finding a change ----------------------------------------------------------------------------------------------

    def _inspect(self) -> None:
        """Look for a change of level in the last blocks, and correct the size of the last one."""
        onset = self._onset()
        if onset is not None:
            self._begin_level(onset)
        elif len(self._blocks) - self._level_begin in _FURTHER_AFTER or self._drifts():
            self._correct(is_last=False)
        if self._young and (self._has_lasted() or self._is_worth_reporting()):
            self._report_young()

    def _has_lasted(self) -> bool:
        """Return whether the level since the last young change is no short burst."""
        change = self._young[-1].change
        blocks = len(self._blocks) - self._level_begin
        return blocks >= (_LASTING_IF_UNIFORM if change.is_uniform else _LASTING)

    def _is_worth_reporting(self) -> bool:
        """Return whether the young changes have cost enough, or saved enough, to be reported at once."""
        before_s = float(self._young[0].change.before_s[-1])
        cost_s = 0.0
        for block in self._blocks[self._index_of(self._young[0].begin_step) :]:
            cost_s += block.steps * (float(block.seconds[-1]) - before_s)
        if self._young[-1].change.is_uniform:
            cost_s /= _COST_RATIO_IF_UNIFORM
        return abs(cost_s) >= min(
            max(_COST_SHARE * self._watched_s, _LEAST_COST_S), _MOST_COST_S
        )

    def _drifts(self) -> bool:
        return bool(self.open_changes) and self.open_changes[-1].course == "drift"

    def _onset(self) -> int | None:
        """Return the index of the first block of a new level; None if the level has not changed."""
        logs = np.array([block.log_s for block in self._blocks[self._level_begin :]])
        is_first_level = self._level_begin == 0
        fewest = _FEWEST_AT_START if is_first_level else _FEWEST_AFTER_CHANGE
        widest = min(_RECENT, len(logs) - fewest)
        if widest < 2:
            return None
        noise, differences = self._noise(widest)
        if noise is None:
            return None

        counts = np.arange(2, widest + 1)
        references = np.minimum(_REFERENCE, len(logs) - counts)
        centers = self._centers(references)
        sizes = _winsorized_means(logs[::-1][:widest], centers)
        scores = np.abs(sizes) / (noise * np.sqrt(1.0 / counts + 1.0 / references))
        # few differences estimate the noise (Student's t)
        scores *= math.sqrt(1.0 - 4.0 / (differences + 4.0))
        is_settling = len(self._blocks) <= _SETTLING
        smallest = _SMALLEST_EARLY_CHANGE if is_settling else _SMALLEST_CHANGE
        scores[np.abs(sizes) < smallest] = 0.0
        best = int(scores.argmax())
        if scores[best] <= _THRESHOLD:
            return None
        onset = self._split(self._level_begin, float(centers[best]), float(sizes[best]))
        return onset if self._is_change_of_most_steps(onset) else None

    def _centers(self, references: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the level by its first blocks, as many as each of ``references``."""
        centers = {}
        for count in np.unique(references).tolist():
            blocks = self._blocks[self._level_begin : self._level_begin + count]
            centers[count] = float(np.mean([block.log_s for block in _middle(blocks)]))
        return np.array([centers[count] for count in references.tolist()])

    def _split(self, begin: int, center: float, size: float) -> int:
        """Return the index of the block from which on the level is nearer to its new value than to ``center``.

        The level before began with the block ``begin``.
        """
        logs = np.array([block.log_s for block in self._blocks[begin:]])
        towards = (logs - center - size / 2.0) * math.copysign(1.0, size)
        from_here_on = np.cumsum(towards[::-1])[::-1]
        onset = begin + int(from_here_on.argmax())
        return min(max(onset, begin + 1), len(self._blocks) - 2)

    def _is_change_of_most_steps(self, onset: int) -> bool:
        """Return whether the median step changed too: otherwise there were only more slow steps than usual."""
        begin = max(self._level_begin, onset - _STEPS_COMPARED // BLOCK)
        is_before = self._recent_steps >= self._blocks[begin].first_step
        is_before &= self._recent_steps < self._blocks[onset].first_step
        is_after = self._recent_steps >= self._blocks[onset].first_step
        is_after &= self._recent_steps <= self._blocks[-1].last_step
        before_s = self._recent_seconds[is_before, -1]
        after_s = self._recent_seconds[is_after, -1]
        if not len(before_s) or not len(after_s):
            return True
        before = np.mean([block.log_s for block in self._blocks[begin:onset]])
        after = np.mean([block.log_s for block in self._blocks[onset:]])
        size = float(after - before)
        by_median = math.log(float(np.median(after_s)) / float(np.median(before_s)))
        return abs(size) >= SMALLEST_EFFECT and by_median * math.copysign(
            1.0, size
        ) >= 0.3 * abs(size)

    def _noise(self, recent: int) -> tuple[float | None, int]:
        """Return the standard deviation of a block around its level, and from how many differences it is known."""
        end = len(self._blocks) - recent
        begin = max(end - _NOISE_BLOCKS, 0) + 1
        squares = np.array(self._squares[begin:end])
        squares = squares[~np.isnan(squares)]
        if len(squares) < _FEWEST_DIFFERENCES:
            return None, 0
        return max(math.sqrt(float(squares.mean()) / 2.0), FINEST), len(squares)

    # -- a change and what it means ------------------------------------------------------------------------------------

    def _begin_level(self, onset: int) -> None:
        """Begin a new level with the block ``onset``; take a short burst out if the level is back where it was."""
        self._correct(is_last=False, blocks=self._blocks[self._level_begin : onset])
        before = self._blocks[self._level_begin : onset]
        after = self._blocks[onset:]
        step = self._exact_step(onset, before, after)
        change = LevelChange(
            since_step=step,
            before_s=_mean_seconds(before),
            after_s=_mean_seconds(_without_straddling(after, step)),
            found_step=self._blocks[-1].last_step,
            began_level_before=self._blocks[self._level_begin].first_step,
        )
        young = _YoungChange(
            change=change,
            begin_step=self._blocks[onset].first_step,
            is_part_of_line=_is_line(before, after),
        )
        burst = self._burst_before(change)
        if burst is not None:
            self._take_out(burst, young.begin_step)
            return
        has_warmed_up = (
            onset < _SETTLING
            and change.direction < 0
            and not self._young
            and not self._last_changes
        )

        self._squares[onset] = math.nan
        has_straddling_block = self._blocks[onset].first_step < step and len(after) > 1
        self._level_begin = onset + 1 if has_straddling_block else onset
        self._squares[self._level_begin] = math.nan
        if not has_warmed_up:
            self._young.append(young)

    def _burst_before(self, change: LevelChange) -> _YoungChange | None:
        """Return the young change whose level before is the one that ``change`` goes back to; None without any."""
        for young in self._young:
            if _goes_back(change, young.change):
                return young
        return None

    def _take_out(self, burst: _YoungChange, end_step: int) -> None:
        """Go on as if the steps from ``burst`` to the block that begins with ``end_step`` had not been."""
        first = self._index_of(burst.begin_step)
        last = self._index_of(end_step)
        last_step = self._blocks[last].last_step
        del self._blocks[first : last + 1]
        del self._squares[first : last + 1]
        if first < len(self._squares):
            self._squares[first] = math.nan
        is_outside = (self._recent_steps < burst.begin_step) | (
            self._recent_steps > last_step
        )
        self._recent_steps = self._recent_steps[is_outside]
        self._recent_seconds = self._recent_seconds[is_outside]
        self._level_begin = self._index_of(burst.change.began_level_before)
        del self._young[self._young.index(burst) :]

    def _index_of(self, step: int) -> int:
        """Return the index of the block that holds ``step``."""
        first_steps = [block.first_step for block in self._blocks]
        return max(bisect_right(first_steps, step) - 1, 0)

    def _report_young(self) -> None:
        """Report the young changes one after the other, unless the level is back where it was before them."""
        level = self._blocks[self._level_begin :]
        current_s = _mean_seconds(_middle(level[-_REFERENCE:]))
        for young in self._young:
            if _is_back(current_s, young.change):
                self._take_out(young, self._blocks[self._level_begin - 1].first_step)
                return
        young_changes = self._young
        self._young = []
        young_changes[-1].change.after_s = _mean_seconds(_middle(level))
        if len(young_changes) == 1:
            self._correct_begin(young_changes[0].change)
        for young in young_changes:
            young.change.found_step = self._blocks[-1].last_step
            self._classify(young.change, young.is_part_of_line)

    def _correct_begin(self, change: LevelChange) -> None:
        """Correct where ``change`` began, now that its level is known from more blocks."""
        first = self._index_of(change.began_level_before)
        before_log = math.log(change.before_s[-1])
        size = math.log(change.after_s[-1]) - before_log
        onset = self._split(first, before_log, size)
        if onset == self._index_of(change.since_step):
            return
        before = self._blocks[first:onset]
        after = self._blocks[onset:]
        change.since_step = self._exact_step(onset, before, after)
        change.before_s = _mean_seconds(before)

    def _classify(self, change: LevelChange, is_part_of_line: bool) -> None:
        """Report ``change``, unless an earlier event stands for it."""
        self._rise = [*self._continued_rise(change), change]
        self._last_changes.append(change)
        if self._wanders(change):
            return
        if self._returns(change):
            return
        if self._continues_drift(change, is_part_of_line):
            return
        self.open_changes.append(change)
        self._reported.append(change)
        self._changed.append(change)
        del self.open_changes[:-_OPEN]

    def _rises_gradually(self) -> bool:
        """Return whether the last changes in one direction are no stairs: at none of them the level jumps."""
        if len(self._rise) < _FEWEST_OF_GRADUAL_RISE:
            return False
        jumps = 0.0
        for change in self._rise:
            begin = self._index_of(change.since_step)
            before = [
                block.log_s
                for block in self._blocks[max(begin - _BESIDE_JUMP, 0) : begin]
            ]
            after = [
                block.log_s
                for block in self._blocks[begin + 1 : begin + 1 + _BESIDE_JUMP]
            ]
            if before and after:
                jumps += float(np.median(after) - np.median(before))
        rise = math.log(self._rise[-1].after_s[-1] / self._rise[0].before_s[-1])
        return abs(jumps) < _SHARE_OF_JUMPS * abs(rise)

    def _continued_rise(self, change: LevelChange) -> list[LevelChange]:
        if self._rise and self._rise[-1].direction == change.direction:
            return self._rise
        return []

    def _exact_step(
        self, onset: int, before: Sequence[StepBlock], after: Sequence[StepBlock]
    ) -> int:
        """Return the step at which the level changed, from the steps around the block ``onset``."""
        first = self._blocks[max(onset - 2, onset - len(before))].first_step
        last = self._blocks[min(onset + 1, len(self._blocks) - 1)].last_step
        is_near = (self._recent_steps >= first) & (self._recent_steps <= last)
        steps = self._recent_steps[is_near]
        if len(steps) < BLOCK:
            return self._blocks[onset].first_step
        difference_s = _mean_seconds(after[-_REFERENCE:]) - _mean_seconds(
            before[-_REFERENCE:]
        )
        step_difference_s = float(difference_s[-1])
        is_changed = difference_s[:-1] * np.sign(step_difference_s) >= 0.25 * abs(
            step_difference_s
        )
        if not is_changed.any():
            is_changed = np.full(len(PARTS), True)
        values = self._recent_seconds[is_near][:, :-1][:, is_changed].sum(axis=1)
        low = _mean_seconds(before[-_REFERENCE:])[:-1][is_changed].sum()
        high = _mean_seconds(after[-_REFERENCE:])[:-1][is_changed].sum()
        clipped = np.clip(values, min(low, high), max(low, high))
        towards = (clipped - (low + high) / 2.0) * np.sign(high - low)
        place = int(np.cumsum(towards).argmin())
        if towards[0] > 0 and np.cumsum(towards).min() > 0:
            return int(steps[0])
        return int(steps[min(place + 1, len(steps) - 1)])

    def _wanders(self, change: LevelChange) -> bool:
        """Return whether the level wanders, so that ``change`` is only counted."""
        wandering = self._wandering
        if (
            wandering is not None
            and self._is_in_range(change.after_s)
            and _may_belong_to(change, wandering)
        ):
            self._count_wandering(wandering, change)
            return True

        changes = self._changes_since_jump()
        reversals = 0
        for before, after in pairwise(changes):
            reversals += before.direction != after.direction
        if reversals < _REVERSALS or self._follows_trend(changes[0].since_step):
            return False
        levels_s = _levels_of(changes)
        alternates = _alternates(levels_s)
        lowest = min(changes, key=lambda each: each.after_s[-1])
        highest = max(changes, key=lambda each: each.after_s[-1])
        ends_s = lowest.after_s, highest.after_s
        if wandering is not None and not any(map(self._is_in_range, ends_s)):
            wandering = None  # it wanders around another level now
        if wandering is None:
            wandering = LevelChange(
                since_step=changes[0].since_step,
                before_s=lowest.after_s,
                after_s=highest.after_s,
                found_step=change.found_step,
                began_level_before=changes[0].began_level_before,
                course="alternates" if alternates else "wanders",
                times=len(changes),
            )
            self._wandering = wandering
        else:
            wandering.course = "wanders"
            wandering.times += len(changes)
            self._widen(lowest.after_s)
            self._widen(highest.after_s)
        self._range_s = float(wandering.before_s[-1]), float(wandering.after_s[-1])
        self._withdraw(changes)
        self._withdraw_within_range()
        self._last_changes.clear()
        self._changed.append(wandering)
        return True

    def _changes_since_jump(self) -> list[LevelChange]:
        """Return the last changes, since the last jump to other levels from which it has not come back.

        A jump is longer than the range of the levels on either side of it.
        """
        changes = [*self._last_changes]
        logs = np.log(np.array(_levels_of(changes)))
        for first_after in range(len(logs) - 1, 0, -1):
            before = logs[:first_after]
            after = logs[first_after:]
            gap = max(after.min() - before.max(), before.min() - after.max())
            if gap > max(np.ptp(before), np.ptp(after)):
                return changes[first_after:]
        return changes

    def _widen(self, level_s: NDArray[np.float64]) -> None:
        """Widen the range in which the level wanders by a level that is beyond it."""
        wandering = self._wandering
        assert wandering is not None
        if level_s[-1] < wandering.before_s[-1]:
            wandering.before_s = level_s
        if level_s[-1] > wandering.after_s[-1]:
            wandering.after_s = level_s
        self._range_s = float(wandering.before_s[-1]), float(wandering.after_s[-1])

    def _withdraw_within_range(self) -> None:
        """Withdraw the earlier changes between levels that are within the range in which the level wanders."""
        wandering = self._wandering
        assert wandering is not None
        within = [
            each
            for each in self._reported
            if self._is_in_range(each.before_s, each.after_s)
        ]
        for change in within:
            wandering.since_step = min(wandering.since_step, change.since_step)
            self._reported.remove(change)
        self._withdraw(within)

    def _is_in_range(self, *levels_s: NDArray[np.float64]) -> bool:
        """Return whether levels are within the range in which the level wanders, or half of it beyond."""
        low_s, high_s = self._range_s
        margin = math.sqrt(high_s / low_s)
        return all(
            low_s / margin <= level_s[-1] <= high_s * margin for level_s in levels_s
        )

    def _count_wandering(self, wandering: LevelChange, change: LevelChange) -> None:
        wandering.times += 1
        began_before = [
            each for each in self.open_changes if each.since_step < wandering.since_step
        ]
        self._close_back_to(len(began_before), change.since_step - 1)
        if wandering.course == "wanders":
            self._widen(change.after_s)
            self._withdraw_within_range()
        has_doubled = wandering.times & (wandering.times - 1) == 0
        if has_doubled or (wandering.is_corrected and wandering.times < 100):
            self._changed.append(wandering)

    def _withdraw(self, changes: Sequence[LevelChange]) -> None:
        """Withdraw ``changes``, because another one stands for them."""
        for change in changes:
            was_reported = change in self._changed or change._reported_s is not None
            if was_reported and not change.is_withdrawn:
                self._changed.append(change)
            change.is_withdrawn = True
        self.open_changes = [
            change for change in self.open_changes if not change.is_withdrawn
        ]

    def _returns(self, change: LevelChange) -> bool:
        """Return whether ``change`` goes back to the level before a change that is open, which it closes."""
        for index in range(len(self.open_changes) - 1, -1, -1):
            if _goes_back(change, self.open_changes[index]):
                self._close_back_to(index, change.since_step - 1)
                return True
        return False

    def _close_back_to(self, index: int, last_step: int) -> None:
        """Close the open changes from ``index`` on."""
        closed = self.open_changes[index:]
        del self.open_changes[index:]
        for change in closed:
            if change.is_negligible:
                self._withdraw([change])
                continue
            change.until_step = last_step
            self._changed.append(change)

    def _follows_trend(self, first_step: int) -> bool:
        """Return whether the level rises or falls all the time since ``first_step``, or since a drift began."""
        if self._drifts():
            first_step = min(first_step, self.open_changes[-1].since_step)
        blocks = self._blocks[self._index_of(first_step) :]
        if len(blocks) < _TREND_GROUPS:
            return False
        logs = np.array([block.log_s for block in blocks])
        medians = np.array(
            [float(np.median(group)) for group in np.array_split(logs, _TREND_GROUPS)]
        )
        earlier, later = np.triu_indices(_TREND_GROUPS, 1)
        correlation = float(np.sign(medians[later] - medians[earlier]).mean())
        return abs(correlation) >= _TREND

    def _continues_drift(self, change: LevelChange, is_line: bool) -> bool:
        """Return whether ``change`` is a part of a drift of earlier changes, one of which then stands for it."""
        rises_gradually = self._rises_gradually()
        is_gradual = is_line or rises_gradually
        has_many_stairs = len(self._rise) > _STAIRS or rises_gradually
        last = self.open_changes[-1] if self.open_changes else None
        is_small_beside_drift = False
        if last is not None and last.course == "drift" and _is_hidden_by(last, change):
            if last.direction != change.direction:
                is_in_drift = abs(change.size_s) <= _SMALL_AGAINST_DRIFT * abs(
                    last.size_s
                )
                if is_in_drift:
                    self._correct(is_last=False)
                return is_in_drift
            is_small_beside_drift = abs(change.size_s) <= _SMALL_BESIDE_DRIFT * abs(
                last.size_s
            )
        if not is_line and not has_many_stairs and not is_small_beside_drift:
            return False
        first = self._first_of_drift(change, has_many_stairs)
        if first is None:
            change.course = "drift"
            change.is_gradual = True
            self._set_drift_begin(change)
            return False

        is_new = first.course != "drift"
        later = self.open_changes[self.open_changes.index(first) + 1 :]
        self._withdraw(later)
        first.course = "drift"
        first.after_s = self._end_of_drift(first)
        first.times += 1 + len(later)
        if is_new:
            first.is_gradual = is_gradual
        if first.is_gradual and (is_new or first.times in _BEGIN_CORRECTED_AT):
            self._set_drift_begin(first)
        if is_new or first.is_corrected:
            self._changed.append(first)
        return True

    def _first_of_drift(
        self, change: LevelChange, has_many_stairs: bool
    ) -> LevelChange | None:
        """Return the open change with which the drift began that ``change`` belongs to; None if that is ``change``.

        The changes of a drift follow each other ever faster or about as fast; stairs may be of any length.
        """
        first = None
        next_step = change.since_step
        interval = None
        for earlier in reversed(self.open_changes):
            if earlier.direction != change.direction:
                break
            rise_after_s = abs(float(change.after_s[-1] - earlier.after_s[-1]))
            is_jump = abs(earlier.size_s) > _JUMP_BEFORE_DRIFT * rise_after_s
            if is_jump and earlier.course != "drift":
                break
            steps = max(next_step - earlier.since_step, BLOCK)
            is_far = interval is not None and steps > _DRIFT_SLOWER * interval
            if is_far and not has_many_stairs and earlier.course != "drift":
                break
            first = earlier
            if earlier.course == "drift":
                break
            interval = steps
            next_step = earlier.since_step
        return first

    def _set_drift_begin(self, change: LevelChange) -> None:
        """Correct where a drift began: where a constant becomes a line, over the blocks since the level before."""
        blocks = self._blocks[self._index_of(change.began_level_before) :]
        knee = _knee(blocks)
        change.since_step = blocks[knee].first_step
        blocks_before = max(knee, len(blocks) // 8, _FEWEST_BEFORE_DRIFT)
        change.before_s = _mean_seconds(
            _middle(blocks[: min(blocks_before, _REFERENCE)])
        )

    def _correct(
        self, is_last: bool, blocks: Sequence[StepBlock] | None = None
    ) -> None:
        """Estimate the size of the last open change anew; ``blocks`` are its level if a new one begins."""
        if self._young:
            if blocks:
                self._young[-1].change.after_s = _mean_seconds(blocks)
            return
        if self._last_changes and blocks:
            self._last_changes[-1].after_s = _mean_seconds(blocks)
        change = self.open_changes[-1] if self.open_changes else None
        if change is None:
            return
        level = self._blocks[self._level_begin :] if blocks is None else blocks
        if not level:
            return
        if change.course == "drift":
            change.after_s = self._end_of_drift(change)
        else:
            change.after_s = _mean_seconds(level)
        if change.is_negligible:
            self._withdraw([change])
            is_last_change = (
                len(self._last_changes) > 0 and change is self._last_changes[-1]
            )
            if is_last_change:  # the level before goes on
                self._level_begin = self._index_of(change.began_level_before)
            return
        if change.is_corrected or (is_last and change.course == "drift"):
            self._changed.append(change)

    def _end_of_drift(self, drift: LevelChange) -> NDArray[np.float64]:
        """Return the current level of a drift, by part: where the line through its last blocks ends."""
        blocks = self._blocks[self._index_of(drift.since_step) :][-_LAST_OF_DRIFT:]
        if len(blocks) < 4:
            return _mean_seconds(blocks)
        places = np.array(
            [(block.first_step + block.last_step) / 2.0 for block in blocks]
        )
        seconds = np.array([block.seconds for block in blocks])
        from_end = (places - places[-1]) / (places[-1] - places[0])
        is_usual = np.full(len(blocks), True)
        for _ in range(2):  # the second line leaves out what lies far off the first one
            design = np.column_stack([np.ones(len(blocks)), from_end])
            line, *_ = np.linalg.lstsq(design[is_usual], seconds[is_usual], rcond=None)
            distances_s = np.abs(seconds[:, -1] - design @ line[:, -1])
            is_usual = distances_s <= 4.0 * np.median(distances_s)
        end_s: NDArray[np.float64] = line[0]
        return end_s

    def _merge_old(self) -> None:
        """Merge the older half of the blocks in pairs if there are many."""
        if len(self._blocks) <= _HISTORY:
            return
        half = min(_HISTORY // 2, len(self._blocks) - 2 * _RECENT)
        old = self._blocks[:half]
        merged = [
            _merged(before, after)
            for before, after in zip(old[::2], old[1::2], strict=False)
        ]
        level_begin_step = self._blocks[self._level_begin].first_step
        self._squares = [*[math.nan] * len(merged), *self._squares[2 * len(merged) :]]
        self._blocks = [*merged, *self._blocks[2 * len(merged) :]]
        self._level_begin = self._index_of(level_begin_step)


def _blocks(steps: NDArray[np.int64], seconds: NDArray[np.float64]) -> list[StepBlock]:
    count = len(steps) // BLOCK
    step_s = seconds[:, -1].reshape(count, BLOCK)
    middle = np.argsort(step_s, axis=1, kind="stable")[:, _TRIMMED:-_TRIMMED]
    rows = middle + np.arange(count)[:, None] * BLOCK
    means = seconds[rows].mean(axis=1)
    logs = np.log(np.maximum(seconds[rows, -1], 1e-9)).mean(axis=1)
    blocks = []
    for index in range(count):
        first = int(steps[index * BLOCK])
        last = int(steps[(index + 1) * BLOCK - 1])
        blocks.append(StepBlock(first, last, float(logs[index]), means[index]))
    return blocks


def _winsorized_means(
    values: NDArray[np.float64], centers: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by how much the means of the first 2, 3, … ``values`` differ from ``centers``, one for each.

    The most extreme value counts as the next one, so a single block that is far off, such as one with many slow steps,
    is no change of level.
    """
    highest, second_highest = -math.inf, -math.inf
    lowest, second_lowest = math.inf, math.inf
    total = 0.0
    differences = []
    for count, value in enumerate(values.tolist(), 1):
        total += value
        second_highest = max(second_highest, min(value, highest))
        highest = max(highest, value)
        second_lowest = min(second_lowest, max(value, lowest))
        lowest = min(lowest, value)
        if count == 1:
            continue
        center = float(centers[count - 2])
        if total > count * center:
            mean = (total - highest + second_highest) / count
            differences.append(max(mean - center, 0.0))
        else:
            mean = (total - lowest + second_lowest) / count
            differences.append(min(mean - center, 0.0))
    return np.array(differences)


def _middle(blocks: Sequence[StepBlock]) -> Sequence[StepBlock]:
    """Return the middle half of ``blocks`` by how long their steps took, so that a burst among them counts little."""
    quarter = len(blocks) // 4
    by_length = sorted(blocks, key=lambda block: block.log_s)
    return by_length[quarter : len(blocks) - quarter]


def _merged(before: StepBlock, after: StepBlock) -> StepBlock:
    weight = before.steps / (before.steps + after.steps)
    log_s = weight * before.log_s + (1.0 - weight) * after.log_s
    seconds = weight * before.seconds + (1.0 - weight) * after.seconds
    return StepBlock(before.first_step, after.last_step, log_s, seconds)


def _mean_seconds(blocks: Sequence[StepBlock]) -> NDArray[np.float64]:
    weights = np.array([block.steps for block in blocks], dtype=float)
    seconds = np.array([block.seconds for block in blocks])
    mean: NDArray[np.float64] = weights @ seconds / weights.sum()
    return mean


def _goes_back(change: LevelChange, earlier: LevelChange) -> bool:
    """Return whether ``change`` goes back to the level before ``earlier``."""
    return change.direction != earlier.direction and _is_back(change.after_s, earlier)


def _is_back(level_s: NDArray[np.float64], change: LevelChange) -> bool:
    """Return whether a level is the one before ``change``, about."""
    before = math.log(change.before_s[-1])
    size = abs(math.log(change.after_s[-1]) - before)
    distance = abs(math.log(level_s[-1]) - before)
    return distance <= max(SMALLEST_EFFECT, _RETURN_SHARE * size)


def _may_belong_to(change: LevelChange, other: LevelChange) -> bool:
    """Return whether ``change`` lies in the same part of the step as ``other``, or in no part alone."""
    return change.only_part in (None, other.part)


def _is_hidden_by(drift: LevelChange, change: LevelChange) -> bool:
    """Return whether ``change`` may be a part of ``drift``: it is in its part of the step, or very small beside it."""
    is_very_small = abs(change.size_s) <= _VERY_SMALL_BESIDE_DRIFT * abs(drift.size_s)
    return is_very_small or _may_belong_to(change, drift)


def _without_straddling(blocks: Sequence[StepBlock], step: int) -> Sequence[StepBlock]:
    """Return the blocks that lie after ``step`` as a whole, or all if there are none."""
    whole = [block for block in blocks if block.first_step >= step]
    return whole or blocks


def _is_line(before: Sequence[StepBlock], after: Sequence[StepBlock]) -> bool:
    """Return whether one line fits the blocks better than two levels."""
    if len(before) < 3 or len(after) < 2:
        return False
    blocks = [*before, *after]
    weights = np.array([block.steps for block in blocks], dtype=float)
    logs = np.array([block.log_s for block in blocks])
    places = np.array([block.first_step + block.last_step for block in blocks]) / 2.0
    levels = np.empty(len(blocks))
    levels[: len(before)] = np.average(
        logs[: len(before)], weights=weights[: len(before)]
    )
    levels[len(before) :] = np.average(
        logs[len(before) :], weights=weights[len(before) :]
    )
    slope, start = np.polyfit(places, logs, 1, w=np.sqrt(weights))
    by_levels = float(weights @ (logs - levels) ** 2)
    by_line = float(weights @ (logs - start - slope * places) ** 2)
    return by_line < by_levels


def _knee(blocks: Sequence[StepBlock]) -> int:
    """Return the index of the block at which a level becomes a line."""
    logs = np.array([block.log_s for block in blocks])
    places = np.array([float(block.first_step) for block in blocks])
    best_knee = 0
    least_error = math.inf
    for knee in range(0, len(blocks) - 3, max(len(blocks) // 100, 1)):
        rise = np.maximum(places - places[knee], 0.0)
        design = np.column_stack([np.ones(len(blocks)), rise])
        solution, *_ = np.linalg.lstsq(design, logs, rcond=None)
        error = float(((logs - design @ solution) ** 2).sum())
        # The first block stays the choice unless a later one is clearly better: a drift may begin with the run.
        share = _LATER_KNEE if best_knee == 0 else 1.0
        if error < share * least_error:
            best_knee = knee
            least_error = error
    return best_knee


def _levels_of(changes: Sequence[LevelChange]) -> list[float]:
    """Return the seconds of a step before successive changes, and after each of them."""
    levels_s = [float(change.after_s[-1]) for change in changes]
    if changes:
        levels_s.insert(0, float(changes[0].before_s[-1]))
    return levels_s


def _alternates(levels_s: Sequence[float]) -> bool:
    """Return whether the levels are two: each is near one of them, and each of the two occurs at least twice."""
    logs = np.sort(np.log(np.array(levels_s)))
    gaps = np.diff(logs)
    split = int(gaps.argmax()) + 1
    low = logs[:split]
    high = logs[split:]
    if len(low) < 2 or len(high) < 2:
        return False
    spread = max(float(low[-1] - low[0]), float(high[-1] - high[0]))
    return spread <= 0.25 * float(gaps.max())

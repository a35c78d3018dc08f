"""Follows the level of a running training's steps: changes, drifts, and levels that wander or alternate.

The reference is the level that was reported last; it stays as it is until a change is reported, so that a slow drift
adds up against it. A change is found by a generalised likelihood ratio over blocks of steps (Lorden 1971, Annals of
Mathematical Statistics 42:1897; Siegmund & Venkatraman 1995, Annals of Statistics 23:255). The noise of a block is
estimated from the differences of successive blocks, which a drift does not inflate.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import FINEST, rank_correlation
from lm_profiler.analysis.steps.step_model import SMALLEST_EFFECT
from lm_profiler.analysis.watch.level_change import LevelChange
from lm_profiler.analysis.watch.step_blocks import (
    BLOCK,
    RecentSteps,
    Seconds,
    StepBlock,
    StepNumbers,
    UnfinishedBlock,
    are_two_levels,
    cut_into_blocks,
    end_of_line,
    knee_of,
    logs_of,
    make_line,
    mean_seconds,
    merge_blocks,
    middle_half,
    winsorized_differences,
)
from lm_profiler.record.parts import PARTS

# -- finding a change
_REFERENCE = 25  # blocks that estimate the level, from where it began
# blocks of a reference before a change against it is looked for
_FEWEST_AT_START = 5
_FEWEST_AFTER_CHANGE = 2
_SETTLING = 35  # blocks in which a run warms up: it may become faster, and only large changes are reported
_SMALLEST_EARLY_CHANGE = 0.1  # of the logarithm of the step
SMALLEST_CHANGE = 0.015  # of the logarithm of the step: machines wander by one percent
# Standard errors of a change. Simulated (tests): less than one false alarm in 10^6 steps, also under AR(1) noise of
# 0.6 and Student's t of three degrees.
_THRESHOLD = 6.0
_RECENT = 50  # blocks in which a change may lie: 1,000 steps
_NOISE_BLOCKS = 200  # blocks that estimate the noise
_FEWEST_DIFFERENCES = 3  # of successive blocks
_HISTORY = 800  # blocks in memory; the older half is merged in pairs beyond that
_STEPS_COMPARED = 400  # steps before a change whose median is compared with that of the steps after it
_SHARE_OF_MEDIAN = 0.3  # share of a change that the median step must have, too
# share of a change from which on a part shows where the level changed
_CHANGED_PART = 0.25

# -- when a change is reported
# It has lasted so many blocks, or has cost this share of the time watched so far, within limits in seconds. A short
# burst is taken out instead. What slows all phases alike is mostly the machine.
_LASTING = 10
_LASTING_IF_UNIFORM = 20
_COST_SHARE = 5e-3
_LEAST_COST_S = 0.05
_MOST_COST_S = 5.0
_COST_RATIO_IF_UNIFORM = 5.0
# blocks after a change at which its size is estimated anew
_BLOCKS_AT_CORRECTION = (5, 10, 25, 100)
_MOST_WAITING = 50  # changes that may become worth reporting
_MOST_OPEN_CHANGES = 12  # changes that may go back yet

# -- a level that wanders: so many changes of direction among the last changes
_REVERSALS = 4
_CHANGES_REMEMBERED = 7
# a change so many times as large as the last changes usually are is no wandering
_JUMP_BESIDE_OTHERS = 3.0
_LEAST_JUMP = 0.2  # of the logarithm of the step
_FEWEST_BESIDE_JUMP = 3  # other changes that show the usual size
_MOST_JUMPS = 2  # a level that jumps more often alternates
# The same for small changes that no part makes up alone: on real machines the speed moves by a few percent.
_REVERSALS_OF_MACHINE = 1
_WIDEST_RANGE_OF_MACHINE = 0.2  # of the logarithm of the step
_REPORTED_EVERY_TIME = 100  # changes of it that are reported if they widen its range; more only when they double
_TREND = 0.7  # Kendall's rank correlation of the level with time, from which on it follows a trend
_TREND_GROUPS = 20  # groups of blocks whose medians are correlated

# -- a drift
_STAIRS = 8  # successive changes in one direction that are reported one by one; more are a drift
# successive changes in one direction that are a drift if the level jumps nowhere
_FEWEST_OF_GRADUAL_RISE = 3
_BLOCKS_BESIDE_JUMP = 10  # on either side of it
_SHARE_OF_JUMPS = 0.5  # of a rise
# changes of a drift at which its beginning is estimated anew
_CHANGES_AT_CORRECTION = (4, 8)
_FEWEST_BEFORE_DRIFT = 10  # blocks whose mean is the level before a drift
_JUMP_BEFORE_DRIFT = 3.0  # ratio to all that follows, from which on a change is no part of the drift after it
_DRIFT_SLOWER = 4.0  # ratio of the intervals between two changes of a drift
_BLOCKS_AT_END = 50  # blocks whose line ends at the current level of a drift
# a change is a piece of a drift up to these shares of its size, in the drift's direction and against it
_SMALL_BESIDE_DRIFT = 0.5
_SMALL_AGAINST_DRIFT = 0.25


class _UnconfirmedChange(NamedTuple):
    """A change that may be a short burst."""

    change: LevelChange
    begin_step: int  # the first step of the block with which it began
    is_part_of_line: bool


class LevelFollower:
    """Takes steps as they come and keeps the changes of their level.

    ``take_changed`` returns those that are new or corrected.
    """

    def __init__(
        self, is_worth_reporting: Callable[[LevelChange], bool] = lambda change: True
    ) -> None:
        self._is_worth_reporting = is_worth_reporting
        # changes that have not gone back, the oldest first
        self.open_changes: list[LevelChange] = []
        # the least change that is looked for, as a logarithm of the step
        self.smallest_change = SMALLEST_CHANGE
        self._unfinished = UnfinishedBlock()
        self._recent = RecentSteps()
        self._blocks: list[StepBlock] = []
        # index of the first block of the current level
        self._level_begin = 0
        # of each block: the square of its difference from the one before it; unknown if a new level begins
        self._squared_differences: list[float] = []
        self._watched_s = 0.0

        self._unconfirmed_changes: list[_UnconfirmedChange] = []
        self._last_changes: deque[LevelChange] = deque(maxlen=_CHANGES_REMEMBERED)
        self._reported_changes: deque[LevelChange] = deque(
            maxlen=4 * _CHANGES_REMEMBERED
        )
        # successive changes in one direction
        self._same_direction_changes: list[LevelChange] = []
        # what stands for a level that wanders, and the seconds between which it does
        self._wandering: LevelChange | None = None
        self._wandering_range_s = (0.0, 0.0)
        self._changes_to_report: list[LevelChange] = []

    @property
    def level_s(self) -> float | None:
        """The current level of the step in seconds; None before it is known."""
        if not self._blocks:
            return None
        last_blocks = self._blocks[-_REFERENCE:]
        return float(np.mean([block.seconds[-1] for block in last_blocks]))

    def add(self, steps: StepNumbers, seconds: Seconds) -> None:
        """Take the next steps: their numbers and (n, TIMED) seconds."""
        steps, seconds = self._unfinished.fill(steps, seconds)
        if len(steps) == 0:
            return
        most_steps = (_RECENT + 4) * BLOCK + len(steps)
        self._recent.add(steps, seconds, most_steps)
        for block in cut_into_blocks(steps, seconds):
            previous_log = self._blocks[-1].log_s if self._blocks else math.nan
            self._squared_differences.append((block.log_s - previous_log) ** 2)
            self._blocks.append(block)
            self._watched_s += block.steps * float(block.seconds[-1])
            self._inspect()
        self._merge_old_blocks()

    def forget_unfinished(self) -> None:
        """Forget the steps that fill no block yet, because steps are left out after them."""
        self._unfinished.forget()

    def take_changed(self) -> list[LevelChange]:
        """Return the changes that are new or differ from what was reported of them.

        Those that are not worth reporting wait, because they may be so later.
        """
        changed = []
        waiting = []
        for change in dict.fromkeys(self._changes_to_report):
            change.is_hidden = not self._is_worth_reporting(change)
            if change.was_reported or not change.is_hidden:
                changed.append(change)
                change.mark_reported()
            elif not change.is_withdrawn:
                waiting.append(change)
        self._changes_to_report = waiting[-_MOST_WAITING:]
        return changed

    def finish(self) -> None:
        """At the end of the run, report what has not lasted for long and correct what is still open."""
        if self._unconfirmed_changes and self._has_cost_enough():
            self._report_unconfirmed()
        drift = self._current_drift()
        if drift is not None and self._goes_on(drift):
            self._unconfirmed_changes = []  # they are pieces of it
        self._correct_current(run_is_over=True)

    def _goes_on(self, drift: LevelChange) -> bool:
        """Return whether all unconfirmed changes may be pieces of ``drift``, in its direction."""
        for candidate in self._unconfirmed_changes:
            has_its_direction = candidate.change.direction == drift.direction
            if not has_its_direction or not candidate.change.may_hide_in(drift):
                return False
        return True

    def _merge_old_blocks(self) -> None:
        """Merge the older half of the blocks in pairs if there are many."""
        if len(self._blocks) <= _HISTORY:
            return
        half = _HISTORY // 2
        merged = []
        for index in range(0, half, 2):
            merged.append(merge_blocks(self._blocks[index], self._blocks[index + 1]))
        level_step = self._blocks[self._level_begin].first_step
        self._squared_differences = [
            *[math.nan] * len(merged),
            *self._squared_differences[half:],
        ]
        self._blocks = [*merged, *self._blocks[half:]]
        self._level_begin = self._index_of(level_step)

    def _index_of(self, step: int) -> int:
        """Return the index of the block that holds ``step``."""
        first_steps = [block.first_step for block in self._blocks]
        return max(bisect_right(first_steps, step) - 1, 0)

    # -- finding a change ----------------------------------------------------------------------------------------------

    def _inspect(self) -> None:
        """Look for a change of level in the last blocks, and correct the size of the last one."""
        onset = self._find_onset()
        blocks_of_level = len(self._blocks) - self._level_begin
        if onset is not None:
            self._begin_level(onset)
        elif blocks_of_level in _BLOCKS_AT_CORRECTION or self._current_drift():
            self._correct_current(run_is_over=False)
        if self._unconfirmed_changes and (
            self._has_lasted() or self._has_cost_enough()
        ):
            self._report_unconfirmed()

    def _find_onset(self) -> int | None:
        """Return the index of the first block of a new level; None if the level has not changed.

        The last 2, 3, … blocks are compared with the first blocks of the level.
        """
        logs = logs_of(self._blocks[self._level_begin :])
        is_first_level = self._level_begin == 0
        fewest = _FEWEST_AT_START if is_first_level else _FEWEST_AFTER_CHANGE
        most_blocks = min(_RECENT, len(logs) - fewest)
        if most_blocks < 2:
            return None
        noise, differences = self._noise(most_blocks)
        if noise is None:
            return None

        # one entry for each number of last blocks
        counts = np.arange(2, most_blocks + 1)
        reference_counts = np.minimum(_REFERENCE, len(logs) - counts)
        centers = self._centers(reference_counts)
        last_logs = logs[::-1][:most_blocks]
        sizes = winsorized_differences(last_logs, centers)
        errors = noise * np.sqrt(1.0 / counts + 1.0 / reference_counts)
        scores = np.abs(sizes) / errors
        # few differences estimate the noise (Student's t)
        scores *= math.sqrt(1.0 - 4.0 / (differences + 4.0))
        is_settling = len(self._blocks) <= _SETTLING
        smallest = self.smallest_change
        if is_settling:
            smallest = max(smallest, _SMALLEST_EARLY_CHANGE)
        scores[np.abs(sizes) < smallest] = 0.0

        best = int(scores.argmax())
        if scores[best] <= _THRESHOLD:
            return None
        onset = self._split(self._level_begin, float(centers[best]), float(sizes[best]))
        return onset if self._is_change_of_most_steps(onset) else None

    def _centers(self, reference_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the level by its first blocks, as many as each of ``reference_counts``.

        It is the mean of the middle half of their logarithms, so that a burst among them counts little.
        """
        fewest = int(reference_counts.min())
        most = int(reference_counts.max())
        blocks = self._blocks[self._level_begin : self._level_begin + most]
        centers = np.zeros(most + 1)  # by count
        logs: list[float] = []  # in their order
        for count, block in enumerate(blocks, 1):
            insort(logs, block.log_s)
            if count >= fewest:
                quarter = count // 4
                middle_logs = logs[quarter : count - quarter]
                centers[count] = sum(middle_logs) / len(middle_logs)
        return centers[reference_counts]

    def _noise(self, recent: int) -> tuple[float | None, int]:
        """Return the standard deviation of a block around its level, and from how many differences it is known."""
        end = len(self._blocks) - recent
        begin = max(end - _NOISE_BLOCKS, 0) + 1
        squares = np.array(self._squared_differences[begin:end])
        squares = squares[~np.isnan(squares)]
        if len(squares) < _FEWEST_DIFFERENCES:
            return None, 0
        variance = float(squares.mean()) / 2.0
        return max(math.sqrt(variance), FINEST), len(squares)

    def _split(self, begin: int, center: float, size: float) -> int:
        """Return the index of the block from which on the level is nearer to its new value than to ``center``.

        The level before began with the block ``begin``.
        """
        logs = logs_of(self._blocks[begin:])
        nearness = (logs - center - size / 2.0) * math.copysign(1.0, size)
        sums_to_end = np.cumsum(nearness[::-1])[::-1]
        onset = begin + int(sums_to_end.argmax())
        return min(max(onset, begin + 1), len(self._blocks) - 2)

    def _is_change_of_most_steps(self, onset: int) -> bool:
        """Return whether the median step changed too: otherwise there were only more slow steps than usual."""
        begin = max(self._level_begin, onset - _STEPS_COMPARED // BLOCK)
        begin_step = self._blocks[begin].first_step
        onset_step = self._blocks[onset].first_step
        last_step = self._blocks[-1].last_step
        _, seconds_before = self._recent.steps_between(begin_step, onset_step - 1)
        _, seconds_after = self._recent.steps_between(onset_step, last_step)
        if not len(seconds_before) or not len(seconds_after):
            return True
        log_before = np.mean(logs_of(self._blocks[begin:onset]))
        log_after = np.mean(logs_of(self._blocks[onset:]))
        size = float(log_after - log_before)
        median_before_s = float(np.median(seconds_before[:, -1]))
        median_after_s = float(np.median(seconds_after[:, -1]))
        size_of_median = math.log(median_after_s / median_before_s)
        size_in_direction = size_of_median * math.copysign(1.0, size)
        is_large = abs(size) >= SMALLEST_EFFECT
        return is_large and size_in_direction >= _SHARE_OF_MEDIAN * abs(size)

    # -- a new level ---------------------------------------------------------------------------------------------------

    def _begin_level(self, onset: int) -> None:
        """Begin a new level with the block ``onset``; take a short burst out if the level is back where it was."""
        self._end_level(self._blocks[self._level_begin : onset])
        blocks_before = self._blocks[self._level_begin : onset]
        blocks_after = self._blocks[onset:]
        step = self._exact_step(onset, blocks_before, blocks_after)
        change = LevelChange(
            since_step=step,
            before_s=mean_seconds(blocks_before),
            after_s=mean_seconds(_without_straddling(blocks_after, step)),
            found_step=self._blocks[-1].last_step,
            before_since_step=self._blocks[self._level_begin].first_step,
        )
        candidate = _UnconfirmedChange(
            change=change,
            begin_step=self._blocks[onset].first_step,
            is_part_of_line=make_line(blocks_before, blocks_after),
        )
        burst = self._burst_before(change)
        if burst is not None:
            self._take_out(burst, candidate.begin_step)
            return

        is_only_change = not self._unconfirmed_changes and not self._last_changes
        has_warmed_up = onset < _SETTLING and change.direction < 0 and is_only_change
        self._squared_differences[onset] = math.nan
        starts_within_block = self._blocks[onset].first_step < step
        has_straddling_block = starts_within_block and len(blocks_after) > 1
        self._level_begin = onset + 1 if has_straddling_block else onset
        self._squared_differences[self._level_begin] = math.nan
        if not has_warmed_up:
            self._unconfirmed_changes.append(candidate)

    def _exact_step(
        self,
        onset: int,
        blocks_before: Sequence[StepBlock],
        blocks_after: Sequence[StepBlock],
    ) -> int:
        """Return the step at which the level changed, from the steps around the block ``onset``."""
        first_block = max(onset - 2, onset - len(blocks_before))
        last_block = min(onset + 1, len(self._blocks) - 1)
        steps, seconds = self._recent.steps_between(
            self._blocks[first_block].first_step, self._blocks[last_block].last_step
        )
        if len(steps) < BLOCK:
            return self._blocks[onset].first_step

        # The parts that change most of all show it best.
        before_s = mean_seconds(blocks_before[-_REFERENCE:])
        after_s = mean_seconds(blocks_after[-_REFERENCE:])
        differences_s = after_s - before_s
        size_s = float(differences_s[-1])
        in_direction_s = differences_s[:-1] * np.sign(size_s)
        is_changed = in_direction_s >= _CHANGED_PART * abs(size_s)
        if not is_changed.any():
            is_changed = np.full(len(PARTS), True)
        low_s = before_s[:-1][is_changed].sum()
        high_s = after_s[:-1][is_changed].sum()
        changed_s = seconds[:, :-1][:, is_changed].sum(axis=1)

        # A step counts by how much nearer it is to the new level; single slow ones count no more than that level.
        clipped_s = np.clip(changed_s, min(low_s, high_s), max(low_s, high_s))
        nearness = (clipped_s - (low_s + high_s) / 2.0) * np.sign(high_s - low_s)
        sums = np.cumsum(nearness)
        last_index = int(sums.argmin())
        has_new_level_at_once = nearness[0] > 0 and sums.min() > 0
        if has_new_level_at_once:
            return int(steps[0])
        return int(steps[min(last_index + 1, len(steps) - 1)])

    def _burst_before(self, change: LevelChange) -> _UnconfirmedChange | None:
        """Return the unconfirmed change that ``change`` reverts, or None."""
        for candidate in self._unconfirmed_changes:
            if change.reverts(candidate.change):
                return candidate
        return None

    def _take_out(self, burst: _UnconfirmedChange, end_step: int) -> None:
        """Forget the steps from ``burst`` to the end of the block that begins with ``end_step``."""
        begin = self._index_of(burst.begin_step)
        end = self._index_of(end_step) + 1
        self._recent.remove(burst.begin_step, self._blocks[end - 1].last_step)
        del self._blocks[begin:end]
        del self._squared_differences[begin:end]
        if begin < len(self._squared_differences):
            self._squared_differences[begin] = math.nan
        self._level_begin = self._index_of(burst.change.before_since_step)
        del self._unconfirmed_changes[self._unconfirmed_changes.index(burst) :]

    # -- reporting a change --------------------------------------------------------------------------------------------

    def _has_lasted(self) -> bool:
        """Return whether the level since the last unconfirmed change is no short burst."""
        change = self._unconfirmed_changes[-1].change
        blocks_of_level = len(self._blocks) - self._level_begin
        fewest = _LASTING_IF_UNIFORM if change.is_uniform else _LASTING
        return blocks_of_level >= fewest

    def _has_cost_enough(self) -> bool:
        """Return whether the unconfirmed changes have cost enough, or saved enough, to be reported at once."""
        first = self._unconfirmed_changes[0]
        before_s = float(first.change.before_s[-1])
        cost_s = 0.0
        for block in self._blocks[self._index_of(first.begin_step) :]:
            cost_s += block.steps * (float(block.seconds[-1]) - before_s)
        if self._unconfirmed_changes[-1].change.is_uniform:
            cost_s /= _COST_RATIO_IF_UNIFORM
        least_s = max(_COST_SHARE * self._watched_s, _LEAST_COST_S)
        return abs(cost_s) >= min(least_s, _MOST_COST_S)

    def _report_unconfirmed(self) -> None:
        """Report the unconfirmed changes one after the other, unless the level is back where it was before them."""
        level = self._blocks[self._level_begin :]
        current_s = mean_seconds(middle_half(level[-_REFERENCE:]))
        for candidate in self._unconfirmed_changes:
            if candidate.change.is_undone_at(current_s):
                last_block = self._blocks[self._level_begin - 1]
                self._take_out(candidate, last_block.first_step)
                return
        confirmed_changes = self._unconfirmed_changes
        self._unconfirmed_changes = []
        confirmed_changes[-1].change.after_s = mean_seconds(middle_half(level))
        if len(confirmed_changes) == 1:
            self._correct_begin(confirmed_changes[0].change)
        for candidate in confirmed_changes:
            self._classify(candidate.change, candidate.is_part_of_line)

    def _correct_begin(self, change: LevelChange) -> None:
        """Correct where ``change`` began, now that its level is known from more blocks."""
        begin = self._index_of(change.before_since_step)
        log_before = math.log(change.before_s[-1])
        size = math.log(change.after_s[-1]) - log_before
        onset = self._split(begin, log_before, size)
        if onset == self._index_of(change.since_step):
            return
        blocks_before = self._blocks[begin:onset]
        change.since_step = self._exact_step(onset, blocks_before, self._blocks[onset:])
        change.before_s = mean_seconds(blocks_before)

    def _classify(self, change: LevelChange, is_part_of_line: bool) -> None:
        """Report ``change``, unless an earlier event stands for it."""
        earlier_changes = self._same_direction_changes
        if earlier_changes and earlier_changes[-1].direction != change.direction:
            earlier_changes = []
        self._same_direction_changes = [*earlier_changes, change]
        self._last_changes.append(change)
        if self._wanders(change):
            return
        if self._returns(change):
            return
        if self._continues_drift(change, is_part_of_line):
            return
        self.open_changes.append(change)
        self._reported_changes.append(change)
        self._changes_to_report.append(change)
        del self.open_changes[:-_MOST_OPEN_CHANGES]

    def _end_level(self, blocks: Sequence[StepBlock]) -> None:
        """Estimate the level that ends from all of its ``blocks``."""
        level_s = mean_seconds(blocks)
        if self._unconfirmed_changes:
            self._unconfirmed_changes[-1].change.after_s = level_s
            return
        if self._last_changes:
            self._last_changes[-1].after_s = level_s
        if self.open_changes:
            self._correct(self.open_changes[-1], level_s, run_is_over=False)

    def _correct_current(self, run_is_over: bool) -> None:
        """Estimate the size of the last open change anew."""
        level = self._blocks[self._level_begin :]
        if self.open_changes and level and not self._unconfirmed_changes:
            self._correct(self.open_changes[-1], mean_seconds(level), run_is_over)

    def _correct(
        self, change: LevelChange, level_s: Seconds, run_is_over: bool
    ) -> None:
        """Correct the size of ``change``, after which the level is ``level_s``; withdraw it if nothing is left."""
        is_drift = change.course == "drift"
        change.after_s = self._end_of_drift(change) if is_drift else level_s
        if change.is_negligible:
            self._withdraw([change])
            if self._last_changes and change is self._last_changes[-1]:
                # The level before goes on.
                self._level_begin = self._index_of(change.before_since_step)
            return
        if change.is_corrected or (run_is_over and is_drift):
            self._changes_to_report.append(change)

    def _withdraw(self, changes: Sequence[LevelChange]) -> None:
        """Withdraw ``changes``, because another one stands for them."""
        for change in changes:
            is_reported = change in self._changes_to_report or change.was_reported
            if is_reported and not change.is_withdrawn:
                self._changes_to_report.append(change)
            change.is_withdrawn = True
        self.open_changes = [
            change for change in self.open_changes if not change.is_withdrawn
        ]

    def _returns(self, change: LevelChange) -> bool:
        """Return whether ``change`` goes back to the level before a change that is open, which it closes."""
        for index in range(len(self.open_changes) - 1, -1, -1):
            if change.reverts(self.open_changes[index]):
                self._close_open_changes(index, change.since_step - 1)
                return True
        return False

    def _close_open_changes(self, index: int, last_step: int) -> None:
        """Close the open changes from ``index`` on."""
        closed = self.open_changes[index:]
        del self.open_changes[index:]
        for change in closed:
            if change.is_negligible:
                self._withdraw([change])
                continue
            change.until_step = last_step
            self._changes_to_report.append(change)

    # -- a level that wanders ------------------------------------------------------------------------------------------

    def _wanders(self, change: LevelChange) -> bool:
        """Return whether the level wanders, so that ``change`` is only counted."""
        if self._jumps_among_last_changes()[-1]:
            return False
        wandering = self._wandering
        if wandering is not None:
            is_in_range = self._is_in_range(change.after_s)
            if is_in_range and change.may_belong_to(wandering):
                self._count_wandering(wandering, change)
                return True

        changes = self._changes_since_jump()
        reversals = _count_reversals(changes)
        if reversals < _REVERSALS and not self._may_be_machine(changes):
            return False
        if self._follows_trend(changes[0].since_step):
            return False
        if wandering is None or not self._reach_range(changes):
            wandering = self._begin_wandering(changes)
        else:
            wandering.course = "wanders"
            wandering.times += len(changes)
            for wandering_change in changes:
                self._widen(wandering, wandering_change.after_s)
        self._withdraw(changes)
        self._withdraw_within_range(wandering)
        self._last_changes.clear()
        self._changes_to_report.append(wandering)
        return True

    def _may_be_machine(self, changes: Sequence[LevelChange]) -> bool:
        """Return whether ``changes`` are the machine, whose speed moves back and forth by a few percent.

        A first change that goes back as it came is an episode of its own.
        """
        if _count_reversals(changes) < _REVERSALS_OF_MACHINE:
            return False
        if not all(change.may_be_machine for change in changes):
            return False
        levels_s = _levels_around(changes)
        if self._wandering is not None:
            levels_s.extend(self._wandering_range_s)
        else:
            is_episode = any(
                changes[-1].reverts(open_change) for open_change in self.open_changes
            )
            if is_episode:
                return False
        return math.log(max(levels_s) / min(levels_s)) <= _WIDEST_RANGE_OF_MACHINE

    def _changes_since_jump(self) -> list[LevelChange]:
        """Return the last changes, since a jump far beyond them, or a jump from which the level has not come back.

        The latter is longer than the range of the levels on either side of it.
        """
        changes = list(self._last_changes)
        are_jumps = self._jumps_among_last_changes()
        if any(are_jumps):
            last_jump = len(changes) - 1 - are_jumps[::-1].index(True)
            changes = changes[last_jump + 1 :]
        logs = np.log(np.array(_levels_around(changes)))
        for place in range(len(logs) - 1, 0, -1):
            earlier = logs[:place]
            later = logs[place:]
            gap_up = later.min() - earlier.max()
            gap_down = earlier.min() - later.max()
            if max(gap_up, gap_down) > max(np.ptp(earlier), np.ptp(later)):
                return changes[place:]
        return changes

    def _jumps_among_last_changes(self) -> list[bool]:
        """Return for each of the last changes whether it is a jump: one or two that are far larger than all others.

        Example: a level wanders by a few percent, as machines do, and once goes up by half and back. That is an episode
        of two jumps, and no wandering.
        """
        sizes = [change.log_size for change in self._last_changes]
        if len(sizes) <= _FEWEST_BESIDE_JUMP:
            return [False] * len(sizes)
        are_jumps = []
        for place, size in enumerate(sizes):
            other_sizes = [*sizes[:place], *sizes[place + 1 :]]
            usual_size = float(np.median(other_sizes))
            least_jump = max(_JUMP_BESIDE_OTHERS * usual_size, _LEAST_JUMP)
            are_jumps.append(size >= least_jump)
        if sum(are_jumps) > _MOST_JUMPS:
            return [False] * len(sizes)
        return are_jumps

    def _reach_range(self, changes: Sequence[LevelChange]) -> bool:
        """Return whether the level still wanders about where it did, by the lowest or the highest of its levels."""
        by_level = sorted(changes, key=lambda change: change.after_s[-1])
        lowest_s = by_level[0].after_s
        highest_s = by_level[-1].after_s
        return self._is_in_range(lowest_s) or self._is_in_range(highest_s)

    def _begin_wandering(self, changes: Sequence[LevelChange]) -> LevelChange:
        """Return what stands for ``changes`` from now on."""
        lowest = min(changes, key=lambda change: change.after_s[-1])
        highest = max(changes, key=lambda change: change.after_s[-1])
        wandering = LevelChange(
            since_step=changes[0].since_step,
            before_s=lowest.after_s,
            after_s=highest.after_s,
            found_step=changes[-1].found_step,
            before_since_step=changes[0].before_since_step,
            course="alternates"
            if are_two_levels(_levels_around(changes))
            else "wanders",
            times=len(changes),
        )
        self._wandering = wandering
        self._reported_changes.append(wandering)
        self._wandering_range_s = _range_of(wandering)
        return wandering

    def _widen(self, wandering: LevelChange, level_s: Seconds) -> None:
        """Widen the range in which the level wanders by a level that is beyond it."""
        if level_s[-1] < wandering.before_s[-1]:
            wandering.before_s = level_s
        if level_s[-1] > wandering.after_s[-1]:
            wandering.after_s = level_s
        self._wandering_range_s = _range_of(wandering)

    def _withdraw_within_range(self, wandering: LevelChange) -> None:
        """Withdraw the earlier changes between levels that are within the range in which the level wanders."""
        within_range = []
        for change in self._reported_changes:
            is_other = change is not wandering
            begins_in_range = self._is_in_range(change.before_s)
            if is_other and begins_in_range and self._is_in_range(change.after_s):
                within_range.append(change)
        for change in within_range:
            wandering.since_step = min(wandering.since_step, change.since_step)
            if change.course in ("wanders", "alternates"):
                wandering.times += change.times
            self._reported_changes.remove(change)
        self._withdraw(within_range)

    def _is_in_range(self, level_s: Seconds) -> bool:
        """Return whether a level is within the range in which the level wanders, or half of it beyond."""
        low_s, high_s = self._wandering_range_s
        margin = math.sqrt(high_s / low_s)
        return bool(low_s / margin <= level_s[-1] <= high_s * margin)

    def _count_wandering(self, wandering: LevelChange, change: LevelChange) -> None:
        """Count ``change`` as one of ``wandering``, which stands for it."""
        wandering.times += 1
        self._close_changes_since(wandering, last_step=change.since_step - 1)
        if wandering.course == "wanders":
            self._widen(wandering, change.after_s)
            self._withdraw_within_range(wandering)
        self._report_wandering_again(wandering)

    def _close_changes_since(self, wandering: LevelChange, last_step: int) -> None:
        """Close the open changes that are not older than ``wandering``."""
        first_newer_index = 0  # the oldest changes come first
        for open_change in self.open_changes:
            if open_change.since_step < wandering.since_step:
                first_newer_index += 1
        self._close_open_changes(first_newer_index, last_step)

    def _report_wandering_again(self, wandering: LevelChange) -> None:
        """Report ``wandering`` at 1, 2, 4, … changes; while it has few, also if its range has widened."""
        is_power_of_two = wandering.times.bit_count() == 1
        has_few_changes = wandering.times < _REPORTED_EVERY_TIME
        if is_power_of_two or (wandering.is_corrected and has_few_changes):
            self._changes_to_report.append(wandering)

    def _follows_trend(self, since_step: int) -> bool:
        """Return whether the level rises or falls all the time since ``since_step``, or since a drift began."""
        drift = self._current_drift()
        if drift is not None:
            since_step = min(since_step, drift.since_step)
        blocks = self._blocks[self._index_of(since_step) :]
        if len(blocks) < _TREND_GROUPS:
            return False
        groups = np.array_split(logs_of(blocks), _TREND_GROUPS)
        medians = np.array([float(np.median(group)) for group in groups])
        return abs(rank_correlation(medians)) >= _TREND

    # -- a drift -------------------------------------------------------------------------------------------------------

    def _current_drift(self) -> LevelChange | None:
        """Return the last open change if it is a drift."""
        if not self.open_changes or self.open_changes[-1].course != "drift":
            return None
        return self.open_changes[-1]

    def _continues_drift(self, change: LevelChange, is_line: bool) -> bool:
        """Return whether ``change`` is a piece of a drift of earlier changes, one of which then stands for it."""
        is_small_piece = False
        drift = self._current_drift()
        if drift is not None and change.may_hide_in(drift):
            size = abs(change.size_s)
            if drift.direction != change.direction:
                is_piece = size <= _SMALL_AGAINST_DRIFT * abs(drift.size_s)
                if is_piece:
                    self._correct_current(run_is_over=False)
                return is_piece
            is_small_piece = size <= _SMALL_BESIDE_DRIFT * abs(drift.size_s)

        rises_gradually = self._rises_gradually()
        has_many_stairs = rises_gradually or len(self._same_direction_changes) > _STAIRS
        if not is_line and not has_many_stairs and not is_small_piece:
            return False
        begin = self._begin_of_drift(change, has_many_stairs)
        if begin is None:
            change.course = "drift"
            change.is_gradual = True
            self._correct_begin_of_drift(change)
            return False
        self._extend_drift(begin, is_gradual=is_line or rises_gradually)
        return True

    def _extend_drift(self, drift: LevelChange, is_gradual: bool) -> None:
        """Let ``drift`` stand for the open changes after it, and for one more."""
        is_new_drift = drift.course != "drift"
        pieces = self.open_changes[self.open_changes.index(drift) + 1 :]
        self._withdraw(pieces)
        drift.course = "drift"
        drift.after_s = self._end_of_drift(drift)
        drift.times += 1 + len(pieces)
        if is_new_drift:
            drift.is_gradual = is_gradual
        is_begin_due = is_new_drift or drift.times in _CHANGES_AT_CORRECTION
        if drift.is_gradual and is_begin_due:
            self._correct_begin_of_drift(drift)
        if is_new_drift or drift.is_corrected:
            self._changes_to_report.append(drift)

    def _rises_gradually(self) -> bool:
        """Return whether the last changes in one direction are no stairs: at none of them the level jumps."""
        changes = self._same_direction_changes
        if len(changes) < _FEWEST_OF_GRADUAL_RISE:
            return False
        jumps = 0.0
        for change in changes:
            place = self._index_of(change.since_step)
            begin = max(place - _BLOCKS_BESIDE_JUMP, 0)
            end = place + 1 + _BLOCKS_BESIDE_JUMP
            logs_before = logs_of(self._blocks[begin:place])
            logs_after = logs_of(self._blocks[place + 1 : end])
            if logs_before.size and logs_after.size:
                jumps += float(np.median(logs_after) - np.median(logs_before))
        rise = math.log(changes[-1].after_s[-1] / changes[0].before_s[-1])
        return abs(jumps) < _SHARE_OF_JUMPS * abs(rise)

    def _begin_of_drift(
        self, change: LevelChange, has_many_stairs: bool
    ) -> LevelChange | None:
        """Return the open change with which the drift began that ``change`` belongs to; None if that is ``change``.

        The changes of a drift follow each other ever faster or about as fast; stairs may be of any length.
        """
        begin = None
        next_step = change.since_step
        interval = None
        for earlier in reversed(self.open_changes):
            if earlier.direction != change.direction:
                break
            if earlier.course == "drift":
                return earlier
            rise_after_s = abs(float(change.after_s[-1] - earlier.after_s[-1]))
            if abs(earlier.size_s) > _JUMP_BEFORE_DRIFT * rise_after_s:
                break
            steps = max(next_step - earlier.since_step, BLOCK)
            is_slower = interval is not None and steps > _DRIFT_SLOWER * interval
            if is_slower and not has_many_stairs:
                break
            begin = earlier
            interval = steps
            next_step = earlier.since_step
        return begin

    def _correct_begin_of_drift(self, drift: LevelChange) -> None:
        """Correct where a drift began: where a constant becomes a line, over the blocks since the level before."""
        blocks = self._blocks[self._index_of(drift.before_since_step) :]
        knee = knee_of(blocks)
        drift.since_step = blocks[knee].first_step
        blocks_before = max(knee, len(blocks) // 8, _FEWEST_BEFORE_DRIFT)
        level_before = blocks[: min(blocks_before, _REFERENCE)]
        drift.before_s = mean_seconds(middle_half(level_before))

    def _end_of_drift(self, drift: LevelChange) -> Seconds:
        """Return the current level of a drift, by part."""
        blocks = self._blocks[self._index_of(drift.since_step) :]
        return end_of_line(blocks[-_BLOCKS_AT_END:])


def _range_of(wandering: LevelChange) -> tuple[float, float]:
    """Return the lowest and the highest seconds of the step between which a level wanders."""
    return float(wandering.before_s[-1]), float(wandering.after_s[-1])


def _count_reversals(changes: Sequence[LevelChange]) -> int:
    """Return how often successive changes go in opposite directions."""
    reversals = 0
    for earlier, later in pairwise(changes):
        if earlier.direction != later.direction:
            reversals += 1
    return reversals


def _levels_around(changes: Sequence[LevelChange]) -> list[float]:
    """Return the seconds of a step before successive changes, and after each of them."""
    levels_s = []
    if changes:
        levels_s.append(float(changes[0].before_s[-1]))
    for change in changes:
        levels_s.append(float(change.after_s[-1]))
    return levels_s


def _without_straddling(blocks: Sequence[StepBlock], step: int) -> Sequence[StepBlock]:
    """Return the blocks that lie after ``step`` as a whole, or all if there are none."""
    later_blocks = [block for block in blocks if block.first_step >= step]
    return later_blocks or blocks

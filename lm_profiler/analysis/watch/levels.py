"""Follows the level of a running training's steps, and finds changes, drifts, and levels that wander or alternate.

New steps are compared with the first blocks of the present level. This reference stays fixed until a change is found,
so that a slow drift adds up and is found too. A change is found by a generalised likelihood ratio test over blocks of
steps (Lorden 1971, Annals of Mathematical Statistics 42:1897; Siegmund & Venkatraman 1995, Annals of Statistics
23:255). The noise of a block is estimated from the differences of successive blocks, which a drift does not inflate.

A change goes through these stages: ``_find_onset`` finds it, it waits as unconfirmed until it has lasted or has cost
enough (a short burst is removed instead), and ``_classify`` reports it, or merges it into an earlier event.
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

from lm_profiler.analysis.steps.statistics import LEAST_NOISE, rank_correlation
from lm_profiler.analysis.steps.step_model import SMALLEST_EFFECT
from lm_profiler.analysis.watch.level_change import Course, LevelChange
from lm_profiler.analysis.watch.reported_changes import ReportedChanges
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
    fit_line_better,
    knee_of,
    logs_of,
    mean_seconds,
    merge_blocks,
    middle_half,
    winsorized_differences,
)
from lm_profiler.record.parts import PARTS

# -- finding a change
# (sizes of changes are differences of the logarithm of the step time)
_REFERENCE = 25  # the first blocks of a level, from which it is estimated
# blocks that this estimate must have before changes are searched for
_FEWEST_AT_START = 5
_FEWEST_AFTER_CHANGE = 2
# In its first blocks a run warms up: it may become faster, and only large changes are reported.
_SETTLING = 35
_SMALLEST_EARLY_CHANGE = 0.1
SMALLEST_CHANGE = 0.015  # the speed of machines varies by one percent
# A change must exceed this many standard errors. In simulations (see the tests) there is less than one false alarm in
# 10^6 steps, even with AR(1) noise of 0.6 and with Student's t of three degrees of freedom.
_THRESHOLD = 6.0
_RECENT = 50  # the last blocks, in which a change is searched for: 1,000 steps
_BLOCKS_BEFORE_RECENT = 4  # in these, too, the first step of a level is searched for
_NOISE_BLOCKS = 200  # blocks from which the noise is estimated
_FEWEST_DIFFERENCES = 3  # of successive blocks, to estimate the noise
# blocks in memory; beyond that, blocks of the older half are merged in pairs
_HISTORY = 800
_STEPS_COMPARED = 400  # steps before a change whose median is compared with that of the steps after it
# the median step must change by at least this share of the change of the mean
_SHARE_OF_MEDIAN = 0.3
# A part with at least this share of a change is used to find the exact step.
_CHANGED_PART = 0.25

# -- when a change is reported
# It has lasted for this many blocks, or has cost this share of the time watched so far (within limits in seconds).
# A uniform change, which affects all phases alike, is mostly due to the machine and must last longer or cost more.
_LASTING = 10
_LASTING_IF_UNIFORM = 20
_COST_SHARE = 5e-3
_LEAST_COST_S = 0.05
_MOST_COST_S = 5.0
_COST_RATIO_IF_UNIFORM = 5.0
# numbers of blocks after a change at which its size is estimated again
_BLOCKS_AT_CORRECTION = (5, 10, 25, 50, 100, 200, 400)
# After so many new blocks, and after the last block of a call, a change is searched for. The search costs the watch's
# thread more than all else that it does with a block.
_BLOCKS_PER_SEARCH = 5

# -- a level that wanders: it has reversed its direction this many times within the last changes
_REVERSALS = 4
_CHANGES_REMEMBERED = 7
# A jump, a change this many times as large as the other changes usually are, does not count as wandering.
_JUMP_BESIDE_OTHERS = 3.0
_LEAST_JUMP = 0.2
_FEWEST_BESIDE_JUMP = 3  # other changes from which the usual size is known
_MOST_JUMPS = 2  # with more jumps, the level alternates
# The same for small changes of several parts, because the speed of real machines varies by a few percent.
_REVERSALS_OF_MACHINE = 1
_WIDEST_RANGE_OF_MACHINE = 0.2
# A level ends for good if it was this many times as long as so many levels after it are on average, and they all are
# at least this far from it (in logarithms).
_LONG_LEVEL = 10.0
_FEWEST_AFTER_LONG_LEVEL = 3
_LEAST_DISTANCE = 0.03
# Up to this many changes, wandering is reported again whenever its range widens; then only when their number doubles.
_REPORTED_EVERY_TIME = 100
_TREND = 0.7  # with this rank correlation (Kendall's) of level and time, the level follows a trend
_TREND_GROUPS = 20  # groups of blocks whose medians are correlated with time

# -- a drift
_STAIRS = 8  # up to this many successive changes in one direction are reported one by one; more are a drift
# this many successive changes in one direction are a drift if the level rises without jumps
_FEWEST_OF_GRADUAL_RISE = 3
# blocks on either side of a change whose medians show whether it is a jump
_BLOCKS_BESIDE_JUMP = 10
_SHARE_OF_JUMPS = 0.5  # a rise is gradual if jumps make up less than this share of it
# numbers of changes of a drift at which its beginning is estimated again
_CHANGES_AT_CORRECTION = (4, 8)
_FEWEST_BEFORE_DRIFT = 10  # blocks from which the level before a drift is estimated
# A change this many times as large as all later changes together is not part of the drift that follows it.
_JUMP_BEFORE_DRIFT = 3.0
# The interval between changes of a drift is at most this many times as long as the next interval.
_DRIFT_SLOWER = 4.0
_BLOCKS_AT_END = 50  # the last blocks of a drift, through which a line is fitted to find its current level
# a change up to these shares of a drift's size is part of the drift, in its direction and against it
_SMALL_BESIDE_DRIFT = 0.5
_SMALL_AGAINST_DRIFT = 0.25


class _UnconfirmedChange(NamedTuple):
    """A change that may still turn out to be a short burst."""

    change: LevelChange
    begin_step: int  # the first step of the first block of the new level
    # whether a line fits the blocks before and after better than two levels
    is_part_of_line: bool


class LevelFollower:
    """Receives the steps of a run as they arrive, and keeps the changes of their level.

    ``take_changed`` returns the changes that are new or were corrected. ``is_worth_reporting`` decides which to hide.
    """

    def __init__(
        self, is_worth_reporting: Callable[[LevelChange], bool] = lambda change: True
    ) -> None:
        # smaller changes are ignored (in logarithms); the caller may set it
        self.smallest_change = SMALLEST_CHANGE
        self._unfinished = UnfinishedBlock()
        self._recent = RecentSteps()
        self._blocks: list[StepBlock] = []
        # index of the first block of the current level
        self._level_begin = 0
        # for each block, the squared difference of its logarithm from that of the block before; NaN at a new level
        self._squared_differences: list[float] = []
        self._watched_s = 0.0
        # the number of blocks of the current level at the last search
        self._blocks_at_search = 0

        # changes after the last confirmed one; each may still turn out to be a short burst
        self._unconfirmed_changes: list[_UnconfirmedChange] = []
        # the last confirmed changes since the level wandered, with those that were merged into a drift
        self._confirmed_changes: deque[LevelChange] = deque(maxlen=_CHANGES_REMEMBERED)
        # the last successive confirmed changes in one direction
        self._same_direction_changes: list[LevelChange] = []
        # the event into which the changes of a wandering level are merged: it goes from its lowest to its highest level
        self._wandering: LevelChange | None = None
        self._reported = ReportedChanges(is_worth_reporting)

    @property
    def level_s(self) -> float | None:
        """The current level of the step in seconds; None before it is known."""
        if not self._blocks:
            return None
        last_blocks = self._blocks[-_REFERENCE:]
        return float(np.mean([block.seconds[-1] for block in last_blocks]))

    def add(self, steps: StepNumbers, seconds: Seconds) -> None:
        """Add the next n steps: their numbers, and (n, TIMED) seconds of the parts and (last) of the whole step."""
        steps, seconds = self._unfinished.fill(steps, seconds)
        if len(steps) == 0:
            return
        most_steps = (_RECENT + _BLOCKS_BEFORE_RECENT) * BLOCK + len(steps)
        self._recent.add(steps, seconds, most_steps)
        blocks = cut_into_blocks(steps, seconds)
        for count, block in enumerate(blocks, 1):
            previous_log = self._blocks[-1].log_s if self._blocks else math.nan
            self._squared_differences.append((block.log_s - previous_log) ** 2)
            self._blocks.append(block)
            self._watched_s += block.steps * float(block.seconds[-1])
            if count % _BLOCKS_PER_SEARCH == 0 or count == len(blocks):
                self._search_for_change()
        self._merge_old_blocks()

    def forget_unfinished(self) -> None:
        """Forget the steps of the unfinished block: the steps that follow them are missing."""
        self._unfinished.forget()

    def take_changed(self) -> list[LevelChange]:
        """Return the changes that are new, or that were corrected, since the last call.

        Changes that are not worth reporting are kept, because they may become so when they are corrected.
        """
        return self._reported.take_changed()

    def finish(self) -> None:
        """At the end of the run, report unconfirmed changes that have cost enough, and correct the last change."""
        if self._unconfirmed_changes and self._has_cost_enough():
            self._report_unconfirmed()
        drift = self._current_drift()
        if drift is not None and self._are_unconfirmed_part_of(drift):
            self._unconfirmed_changes = []  # the correction of the drift includes them
        self._correct_current(run_is_over=True)

    def _are_unconfirmed_part_of(self, drift: LevelChange) -> bool:
        """Return whether all unconfirmed changes may be pieces of ``drift``, and go in the direction of ``drift``."""
        for candidate in self._unconfirmed_changes:
            is_same_direction = candidate.change.direction == drift.direction
            if not is_same_direction or not candidate.change.may_hide_in(drift):
                return False
        return True

    def _merge_old_blocks(self) -> None:
        """Merge blocks of the older half in pairs if there are more than ``_HISTORY``."""
        if len(self._blocks) <= _HISTORY:
            return
        half = _HISTORY // 2
        merged = []
        for index in range(0, half, 2):
            merged.append(merge_blocks(self._blocks[index], self._blocks[index + 1]))
        level_step = self._blocks[self._level_begin].first_step
        # differences of merged blocks would have less noise
        unknown_differences = [math.nan] * len(merged)
        later_differences = self._squared_differences[half:]
        self._squared_differences = unknown_differences + later_differences
        self._blocks = merged + self._blocks[half:]
        self._level_begin = self._index_of(level_step)

    def _index_of(self, step: int) -> int:
        """Return the index of the block that holds ``step``."""
        first_steps = [block.first_step for block in self._blocks]
        return max(bisect_right(first_steps, step) - 1, 0)

    # -- finding a change ----------------------------------------------------------------------------------------------

    def _search_for_change(self) -> None:
        """Search for a change of level in the last blocks; otherwise correct the size of the last change."""
        onset = self._find_onset()
        if onset is not None:
            self._begin_level(onset)
        elif self._is_correction_due() or self._current_drift():
            self._correct_current(run_is_over=False)
        self._blocks_at_search = len(self._blocks) - self._level_begin
        if self._unconfirmed_changes and (
            self._has_lasted() or self._has_cost_enough()
        ):
            self._report_unconfirmed()

    def _is_correction_due(self) -> bool:
        """Return whether the level has reached one of ``_BLOCKS_AT_CORRECTION`` since the last search."""
        blocks_of_level = len(self._blocks) - self._level_begin
        return any(
            self._blocks_at_search < blocks <= blocks_of_level
            for blocks in _BLOCKS_AT_CORRECTION
        )

    def _find_onset(self) -> int | None:
        """Return the index of the first block of a new level; None if the level has not changed.

        The mean of the last 2, 3, … blocks is compared with the first blocks of the level. The comparison with the most
        standard errors counts.
        """
        blocks_of_level = len(self._blocks) - self._level_begin
        is_first_level = self._level_begin == 0
        fewest = _FEWEST_AT_START if is_first_level else _FEWEST_AFTER_CHANGE
        most_blocks = min(_RECENT, blocks_of_level - fewest)
        if most_blocks < 2:
            return None
        noise, difference_count = self._std_of_block(most_blocks)
        if noise is None:
            return None

        # The arrays have one entry for each number of last blocks: 2, 3, …
        counts = np.arange(2, most_blocks + 1)
        reference_counts = np.minimum(_REFERENCE, blocks_of_level - counts)
        references = self._estimated_levels(reference_counts)
        last_logs = logs_of(self._blocks[-most_blocks:])[::-1]  # the last block first
        sizes = winsorized_differences(last_logs, references)
        standard_errors = noise * np.sqrt(1.0 / counts + 1.0 / reference_counts)
        scores = np.abs(sizes) / standard_errors
        # less certain if the noise is estimated from few differences (as with Student's t)
        scores *= math.sqrt(1.0 - 4.0 / (difference_count + 4.0))
        scores[np.abs(sizes) < self._smallest_change_now()] = 0.0

        best = int(scores.argmax())
        if scores[best] <= _THRESHOLD:
            return None
        old_level = float(references[best])
        onset = self._likeliest_onset(
            self._level_begin, old_level, size=float(sizes[best])
        )
        return onset if self._is_change_of_most_steps(onset) else None

    def _smallest_change_now(self) -> float:
        """Return the smallest change (in logarithms) that counts; it is larger while the run warms up."""
        is_warming_up = len(self._blocks) <= _SETTLING
        if is_warming_up:
            return max(self.smallest_change, _SMALLEST_EARLY_CHANGE)
        return self.smallest_change

    def _estimated_levels(
        self, reference_counts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the level estimated from its first n blocks, for each n of ``reference_counts``.

        The estimate is the mean of the middle half of their logarithms, so that a short burst has little effect.
        """
        fewest = int(reference_counts.min())
        most = int(reference_counts.max())
        blocks = self._blocks[self._level_begin : self._level_begin + most]
        levels = np.zeros(most + 1)  # index: the number of blocks
        sorted_logs: list[float] = []
        for count, block in enumerate(blocks, 1):
            insort(sorted_logs, block.log_s)
            if count >= fewest:
                quarter = count // 4
                middle_logs = sorted_logs[quarter : count - quarter]
                levels[count] = sum(middle_logs) / len(middle_logs)
        return levels[reference_counts]

    def _std_of_block(self, recent: int) -> tuple[float | None, int]:
        """Return the standard deviation of a block, and the number of differences from which it was estimated.

        The last ``recent`` blocks, in which the level may have changed, are left out. None if there are too few others.
        """
        end = len(self._blocks) - recent
        # one later than the first block, because a difference is that from the block before
        begin = max(end - _NOISE_BLOCKS, 0) + 1
        squares = np.array(self._squared_differences[begin:end])
        # NaN at a new level, and for merged blocks
        squares = squares[~np.isnan(squares)]
        if len(squares) < _FEWEST_DIFFERENCES:
            return None, 0
        # The variance of a difference is twice that of a block.
        variance = float(squares.mean()) / 2.0
        return max(math.sqrt(variance), LEAST_NOISE), len(squares)

    def _likeliest_onset(self, begin: int, old_level: float, size: float) -> int:
        """Return the index of the most likely first block of a new level, which differs by ``size`` from ``old_level``.

        Both are logarithms. The old level began with the block ``begin``.
        """
        logs = logs_of(self._blocks[begin:])
        # positive for blocks that are nearer to the new level than to the old one
        direction = math.copysign(1.0, size)
        middle = old_level + size / 2.0
        nearness = (logs - middle) * direction
        # for each block, the sum from it to the last one; it is largest at the first block of the new level
        sums_to_end = np.cumsum(nearness[::-1])[::-1]
        onset = begin + int(sums_to_end.argmax())
        # at least one block of the old level, and two of the new one
        first_possible = begin + 1
        last_possible = len(self._blocks) - 2
        return min(max(onset, first_possible), last_possible)

    def _is_change_of_most_steps(self, onset: int) -> bool:
        """Return whether the median step changed too. If only the mean did, a few steps became very slow."""
        begin = max(self._level_begin, onset - _STEPS_COMPARED // BLOCK)
        begin_step = self._blocks[begin].first_step
        onset_step = self._blocks[onset].first_step
        last_step = self._blocks[-1].last_step
        # (steps, TIMED) each
        _, seconds_before = self._recent.steps_between(begin_step, onset_step - 1)
        _, seconds_after = self._recent.steps_between(onset_step, last_step)
        if not len(seconds_before) or not len(seconds_after):
            # The individual steps are no longer in memory.
            return True
        log_before = np.mean(logs_of(self._blocks[begin:onset]))
        log_after = np.mean(logs_of(self._blocks[onset:]))
        change_of_mean = float(log_after - log_before)
        if abs(change_of_mean) < SMALLEST_EFFECT:
            return False
        # The last column is the whole step.
        median_before_s = float(np.median(seconds_before[:, -1]))
        median_after_s = float(np.median(seconds_after[:, -1]))
        change_of_median = math.log(median_after_s / median_before_s)
        change_in_direction = change_of_median * math.copysign(1.0, change_of_mean)
        return change_in_direction >= _SHARE_OF_MEDIAN * abs(change_of_mean)

    # -- a new level ---------------------------------------------------------------------------------------------------

    def _begin_level(self, onset: int) -> None:
        """Begin a new level with the block ``onset``.

        If it reverts an unconfirmed change, that was a short burst: its blocks are removed, and no level begins.
        """
        # this may withdraw the last change: the level then began earlier
        self._end_level(self._blocks[self._level_begin : onset])
        blocks_before = self._blocks[self._level_begin : onset]
        blocks_after = self._blocks[onset:]
        step = self._first_step_of_level(onset, blocks_before, blocks_after)
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
            is_part_of_line=fit_line_better(blocks_before, blocks_after),
        )
        burst = self._unconfirmed_change_undone_by(change)
        if burst is not None:
            self._remove_burst(burst, last_index=onset)
            return

        # a block that holds steps of both levels belongs to neither
        starts_within_block = self._blocks[onset].first_step < step
        has_straddling_block = starts_within_block and len(blocks_after) > 1
        self._level_begin = onset + 1 if has_straddling_block else onset
        # Differences across the change are not noise.
        self._squared_differences[onset] = math.nan
        self._squared_differences[self._level_begin] = math.nan
        # a run that only becomes faster at its beginning has warmed up, which is no event
        is_only_change = not self._unconfirmed_changes and not self._confirmed_changes
        has_warmed_up = onset < _SETTLING and change.direction < 0 and is_only_change
        if not has_warmed_up:
            self._unconfirmed_changes.append(candidate)

    def _first_step_of_level(
        self,
        onset: int,
        blocks_before: Sequence[StepBlock],
        blocks_after: Sequence[StepBlock],
    ) -> int:
        """Return the first step of the new level, found among the individual steps around the block ``onset``."""
        # from two blocks before the onset to one after it, as far as they exist
        first_block = max(onset - 2, onset - len(blocks_before))
        last_block = min(onset + 1, len(self._blocks) - 1)
        steps, seconds = self._recent.steps_between(
            self._blocks[first_block].first_step, self._blocks[last_block].last_step
        )
        if len(steps) < BLOCK:
            return self._blocks[onset].first_step

        # Only the parts that changed much are considered, because they show the change most clearly.
        before_s = mean_seconds(blocks_before[-_REFERENCE:])
        after_s = mean_seconds(blocks_after[-_REFERENCE:])
        is_changed = _changed_parts(before_s, after_s)
        # the last entry (or column) is the whole step
        old_level_s = before_s[:-1][is_changed].sum()
        new_level_s = after_s[:-1][is_changed].sum()
        step_s = seconds[:, :-1][:, is_changed].sum(axis=1)

        # (steps,) positive for steps nearer to the new level. Clipping limits the weight of a single slow step.
        lowest_s = min(old_level_s, new_level_s)
        highest_s = max(old_level_s, new_level_s)
        middle_s = (old_level_s + new_level_s) / 2.0
        direction = np.sign(new_level_s - old_level_s)
        nearness = (np.clip(step_s, lowest_s, highest_s) - middle_s) * direction
        # The sum is least at the last step of the old level.
        sums = np.cumsum(nearness)
        last_of_old_level = int(sums.argmin())
        has_new_level_at_once = nearness[0] > 0 and sums.min() > 0
        if has_new_level_at_once:
            return int(steps[0])
        return int(steps[min(last_of_old_level + 1, len(steps) - 1)])

    def _unconfirmed_change_undone_by(
        self, change: LevelChange
    ) -> _UnconfirmedChange | None:
        """Return the unconfirmed change that ``change`` reverts, or None."""
        for candidate in self._unconfirmed_changes:
            if change.reverts(candidate.change):
                return candidate
        return None

    def _remove_burst(self, burst: _UnconfirmedChange, last_index: int) -> None:
        """Remove the blocks from the begin of ``burst`` to the block ``last_index``, and their steps.

        The level before the burst then goes on. The unconfirmed changes after the burst are dropped too.
        """
        begin = self._index_of(burst.begin_step)
        end = last_index + 1
        self._recent.remove(burst.begin_step, self._blocks[end - 1].last_step)
        del self._blocks[begin:end]
        del self._squared_differences[begin:end]
        if begin < len(self._squared_differences):
            # the difference from a block that is gone
            self._squared_differences[begin] = math.nan
        self._level_begin = self._index_of(burst.change.before_since_step)
        del self._unconfirmed_changes[self._unconfirmed_changes.index(burst) :]

    # -- reporting a change --------------------------------------------------------------------------------------------

    def _has_lasted(self) -> bool:
        """Return whether the level after the last unconfirmed change has lasted too long for a burst."""
        change = self._unconfirmed_changes[-1].change
        blocks_of_level = len(self._blocks) - self._level_begin
        fewest = _LASTING_IF_UNIFORM if change.is_uniform else _LASTING
        return blocks_of_level >= fewest

    def _has_cost_enough(self) -> bool:
        """Return whether the unconfirmed changes have cost (or saved) enough time to be reported at once."""
        first = self._unconfirmed_changes[0]
        before_s = float(first.change.before_s[-1])
        cost_s = 0.0
        for block in self._blocks[self._index_of(first.begin_step) :]:
            cost_s += block.steps * (float(block.seconds[-1]) - before_s)
        if self._unconfirmed_changes[-1].change.is_uniform:
            # A uniform change must cost more, so its cost is compared with the same limits after a division.
            cost_s /= _COST_RATIO_IF_UNIFORM
        least_s = max(_COST_SHARE * self._watched_s, _LEAST_COST_S)
        return abs(cost_s) >= min(least_s, _MOST_COST_S)

    def _report_unconfirmed(self) -> None:
        """Report the unconfirmed changes one after the other.

        If the level has come back to that before one of them, that was a short burst, which is removed instead.
        """
        level = self._blocks[self._level_begin :]
        current_s = mean_seconds(middle_half(level[-_REFERENCE:]))
        for candidate in self._unconfirmed_changes:
            if candidate.change.is_undone_at(current_s):
                self._remove_burst(candidate, last_index=self._level_begin - 1)
                return
        confirmed_changes = self._unconfirmed_changes
        self._unconfirmed_changes = []
        confirmed_changes[-1].change.after_s = mean_seconds(middle_half(level))
        if len(confirmed_changes) == 1:
            self._correct_begin(confirmed_changes[0].change)
        for candidate in confirmed_changes:
            self._classify(candidate.change, candidate.is_part_of_line)

    def _correct_begin(self, change: LevelChange) -> None:
        """Find the first step of ``change`` again, now that its level is known from more blocks."""
        begin = self._index_of(change.before_since_step)
        log_before = math.log(change.before_s[-1])
        size = math.log(change.after_s[-1]) - log_before
        onset = self._likeliest_onset(begin, log_before, size)
        if onset == self._index_of(change.since_step):
            return
        blocks_before = self._blocks[begin:onset]
        change.since_step = self._first_step_of_level(
            onset, blocks_before, self._blocks[onset:]
        )
        change.before_s = mean_seconds(blocks_before)

    def _classify(self, change: LevelChange, is_part_of_line: bool) -> None:
        """Report ``change``, which is now confirmed, as a new event, unless it is part of an earlier one.

        It may belong to a wandering level, undo an open change, or be a piece of a drift.
        """
        earlier_changes = self._same_direction_changes
        if earlier_changes and earlier_changes[-1].direction != change.direction:
            earlier_changes = []
        self._same_direction_changes = [*earlier_changes, change]
        self._confirmed_changes.append(change)
        if self._merge_into_wandering(change):
            return
        if self._reported.close_undone_by(change):
            return
        if self._merge_into_drift(change, is_part_of_line):
            return
        self._reported.open(change)

    def _end_level(self, blocks: Sequence[StepBlock]) -> None:
        """Correct the change after which the level that has just ended began, from all ``blocks`` of that level.

        It is the last unconfirmed change, if there is one. Otherwise it is the last confirmed change, and the last open
        change too: a drift, for example, into which the confirmed change was merged.
        """
        level_s = mean_seconds(blocks)
        if self._unconfirmed_changes:
            self._unconfirmed_changes[-1].change.after_s = level_s
            return
        if self._confirmed_changes:
            self._confirmed_changes[-1].after_s = level_s
        last_open = self._reported.last_open
        if last_open is not None:
            self._correct(last_open, level_s, run_is_over=False)

    def _correct_current(self, run_is_over: bool) -> None:
        """Estimate the size of the last open change again from the current level, unless a change is unconfirmed."""
        level = self._blocks[self._level_begin :]
        last_open = self._reported.last_open
        if last_open is not None and level and not self._unconfirmed_changes:
            self._correct(last_open, mean_seconds(level), run_is_over)

    def _correct(
        self, change: LevelChange, level_s: Seconds, run_is_over: bool
    ) -> None:
        """Set the level after ``change`` to ``level_s``, or after a drift to the level that it has reached.

        A change that is now negligible is withdrawn. A drift is reported again if its size differs clearly from the
        reported one. Others are always reported again: the speed of the machine since the change may be another one.
        """
        is_drift = change.course == "drift"
        change.after_s = self._end_of_drift(change) if is_drift else level_s
        if change.is_negligible:
            self._reported.withdraw([change])
            if self._confirmed_changes and change is self._confirmed_changes[-1]:
                # the level before the change still lasts
                self._level_begin = self._index_of(change.before_since_step)
            return
        if change.is_corrected or run_is_over or not is_drift:
            self._reported.report(change)

    # -- a level that wanders ------------------------------------------------------------------------------------------

    def _merge_into_wandering(self, change: LevelChange) -> bool:
        """Merge ``change`` into a wandering level, which may begin with it; return whether it was merged."""
        is_jump = _find_jumps(self._confirmed_changes)[-1]  # ``change`` is the last one
        if is_jump:
            return False
        wandering = self._wandering
        if wandering is not None:
            is_in_range = _is_in_range(change.after_s, wandering)
            if is_in_range and change.may_belong_to(wandering):
                self._count_wandering(wandering, change)
                return True

        changes = _changes_that_may_wander(self._confirmed_changes)
        if not self._has_wandered(changes):
            return False
        if wandering is None or not _reach_range(changes, wandering):
            wandering = self._begin_wandering(changes)
        else:
            wandering.course = "wanders"
            wandering.times += len(changes)
            for merged_change in changes:
                _widen(wandering, merged_change.after_s)
        self._reported.withdraw(changes)
        self._absorb_changes_within_range(wandering)
        self._confirmed_changes.clear()
        self._reported.report(wandering)
        return True

    def _has_wandered(self, changes: Sequence[LevelChange]) -> bool:
        """Return whether the level went back and forth with ``changes``: several times, or once if due to the machine.

        A level that follows a trend does not wander.
        """
        reversals = _count_reversals(changes)
        if reversals < _REVERSALS and not self._may_be_machine(changes):
            return False
        return not self._follows_trend(changes[0].since_step)

    def _may_be_machine(self, changes: Sequence[LevelChange]) -> bool:
        """Return whether ``changes`` may be due to the machine, whose speed goes up and down by a few percent."""
        if _count_reversals(changes) < _REVERSALS_OF_MACHINE:
            return False
        if not all(change.may_be_machine for change in changes):
            return False
        levels_s = _levels_around(changes)
        if self._wandering is not None:
            levels_s.extend(_range_of(self._wandering))
        elif self._reported.is_any_undone_by(changes[-1]):
            # The first change that goes back completely is an event of its own.
            return False
        return math.log(max(levels_s) / min(levels_s)) <= _WIDEST_RANGE_OF_MACHINE

    def _begin_wandering(self, changes: Sequence[LevelChange]) -> LevelChange:
        """Return a new event into which ``changes`` are merged: its levels are the lowest and the highest of them."""
        lowest = min(changes, key=lambda change: change.after_s[-1])
        highest = max(changes, key=lambda change: change.after_s[-1])
        course: Course = "wanders"
        if are_two_levels(_levels_around(changes)):
            course = "alternates"
        wandering = LevelChange(
            since_step=changes[0].since_step,
            before_s=lowest.after_s,
            after_s=highest.after_s,
            found_step=changes[-1].found_step,
            before_since_step=changes[0].before_since_step,
            course=course,
            times=len(changes),
        )
        self._wandering = wandering
        self._reported.recent_changes.append(wandering)
        return wandering

    def _absorb_changes_within_range(self, wandering: LevelChange) -> None:
        """Merge into ``wandering`` the earlier changes between two levels in its range, and withdraw them.

        ``wandering`` then begins with the earliest of these changes. Only changes of earlier wanderings are counted.
        """
        within_range = []
        for change in self._reported.recent_changes:
            if change is wandering or change.ends_long_level:
                continue
            before_is_inside = _is_in_range(change.before_s, wandering)
            after_is_inside = _is_in_range(change.after_s, wandering)
            if before_is_inside and after_is_inside:
                within_range.append(change)
        for change in within_range:
            wandering.since_step = min(wandering.since_step, change.since_step)
            if change.course in ("wanders", "alternates"):
                wandering.times += change.times
            self._reported.recent_changes.remove(change)
        self._reported.withdraw(within_range)

    def _count_wandering(self, wandering: LevelChange, change: LevelChange) -> None:
        """Count ``change`` as part of the event ``wandering``."""
        wandering.times += 1
        self._reported.close_since(
            wandering.since_step, last_step=change.since_step - 1
        )
        if wandering.course == "wanders":
            _widen(wandering, change.after_s)
            self._absorb_changes_within_range(wandering)
        self._report_wandering_again(wandering)

    def _report_wandering_again(self, wandering: LevelChange) -> None:
        """Report ``wandering`` again if it now has 1, 2, 4, … changes, or if its range has widened and they are few."""
        is_power_of_two = wandering.times.bit_count() == 1
        has_few_changes = wandering.times < _REPORTED_EVERY_TIME
        if is_power_of_two or (wandering.is_corrected and has_few_changes):
            self._reported.report(wandering)

    def _follows_trend(self, since_step: int) -> bool:
        """Return whether the level has steadily risen or fallen since ``since_step``, or since an open drift began."""
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
        last_open = self._reported.last_open
        if last_open is None or last_open.course != "drift":
            return None
        return last_open

    def _merge_into_drift(self, change: LevelChange, is_part_of_line: bool) -> bool:
        """Merge ``change`` into a drift, which an earlier change becomes; return whether it was merged.

        If there is no earlier change to merge with, but the level rises gradually, ``change`` itself becomes a drift.
        """
        is_small_piece = False
        drift = self._current_drift()
        if drift is not None and change.may_hide_in(drift):
            size_s = abs(change.size_s)
            drift_size_s = abs(drift.size_s)
            if drift.direction != change.direction:
                # A small step back does not end the drift, but shows that it has come less far.
                is_small_step_back = size_s <= _SMALL_AGAINST_DRIFT * drift_size_s
                if is_small_step_back:
                    self._correct_current(run_is_over=False)
                return is_small_step_back
            is_small_piece = size_s <= _SMALL_BESIDE_DRIFT * drift_size_s

        rises_gradually = self._rises_gradually()
        has_many_stairs = rises_gradually or len(self._same_direction_changes) > _STAIRS
        if not is_part_of_line and not has_many_stairs and not is_small_piece:
            return False
        begin = self._begin_of_drift(change, has_many_stairs)
        if begin is None:
            change.course = "drift"
            change.is_gradual = True
            self._correct_begin_of_drift(change)
            return False
        self._extend_drift(begin, is_gradual=is_part_of_line or rises_gradually)
        return True

    def _extend_drift(self, drift: LevelChange, is_gradual: bool) -> None:
        """Merge the open changes after ``drift``, and the latest change, which is not open yet, into ``drift``."""
        is_new_drift = drift.course != "drift"
        pieces = self._reported.open_after(drift)
        self._reported.withdraw(pieces)
        drift.course = "drift"
        drift.after_s = self._end_of_drift(drift)
        drift.times += 1 + len(pieces)
        if is_new_drift:
            drift.is_gradual = is_gradual
        is_begin_due = is_new_drift or drift.times in _CHANGES_AT_CORRECTION
        if drift.is_gradual and is_begin_due:
            self._correct_begin_of_drift(drift)
        if is_new_drift or drift.is_corrected:
            self._reported.report(drift)

    def _rises_gradually(self) -> bool:
        """Return whether the level rose (or fell) between the last changes in one direction, and not in jumps at them.

        A jump is the difference of the medians of the blocks just before and just after a change.
        """
        changes = self._same_direction_changes
        if len(changes) < _FEWEST_OF_GRADUAL_RISE:
            return False
        sum_of_jumps = 0.0
        for change in changes:
            # The block of the change is left out: it may hold steps of both levels.
            index = self._index_of(change.since_step)
            begin = max(index - _BLOCKS_BESIDE_JUMP, 0)
            end = index + 1 + _BLOCKS_BESIDE_JUMP
            logs_before = logs_of(self._blocks[begin:index])
            logs_after = logs_of(self._blocks[index + 1 : end])
            if logs_before.size and logs_after.size:
                sum_of_jumps += float(np.median(logs_after) - np.median(logs_before))
        first_level_s = changes[0].before_s[-1]
        last_level_s = changes[-1].after_s[-1]
        whole_rise = math.log(last_level_s / first_level_s)
        return abs(sum_of_jumps) < _SHARE_OF_JUMPS * abs(whole_rise)

    def _begin_of_drift(
        self, change: LevelChange, has_many_stairs: bool
    ) -> LevelChange | None:
        """Return the open change with which the drift of ``change`` began; None if it begins with ``change``.

        Going back in time, the drift includes changes in the same direction until a jump, or until the changes follow
        each other much more slowly than later ones (which does not matter in a drift of many stairs).
        """
        begin = None
        next_step = change.since_step
        next_interval = None
        for earlier in reversed(self._reported.open_changes):
            if earlier.direction != change.direction:
                break
            if earlier.course == "drift":
                return earlier
            rise_after_s = abs(float(change.after_s[-1] - earlier.after_s[-1]))
            is_jump = abs(earlier.size_s) > _JUMP_BEFORE_DRIFT * rise_after_s
            if is_jump:
                break
            interval = max(next_step - earlier.since_step, BLOCK)
            is_slower = (
                next_interval is not None and interval > _DRIFT_SLOWER * next_interval
            )
            if is_slower and not has_many_stairs:
                break
            begin = earlier
            next_interval = interval
            next_step = earlier.since_step
        return begin

    def _correct_begin_of_drift(self, drift: LevelChange) -> None:
        """Find the beginning of ``drift`` again: the block at which the level before it turns into a line."""
        blocks = self._blocks[self._index_of(drift.before_since_step) :]
        knee = knee_of(blocks)
        drift.since_step = blocks[knee].first_step
        # the level before is estimated from at least so many blocks, even if the drift begins within them
        blocks_before = max(knee, len(blocks) // 8, _FEWEST_BEFORE_DRIFT)
        level_before = blocks[: min(blocks_before, _REFERENCE)]
        drift.before_s = mean_seconds(middle_half(level_before))

    def _end_of_drift(self, drift: LevelChange) -> Seconds:
        """Return (TIMED,) the current level of ``drift``: the end of a line through its last blocks."""
        blocks = self._blocks[self._index_of(drift.since_step) :]
        return end_of_line(blocks[-_BLOCKS_AT_END:])


def _changed_parts(before_s: Seconds, after_s: Seconds) -> NDArray[np.bool_]:
    """Return (PARTS,) which parts make up much of a change between two levels; all parts if none does."""
    differences_s = after_s - before_s
    step_change_s = float(differences_s[-1])
    in_direction_s = differences_s[:-1] * np.sign(step_change_s)
    is_changed: NDArray[np.bool_] = in_direction_s >= _CHANGED_PART * abs(step_change_s)
    if not is_changed.any():
        return np.full(len(PARTS), True)
    return is_changed


def _changes_that_may_wander(
    confirmed_changes: Sequence[LevelChange],
) -> list[LevelChange]:
    """Return the last of ``confirmed_changes``, after the last one that certainly is not part of a wandering level.

    These changes are not part of it:

    - a jump (see ``_find_jumps``);
    - a change that separates two ranges of levels (see ``_last_separating_change``);
    - the first change, if it ended a long level (see ``_ends_long_level``). It is marked with ``ends_long_level``.
    """
    changes = list(confirmed_changes)
    are_jumps = _find_jumps(changes)
    if any(are_jumps):
        last_jump = len(changes) - 1 - are_jumps[::-1].index(True)
        changes = changes[last_jump + 1 :]
    separating = _last_separating_change(changes)
    if separating is not None:
        return changes[separating + 1 :]
    if _ends_long_level(changes):
        changes[0].ends_long_level = True
        return changes[1:]
    return changes


def _last_separating_change(changes: Sequence[LevelChange]) -> int | None:
    """Return the index of the last change after which the level stayed away from all earlier levels; None if none did.

    The gap between all earlier and all later levels is then wider than the range of either.
    """
    # one level more than changes: change i is between the levels i and i + 1
    log_levels = np.log(np.array(_levels_around(changes)))
    for index in reversed(range(len(changes))):
        earlier = log_levels[: index + 1]
        later = log_levels[index + 1 :]
        gap_up = later.min() - earlier.max()
        gap_down = earlier.min() - later.max()
        widest_range = max(np.ptp(earlier), np.ptp(later))
        if max(gap_up, gap_down) > widest_range:
            return index
    return None


def _find_jumps(changes: Sequence[LevelChange]) -> list[bool]:
    """Return for each of ``changes`` whether it is a jump: far larger than all others. At most two may be.

    Example: the level wanders by a few percent, because the machine's speed varies, and once rises by half and falls
    again. These two changes are jumps, and not part of the wandering.
    """
    sizes = [change.log_size for change in changes]
    if len(sizes) <= _FEWEST_BESIDE_JUMP:
        return [False] * len(sizes)
    are_jumps = []
    for index, size in enumerate(sizes):
        other_sizes = [*sizes[:index], *sizes[index + 1 :]]
        usual_size = float(np.median(other_sizes))
        least_jump = max(_JUMP_BESIDE_OTHERS * usual_size, _LEAST_JUMP)
        are_jumps.append(size >= least_jump)
    if sum(are_jumps) > _MOST_JUMPS:
        return [False] * len(sizes)
    return are_jumps


def _range_of(wandering: LevelChange) -> tuple[float, float]:
    """Return the lowest and the highest seconds of the step of a level that wanders."""
    return float(wandering.before_s[-1]), float(wandering.after_s[-1])


def _widen(wandering: LevelChange, level_s: Seconds) -> None:
    """Widen the range of the wandering level so that it includes ``level_s``."""
    if level_s[-1] < wandering.before_s[-1]:
        wandering.before_s = level_s
    if level_s[-1] > wandering.after_s[-1]:
        wandering.after_s = level_s


def _is_in_range(level_s: Seconds, wandering: LevelChange) -> bool:
    """Return whether ``level_s`` is in the range of the wandering level, or within half a range of its ends."""
    low_s, high_s = _range_of(wandering)
    margin_factor = math.sqrt(high_s / low_s)  # half of the range, in logarithms
    step_s = level_s[-1]
    return bool(low_s / margin_factor <= step_s <= high_s * margin_factor)


def _reach_range(changes: Sequence[LevelChange], wandering: LevelChange) -> bool:
    """Return whether the lowest or the highest level after ``changes`` is in the range of the wandering level."""
    by_level = sorted(changes, key=lambda change: change.after_s[-1])
    lowest_s = by_level[0].after_s
    highest_s = by_level[-1].after_s
    return _is_in_range(lowest_s, wandering) or _is_in_range(highest_s, wandering)


def _ends_long_level(changes: Sequence[LevelChange]) -> bool:
    """Return whether the level before ``changes`` was far longer than those after it, all of which are on one side.

    The first change is then one of the program, although the level has wandered since.
    """
    first, *later_changes = changes
    if len(later_changes) < _FEWEST_AFTER_LONG_LEVEL:
        return False
    long_level_steps = first.since_step - first.before_since_step
    later_steps = changes[-1].since_step - first.since_step
    # so many times the mean length of the later levels
    least_steps = _LONG_LEVEL * later_steps / len(later_changes)
    if long_level_steps < least_steps:
        return False
    log_before, *later_logs = np.log(np.array(_levels_around(changes)))
    # positive for levels on the side of the first change
    distances = first.direction * (np.array(later_logs) - log_before)
    return bool(distances.min() >= _LEAST_DISTANCE)


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
    """Return the blocks that begin at ``step`` or later; all of ``blocks`` if there is none."""
    later_blocks = [block for block in blocks if block.first_step >= step]
    return later_blocks or blocks

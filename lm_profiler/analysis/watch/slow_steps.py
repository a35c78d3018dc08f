"""Finds the slow steps of a running training, and groups those of the same phase, cause and size.

A step is slow if it takes ``SLOW_RATIO`` times the median of its neighbours. A group becomes an event if a single step,
or the whole group, costs a certain share of the time that the run has been watched.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import rank_correlation
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import NO_CPU

# Steps per block. The usual time of a step is the largest median of its own block and the two blocks beside it.
NEIGHBOURS = 40
SLOW_RATIO = 1.5

# A single step is an event if its excess time is this share of the time watched so far, within limits in seconds. It is
# a share because rare delays happen in every process, and the longest of them grows with time.
_SINGLE_SHARE = 5e-4
_SINGLE_CAUSED_SHARE = 1e-4  # for a step with a cause of its own
_SINGLE_LEAST_S = 0.05
_SINGLE_MOST_S = 1.0
# Without a cause of its own, its excess must also be 3 times the 0.9 quantile of the excess of the last slow steps.
_COMMON_STEPS = 100
_FEWEST_COMMON = 10
_COMMON_QUANTILE = 0.9
_ABOVE_COMMON = 3.0
# A group with a cause of its own (a callback, a checkpoint, garbage collection), or with regular slow steps, is an
# event if its excess is this share of the time since its first step, and at least so long.
_CAUSED_SHARE = 2e-3
_CAUSED_LEAST_S = 0.1
# Other groups are an event if their excess is this share of the last minute.
_RECENT_SHARE = 0.02
_RECENT_S = 60.0
# Delays by other processes spread over the parts of a step. So a smaller share is enough if there are so many slow
# steps without a cause, and nearly all of their excess is in one part.
_RECENT_SHARE_OF_ONE_PART = 0.01
_FEWEST_OF_ONE_PART = 20
_NEARLY_ALL = 0.8
# Other processes delay a part in proportion to its time: by chance, nearly all delays are in a part of this share in 3
# of 10,000 groups of 20.
_MOST_USUAL_SHARE = 0.4
_FEWEST_REPEATS = 4  # slow steps that are needed to judge whether they are regular
_REGULAR_SHARE = 0.8  # the share of the slow steps that must come at the expected steps
_REGULAR_WITHIN = (
    0.02  # the share of the interval by which they may miss the expected steps
)
# Slow steps take longer and longer if there are so many of them, their rank correlation with time is at least this high
# and this many standard deviations of that of steps in random order, and the last quarter takes so many times as long
# as the first. (The last step, too, must take so many times as long as the first one.)
_FEWEST_GROWING = 6
_RISING = 0.5
_RISING_DEVIATIONS = 2.4  # by chance in 1 of 100 groups
_GROWTH = 1.5
# An event is written again after this growth of its group, or after this time.
_UPDATE_GROWTH = 1.5
_UPDATE_APART_S = 600.0
_MOST_GROUPS = 40
_FASTER = 0.1  # slow steps accelerate if the next interval is shorter than this share of the mean one
_SAME_SIZE = 3.0  # the largest ratio of excess times in a group: a stall of a second is not like a delay of 20 ms
# beginnings of causes that are due to other processes, and not to the program
_CONTENTION = (NO_CPU, "page fault")


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """A step that took much longer than its neighbours."""

    step: int
    begin_ns: int
    end_ns: int
    step_s: float
    usual_s: float  # the usual time of the steps around this one
    # the part of the step with most of the excess; None if no part has half of it
    part: str | None
    part_s: float  # the time of ``part``, or of the whole step if ``part`` is None
    data_s: float  # the time of the part "data" in this step
    usual_data_s: float  # how long steps usually wait for data

    @property
    def excess_s(self) -> float:
        return self.step_s - self.usual_s


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """A slow step and its cause."""

    slow: SlowStep
    at_s: float  # the time at which the step ended
    cause: str | None  # None means unknown
    cause_s: float  # the seconds that the cause explains
    starts_epoch: bool  # whether it was the first step of an epoch


@dataclass(eq=False)
class SlowSteps:
    """Finds slow steps, in blocks of ``NEIGHBOURS`` steps.

    A step is judged as soon as the block after its own is complete, or when the run is over. The first block has no
    block before it and is never judged.
    """

    # The steps that are not judged yet, and those that are needed as their neighbours:
    # (n,) their numbers
    _steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # (n, 2) when they began and ended
    _begin_end_ns: NDArray[np.int64] = field(
        default_factory=lambda: np.empty((0, 2), np.int64)
    )
    # (n, TIMED) the seconds of their parts, and last of the whole step
    _seconds: NDArray[np.float64] = field(
        default_factory=lambda: np.empty((0, len(TIMED)))
    )

    def add(
        self,
        steps: NDArray[np.int64],
        ns: NDArray[np.int64],
        seconds: NDArray[np.float64],
        run_is_over: bool = False,
    ) -> list[SlowStep]:
        """Add the next steps; return those that have turned out to be slow.

        Args:
            steps: (n,) their numbers.
            ns: (n, 2) when they began and ended.
            seconds: (n, TIMED) the seconds of their parts, and last of the whole step.
            run_is_over: whether to judge all steps that are left.
        """
        self._steps = np.concatenate([self._steps, steps])
        self._begin_end_ns = np.concatenate([self._begin_end_ns, ns])
        self._seconds = np.concatenate([self._seconds, seconds])
        blocks = len(self._steps) // NEIGHBOURS
        # a block is judged with the one before it and, while the run goes on, with the one after it
        fewest_blocks = 2 if run_is_over else 3
        if blocks < fewest_blocks:
            return []
        steps_in_blocks = blocks * NEIGHBOURS
        by_block = self._seconds[:steps_in_blocks].reshape(blocks, NEIGHBOURS, -1)
        medians_s = np.median(by_block, axis=1)  # (blocks, TIMED)

        # The first block is only a neighbour of the second one. The last block waits for the next one. If the run is
        # over, it is judged too, together with the steps after it, which do not fill a block.
        begin = NEIGHBOURS
        end = steps_in_blocks - NEIGHBOURS
        usual_s = _usual_between_blocks_s(medians_s)
        if run_is_over:
            steps_at_end = len(self._steps) - end
            end = len(self._steps)
            usual_s = np.concatenate(
                [usual_s, _usual_at_end_s(medians_s, steps_at_end)]
            )

        is_slow = self._seconds[begin:end, -1] > SLOW_RATIO * usual_s[:, -1]
        slow_steps = []
        for index in np.flatnonzero(is_slow).tolist():
            slow_steps.append(self._slow_step(begin + index, usual_s[index]))
        # the next call needs the last block, and the one before it as its neighbour
        keep_from = steps_in_blocks - 2 * NEIGHBOURS
        self._steps = self._steps[keep_from:]
        self._begin_end_ns = self._begin_end_ns[keep_from:]
        self._seconds = self._seconds[keep_from:]
        return slow_steps

    def _slow_step(self, index: int, usual_parts_s: NDArray[np.float64]) -> SlowStep:
        """Return the step at ``index`` as a slow step; ``usual_parts_s`` are the usual (TIMED,) seconds around it."""
        seconds = self._seconds[index]
        excess_s = seconds[:-1] - usual_parts_s[:-1]
        largest = int(excess_s.argmax())
        step_s = float(seconds[-1])
        usual_s = float(usual_parts_s[-1])
        part = None
        part_s = step_s
        is_most_of_excess = excess_s[largest] >= 0.5 * (step_s - usual_s)
        if is_most_of_excess:
            part = PARTS[largest]
            part_s = float(seconds[largest])
        data = PARTS.index("data")
        return SlowStep(
            step=int(self._steps[index]),
            begin_ns=int(self._begin_end_ns[index, 0]),
            end_ns=int(self._begin_end_ns[index, 1]),
            step_s=step_s,
            usual_s=usual_s,
            part=part,
            part_s=part_s,
            data_s=float(seconds[data]),
            usual_data_s=float(usual_parts_s[data]),
        )


def _usual_between_blocks_s(medians_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (steps, TIMED) the usual seconds for each step of all blocks except the first and the last.

    Args:
        medians_s: (blocks, TIMED) the medians over the steps of each block: by part, and last of the whole step.
    """
    usual_s = medians_s[1:-1].copy()  # of a part: the median of its block
    # For the whole step (the last column) the largest median of three blocks counts, so that the first steps of a
    # slower level do not count as slow steps.
    step_s = medians_s[:, -1]
    previous_block_s = step_s[:-2]
    same_block_s = step_s[1:-1]
    next_block_s = step_s[2:]
    usual_s[:, -1] = np.max([previous_block_s, same_block_s, next_block_s], axis=0)
    return np.repeat(usual_s, NEIGHBOURS, axis=0)


def _usual_at_end_s(medians_s: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Return (steps, TIMED) the usual seconds for each of the last ``steps`` of a run, which no full block follows.

    Args:
        medians_s: (blocks, TIMED) as for ``_usual_between_blocks_s``; the last block holds the first of these steps.
        steps: the number of steps in the last block and after it.
    """
    usual_s = medians_s[-1].copy()
    # for the whole step (the last column), the larger median of the last two blocks
    usual_s[-1] = medians_s[-2:, -1].max()
    return np.tile(usual_s, (steps, 1))


@dataclass(eq=False, kw_only=True)
class SlowStepGroup:
    """The slow steps of one phase, cause and size so far."""

    part: str | None
    cause: str | None
    first_step: int
    first_at_s: float
    first_step_s: float = 0.0  # the time of the first of the steps
    times: int = 0
    step_s: float = 0.0  # sum of the times of the steps
    usual_s: float = 0.0  # sum of the times that they would usually have taken
    part_s: float = 0.0  # sum of the times of the part in these steps
    cause_s: float = 0.0  # sum of the seconds that their causes explain
    last_step: int = 0
    epoch_starts: int = 0  # how many of the steps were the first step of an epoch
    # the numbers of the last slow steps, and (``steps_s``) their times
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=50))
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    is_reported: bool = False  # whether the group is an event
    _last_occurrence: Occurrence | None = None
    _recent_s: float = 0.0  # the excess of about the last minute, as of ``_recent_at_s``; it decays exponentially
    _recent_at_s: float = 0.0
    _written_times: int = 0  # the value of ``times`` when the event was last written
    _written_at_s: float = 0.0  # the time at which the group was last written

    @property
    def excess_s(self) -> float:
        return self.step_s - self.usual_s

    def add(self, occurrence: Occurrence) -> None:
        """Add a slow step to the sums of this group."""
        slow = occurrence.slow
        self._last_occurrence = occurrence
        if self.times == 0:
            self.first_step_s = slow.step_s
        self.times += 1
        self.step_s += slow.step_s
        self.usual_s += slow.usual_s
        self.part_s += slow.part_s
        self.cause_s += occurrence.cause_s
        self.last_step = slow.step
        self.epoch_starts += occurrence.starts_epoch
        self.steps.append(slow.step)
        self.steps_s.append(slow.step_s)
        self._recent_s = self.recent_s(occurrence.at_s) + slow.excess_s
        self._recent_at_s = occurrence.at_s

    def recent_s(self, at_s: float) -> float:
        """Return the excess of about the last minute before ``at_s``."""
        age_s = max(at_s - self._recent_at_s, 0.0)
        return self._recent_s * math.exp(-age_s / _RECENT_S)

    @property
    def has_own_cause(self) -> bool:
        """Whether the cause is known, and is not another process."""
        return self.cause is not None and not self.cause.startswith(_CONTENTION)

    def costs_much_by_itself(self, at_s: float) -> bool:
        """Return whether the group has a cause of its own, or is regular, and costs enough to be an event."""
        since_s = at_s - self.first_at_s
        least_s = max(_CAUSED_SHARE * since_s, _CAUSED_LEAST_S)
        if self.times < 2 or self.excess_s < least_s:
            return False
        if self.has_own_cause or self.starts_epochs():
            return True
        # computing the interval takes a while: it is done only at every fourth slow step
        is_interval_due = self.times % _FEWEST_REPEATS == 0
        return is_interval_due and self.interval() is not None

    def costs_much_recently(self, at_s: float) -> bool:
        """Return whether the excess of the last minute is large enough for an event."""
        if self.times < _FEWEST_REPEATS:
            return False
        return self.recent_s(at_s) >= _RECENT_SHARE * _RECENT_S

    def costs_much_in_one_part(self, at_s: float, watched_s: float) -> bool:
        """Return whether there are so many slow steps in one part that a smaller excess is enough for an event.

        The part must usually be a small share of the step: other processes delay long parts most.
        """
        if self.part is None or self.times < _FEWEST_OF_ONE_PART:
            return False
        usual_share_of_part = (self.part_s - self.excess_s) / self.usual_s
        if usual_share_of_part > _MOST_USUAL_SHARE:
            return False
        # the time of the last minute, with the decay of ``recent_s``
        recent_s = _RECENT_S * (1.0 - math.exp(-watched_s / _RECENT_S))
        return self.recent_s(at_s) >= _RECENT_SHARE_OF_ONE_PART * recent_s

    def accelerates_at(self, step: int) -> bool:
        """Return whether a slow step at ``step`` follows the last one much sooner than the earlier ones did."""
        if self.times < 2:
            return False
        mean_interval = (self.last_step - self.first_step) / (self.times - 1)
        return step - self.last_step < _FASTER * mean_interval

    def restart(self) -> None:
        """Drop all slow steps except the last one, with which something new has begun."""
        occurrence = self._last_occurrence
        assert occurrence is not None
        self.times = 0
        self.step_s = 0.0
        self.usual_s = 0.0
        self.part_s = 0.0
        self.cause_s = 0.0
        self.epoch_starts = 0
        self.steps.clear()
        self.steps_s.clear()
        self.first_step = occurrence.slow.step
        self.first_at_s = occurrence.at_s
        self.add(occurrence)

    def should_write(self, at_s: float) -> bool:
        """Return whether to write the group's event at ``at_s``, for the first time or again."""
        if not self.is_reported or self.times == self._written_times:
            return False
        has_grown = self.times >= _UPDATE_GROWTH * self._written_times
        return has_grown or at_s - self._written_at_s >= _UPDATE_APART_S

    def has_unwritten_steps(self) -> bool:
        return self.is_reported and self.times != self._written_times

    def mark_written(self, at_s: float) -> None:
        self._written_times = self.times
        self._written_at_s = at_s

    def starts_epochs(self) -> bool:
        """Return whether most of the slow steps are the first step of an epoch."""
        return self.times >= 2 and self.epoch_starts >= _REGULAR_SHARE * self.times

    def interval(self) -> int | None:
        """Return the number of steps from one slow step to the next; None if they come irregularly."""
        if self.times < _FEWEST_REPEATS:
            return None
        steps = np.array(self.steps)
        interval = int(np.median(np.diff(steps)))
        expected_steps = steps[:-1] + interval
        expected_steps = expected_steps[expected_steps <= steps[-1]]
        if len(expected_steps) < _FEWEST_REPEATS - 1:
            return None
        # (expected steps, slow steps), then for each expected step the distance of the nearest slow step
        all_distances = np.abs(steps[None, :] - expected_steps[:, None])
        distances = all_distances.min(axis=1)
        is_close = distances <= _REGULAR_WITHIN * interval
        if is_close.mean() < _REGULAR_SHARE:
            return None
        return interval

    def growth(self) -> tuple[float, float] | None:
        """Return the seconds of the first and of the last slow step if they take longer and longer; None otherwise."""
        if self.times < _FEWEST_GROWING:
            return None
        steps_s = np.array(self.steps_s)
        count = len(steps_s)
        # Kendall's tau of numbers in random order (Kendall 1938, Biometrika 30:81)
        variance_by_chance = 2 * (2 * count + 5) / (9 * count * (count - 1))
        least_rise = max(_RISING, _RISING_DEVIATIONS * math.sqrt(variance_by_chance))
        if rank_correlation(steps_s) < least_rise:
            return None
        quarter = count // 4
        first_quarter_s = float(np.median(steps_s[:quarter]))
        last_quarter_s = float(np.median(steps_s[-quarter:]))
        last_step_s = float(steps_s[-1])
        quarter_has_grown = last_quarter_s >= _GROWTH * first_quarter_s
        step_has_grown = last_step_s >= _GROWTH * self.first_step_s
        if quarter_has_grown and step_has_grown:
            return self.first_step_s, last_step_s
        return None

    def share(self) -> float | None:
        """Return the share of slow steps among all steps since the first of them; None if they are too few."""
        if self.times < _FEWEST_REPEATS:
            return None
        return self.times / (self.last_step - self.first_step + 1)


@dataclass(eq=False)
class SlowStepGroups:
    """The groups of slow steps of a run: by phase, cause and size, at most ``_MOST_GROUPS`` of them."""

    _groups: list[SlowStepGroup] = field(default_factory=list)
    # the excess times of the last slow steps without a cause of their own
    _unexplained_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=_COMMON_STEPS)
    )

    def add(self, occurrence: Occurrence, watched_s: float) -> None:
        """Add a slow step, which occurred ``watched_s`` seconds after the watch began, to its group."""
        slow = occurrence.slow
        cause = occurrence.cause
        at_s = occurrence.at_s
        kind = None if cause is None else cause_kind(cause)
        part = slow.part
        if kind is not None and kind.startswith(_CONTENTION):
            part = None  # other processes may delay any part
        group = self._nearest_group(part, kind, slow.excess_s)
        if group is None:
            group = SlowStepGroup(
                part=part, cause=cause, first_step=slow.step, first_at_s=at_s
            )
            self._groups.append(group)
            self._drop_cheapest(new_group=group)
        elif group.cause != cause:
            group.cause = kind  # what the causes have in common
        # Slow steps that suddenly follow each other quickly are something new, even if earlier ones are like them.
        may_restart = not group.is_reported and not group.has_own_cause
        if may_restart and group.accelerates_at(slow.step):
            group.restart()
        group.add(occurrence)

        if not group.is_reported:
            group.is_reported = (
                self._is_worth_alone(slow, watched_s, group.has_own_cause)
                or group.costs_much_by_itself(at_s)
                or self._stands_out(group, at_s, watched_s)
            )
        if not group.has_own_cause:
            self._unexplained_s.append(slow.excess_s)

    def _is_worth_alone(
        self, slow: SlowStep, watched_s: float, has_own_cause: bool
    ) -> bool:
        """Return whether a single slow step costs enough to be an event."""
        share = _SINGLE_CAUSED_SHARE if has_own_cause else _SINGLE_SHARE
        least_s = max(share * watched_s, _SINGLE_LEAST_S)
        if slow.excess_s < min(least_s, _SINGLE_MOST_S):
            return False
        if has_own_cause or len(self._unexplained_s) < _FEWEST_COMMON:
            return True
        # Every process has delays without a known cause: this one must be much longer than the usual ones.
        common_s = float(np.quantile(np.array(self._unexplained_s), _COMMON_QUANTILE))
        return slow.excess_s >= _ABOVE_COMMON * common_s

    def _stands_out(self, group: SlowStepGroup, at_s: float, watched_s: float) -> bool:
        """Return whether a group costs much of the last minute and, without a cause, half of all unexplained delays.

        If delays without a cause are spread over several groups, the machine delays all phases, and not the program.
        """
        unexplained_s = 0.0
        for other_group in self._groups:
            if other_group.cause is None:
                unexplained_s += other_group.recent_s(at_s)
        share_of_unexplained = 1.0
        if group.cause is None and unexplained_s > 0.0:
            share_of_unexplained = group.recent_s(at_s) / unexplained_s
        if group.costs_much_recently(at_s) and share_of_unexplained >= 0.5:
            return True
        costs_much = group.costs_much_in_one_part(at_s, watched_s)
        return costs_much and share_of_unexplained >= _NEARLY_ALL

    def _nearest_group(
        self, part: str | None, kind: str | None, excess_s: float
    ) -> SlowStepGroup | None:
        """Return the group of this part and kind of cause whose mean excess is nearest; None if none is near enough."""
        nearest = None
        least_ratio = _SAME_SIZE
        for group in self._groups:
            group_kind = None if group.cause is None else cause_kind(group.cause)
            # a step without a main part and a cause may belong to any event without a cause
            may_be_of_any_part = part is None and kind is None and group.is_reported
            is_of_part = group.part == part or may_be_of_any_part
            if group_kind != kind or not is_of_part:
                continue
            mean_excess_s = group.excess_s / group.times
            ratio = max(excess_s / mean_excess_s, mean_excess_s / excess_s)
            if kind is not None and kind.startswith(_CONTENTION):
                ratio = 1.0  # delays by other processes may have any length
            if ratio <= least_ratio:
                nearest = group
                least_ratio = ratio
        return nearest

    def _drop_cheapest(self, new_group: SlowStepGroup) -> None:
        """If there are too many groups, drop the one that costs least (but not ``new_group``)."""
        if len(self._groups) <= _MOST_GROUPS:
            return
        old_groups = [group for group in self._groups if group is not new_group]
        cheapest = min(old_groups, key=lambda group: group.excess_s)
        self._groups.remove(cheapest)

    def to_write(self, at_s: float, run_is_over: bool) -> Sequence[SlowStepGroup]:
        """Return the groups whose event should be written at ``at_s``; when the run is over, all that have changed."""
        groups = []
        for group in self._groups:
            is_due_at_end = run_is_over and group.has_unwritten_steps()
            if group.should_write(at_s) or is_due_at_end:
                group.mark_written(at_s)
                groups.append(group)
        return groups


def cause_kind(cause: str) -> str:
    """Return ``cause`` without its variable parts: numbers, and the name of a compiled function."""
    kind = re.sub(r"\d[\d,.]*", "", cause).strip()
    if kind.startswith(("compilation", "recompilation")):
        return kind.split()[0]
    return kind

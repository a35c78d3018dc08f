"""Finds the slow steps of a running training and groups those of the same phase, cause and size.

A slow step takes ``SLOW_RATIO`` times the median of its neighbours. A group of them becomes an event if it costs enough
to be worth reporting: either a single step, measured against how long the run has been watched, or all together.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS, TIMED

NEIGHBOURS = 40  # steps of a block; the usual step is the largest median of its own block and the two beside it
SLOW_RATIO = 1.5

# A single step is worth an event if it costs this share of the time watched so far: rare delays happen in every
# process, and the longest of them grows with the time. Within these limits in seconds.
_SINGLE_SHARE = 5e-4
_SINGLE_CAUSED_SHARE = 1e-4
_SINGLE_LEAST_S = 0.05
_SINGLE_MOST_S = 1.0
# Without a cause of its own it must also be this much longer than most of the last slow steps.
_COMMON_STEPS = 100
_FEWEST_COMMON = 10
_COMMON_QUANTILE = 0.9
_ABOVE_COMMON = 3.0
# Steps with a cause of their own (a callback, a checkpoint, garbage collection) are worth one together by this share.
_CAUSED_SHARE = 2e-3
_CAUSED_LEAST_S = 0.1
# All others must cost this share of the last minute.
_RECENT_SHARE = 0.02
_RECENT_S = 60.0
_FEWEST_REPEATS = 4  # slow steps before anything is said of how regularly they come
_REGULAR_SHARE = 0.8  # share of the intervals that must be alike
_REGULAR_WITHIN = 0.02  # share of the interval by which they may differ
# a group is written again after this growth, or this time
_UPDATE_GROWTH, _UPDATE_APART_S = 1.5, 600.0
_MOST_GROUPS = 40
_FASTER = 0.1  # share of the interval so far below which slow steps come faster
_SAME_SIZE = 3.0  # ratio of excess times beyond which slow steps differ: a stall of a second is no delay of 20 ms
# causes that other processes bring about: they say nothing about the program
_CONTENTION = ("waiting for a CPU", "page fault")


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """A step that took several times the median of its neighbours."""

    step: int
    begin_ns: int
    end_ns: int
    step_s: float
    usual_s: float
    # the part of the step that took most of the excess; None if no part took half of it
    part: str | None
    part_s: float  # what that part took, or the whole step
    data_s: float
    usual_data_s: float

    @property
    def excess_s(self) -> float:
        return self.step_s - self.usual_s


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """A slow step with what is known of it."""

    slow: SlowStep
    at_s: float  # when it ended
    cause: str | None
    cause_s: float
    starts_epoch: bool


@dataclass(eq=False)
class SlowSteps:
    """Finds slow steps, in blocks of ``NEIGHBOURS`` steps.

    A step is judged once the block of steps after its own is known, or the run is over. The first block, and the first
    one after ``forget``, has no block before it and is never judged.
    """

    # the steps that are still to be judged, or are neighbours of these: their numbers
    _steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # [step, 2], when each began and ended
    _begin_end_ns: NDArray[np.int64] = field(
        default_factory=lambda: np.empty((0, 2), np.int64)
    )
    # [step, TIMED], what each part took, and last the step
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
        """Take the next n steps: their numbers, (n, 2) begin and end, (n, TIMED) seconds. Return the slow ones."""
        self._steps = np.concatenate([self._steps, steps])
        self._begin_end_ns = np.concatenate([self._begin_end_ns, ns])
        self._seconds = np.concatenate([self._seconds, seconds])
        blocks = len(self._steps) // NEIGHBOURS
        fewest_blocks = 2 if run_is_over else 3
        if blocks < fewest_blocks:
            return []
        steps_in_blocks = blocks * NEIGHBOURS
        by_block = self._seconds[:steps_in_blocks].reshape(blocks, NEIGHBOURS, -1)
        medians_s = np.median(by_block, axis=1)  # [block, TIMED]

        # The first block is only the neighbour of the second one. The last block waits for the block after it, unless
        # the run is over: then it is judged with the steps that follow it and are no whole block.
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

    def _slow_step(self, place: int, usual_parts_s: NDArray[np.float64]) -> SlowStep:
        """Return the slow step at ``place``, with the usual (TIMED,) seconds around it."""
        seconds = self._seconds[place]
        excess_s = seconds[:-1] - usual_parts_s[:-1]
        largest = int(excess_s.argmax())
        step_s = float(seconds[-1])
        usual_s = float(usual_parts_s[-1])
        part = None
        part_s = step_s
        if excess_s[largest] >= 0.5 * (step_s - usual_s):
            part = PARTS[largest]
            part_s = float(seconds[largest])
        data = PARTS.index("data")
        return SlowStep(
            step=int(self._steps[place]),
            begin_ns=int(self._begin_end_ns[place, 0]),
            end_ns=int(self._begin_end_ns[place, 1]),
            step_s=step_s,
            usual_s=usual_s,
            part=part,
            part_s=part_s,
            data_s=float(seconds[data]),
            usual_data_s=float(usual_parts_s[data]),
        )

    def forget(self) -> None:
        """Forget the steps that are not judged yet, because steps are left out after them."""
        self._steps = self._steps[:0]
        self._begin_end_ns = self._begin_end_ns[:0]
        self._seconds = self._seconds[:0]


def _usual_between_blocks_s(medians_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the usual [step, TIMED] seconds around each step of all blocks but the first and the last.

    For the whole step (the last column) these are the largest median of three blocks, so that the steps near a change
    to a slower level are not slow steps.
    """
    step_s = medians_s[:, -1]
    usual_s = medians_s[1:-1].copy()
    usual_s[:, -1] = np.max([step_s[:-2], step_s[1:-1], step_s[2:]], axis=0)
    return np.repeat(usual_s, NEIGHBOURS, axis=0)


def _usual_at_end_s(medians_s: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Return the same for the last ``steps`` of a run, from the last two blocks."""
    usual_s = medians_s[-1].copy()
    usual_s[-1] = medians_s[-2:, -1].max()
    return np.tile(usual_s, (steps, 1))


@dataclass(eq=False, kw_only=True)
class SlowStepGroup:
    """The slow steps of one phase, cause and size so far."""

    part: str | None
    cause: str | None
    first_step: int
    first_at_s: float
    times: int = 0
    step_s: float = 0.0  # what the steps took together
    usual_s: float = 0.0  # what they would have taken usually
    cause_s: float = 0.0  # what the cause explains together
    last_step: int = 0
    epoch_starts: int = 0  # how many of them were the first step of an epoch
    # the last of them
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=50))
    is_reported: bool = False
    _last_occurrence: Occurrence | None = None
    _recent_s: float = 0.0  # the excess of the last minute; older excess fades
    _recent_at_s: float = 0.0
    _written_times: int = 0
    _written_at_s: float = 0.0

    @property
    def excess_s(self) -> float:
        return self.step_s - self.usual_s

    def add(self, occurrence: Occurrence) -> None:
        """Add a slow step to the sums of this group."""
        slow = occurrence.slow
        self._last_occurrence = occurrence
        self.times += 1
        self.step_s += slow.step_s
        self.usual_s += slow.usual_s
        self.cause_s += occurrence.cause_s
        self.last_step = slow.step
        self.epoch_starts += occurrence.starts_epoch
        self.steps.append(slow.step)
        self._recent_s = self.recent_s(occurrence.at_s) + slow.excess_s
        self._recent_at_s = occurrence.at_s

    def recent_s(self, at_s: float) -> float:
        """Return what the slow steps of about the last minute cost."""
        age_s = max(at_s - self._recent_at_s, 0.0)
        return self._recent_s * math.exp(-age_s / _RECENT_S)

    @property
    def has_own_cause(self) -> bool:
        return self.cause is not None and not self.cause.startswith(_CONTENTION)

    def costs_much_by_itself(self, at_s: float) -> bool:
        """Return whether steps cost enough together that have a cause of their own, or come regularly."""
        since_s = at_s - self.first_at_s
        least_s = max(_CAUSED_SHARE * since_s, _CAUSED_LEAST_S)
        if self.times < 2 or self.excess_s < least_s:
            return False
        if self.has_own_cause or self.starts_epochs():
            return True
        # the interval is not computed at each slow step
        may_be_regular = self.times % _FEWEST_REPEATS == 0
        return may_be_regular and self.interval() is not None

    def costs_much_recently(self, at_s: float) -> bool:
        if self.times < _FEWEST_REPEATS:
            return False
        return self.recent_s(at_s) >= _RECENT_SHARE * _RECENT_S

    def comes_faster(self, step: int) -> bool:
        """Return whether ``step`` comes much sooner after the last one than the steps before did."""
        if self.times < 2:
            return False
        interval = (self.last_step - self.first_step) / (self.times - 1)
        return step - self.last_step < _FASTER * interval

    def restart(self) -> None:
        """Begin with the last slow step, as what happens from there on is not what happened before."""
        occurrence = self._last_occurrence
        assert occurrence is not None
        self.times = 0
        self.step_s = 0.0
        self.usual_s = 0.0
        self.cause_s = 0.0
        self.epoch_starts = 0
        self.steps.clear()
        self.first_step = occurrence.slow.step
        self.first_at_s = occurrence.at_s
        self.add(occurrence)

    def should_write(self, at_s: float) -> bool:
        """Return whether the group's event is to be written, for the first time or again."""
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
        """Return whether the slow steps are the first ones of epochs."""
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
        # [expected step]: how far the nearest slow step is from it
        distances = np.abs(steps[None, :] - expected_steps[:, None]).min(axis=1)
        is_close = distances <= _REGULAR_WITHIN * interval
        if is_close.mean() < _REGULAR_SHARE:
            return None
        return interval

    def share(self) -> float | None:
        """Return the share of all steps since the first slow one; None if they are few."""
        if self.times < _FEWEST_REPEATS:
            return None
        return self.times / (self.last_step - self.first_step + 1)


@dataclass(eq=False)
class SlowStepGroups:
    """The groups of slow steps of a run: by phase, cause and size, at most ``_MOST_GROUPS`` of them."""

    _groups: list[SlowStepGroup] = field(default_factory=list)
    # the last excess times
    _unexplained_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=_COMMON_STEPS)
    )

    def add(self, occurrence: Occurrence, watched_s: float) -> None:
        """Add a slow step that came ``watched_s`` after the watch began."""
        slow = occurrence.slow
        cause = occurrence.cause
        at_s = occurrence.at_s
        kind = None if cause is None else cause_kind(cause)
        part = slow.part
        if kind is not None and kind.startswith(_CONTENTION):
            part = None  # other processes delay whatever runs
        group = self._nearest(part, kind, slow.excess_s)
        if group is None:
            group = SlowStepGroup(
                part=part, cause=cause, first_step=slow.step, first_at_s=at_s
            )
            self._groups.append(group)
            self._drop_cheapest(new_group=group)
        elif group.cause != cause:
            group.cause = kind
        may_restart = not group.is_reported and not group.has_own_cause
        if may_restart and group.comes_faster(slow.step):
            group.restart()
        group.add(occurrence)

        if not group.is_reported:
            group.is_reported = (
                self._is_worth_alone(slow, watched_s, group.has_own_cause)
                or group.costs_much_by_itself(at_s)
                or self._stands_out(group, at_s)
            )
        if not group.has_own_cause:
            self._unexplained_s.append(slow.excess_s)

    def _is_worth_alone(
        self, slow: SlowStep, watched_s: float, has_own_cause: bool
    ) -> bool:
        """Return whether a single step costs enough to be worth an event.

        Delays without a cause come in every process. One of them must be clearly longer than most of the last ones.
        """
        share = _SINGLE_CAUSED_SHARE if has_own_cause else _SINGLE_SHARE
        least_s = max(share * watched_s, _SINGLE_LEAST_S)
        if slow.excess_s < min(least_s, _SINGLE_MOST_S):
            return False
        if has_own_cause or len(self._unexplained_s) < _FEWEST_COMMON:
            return True
        common_s = float(np.quantile(np.array(self._unexplained_s), _COMMON_QUANTILE))
        return slow.excess_s >= _ABOVE_COMMON * common_s

    def _stands_out(self, group: SlowStepGroup, at_s: float) -> bool:
        """Return whether a group costs much of the last minute, and more than all other groups without a cause.

        A cause that delays all phases alike is the machine, not the program.
        """
        if not group.costs_much_recently(at_s):
            return False
        if group.cause is not None:
            return True
        unexplained_s = 0.0
        for any_group in self._groups:
            if any_group.cause is None:
                unexplained_s += any_group.recent_s(at_s)
        return group.recent_s(at_s) >= 0.5 * unexplained_s

    def _nearest(
        self, part: str | None, kind: str | None, excess_s: float
    ) -> SlowStepGroup | None:
        """Return the group of this phase and cause whose steps cost about as much; None if there is none."""
        nearest = None
        least_ratio = _SAME_SIZE
        for group in self._groups:
            group_kind = None if group.cause is None else cause_kind(group.cause)
            has_no_part = part is None and kind is None and group.is_reported
            if group_kind != kind or (group.part != part and not has_no_part):
                continue
            typical_s = group.excess_s / group.times
            ratio = max(excess_s / typical_s, typical_s / excess_s)
            if kind is not None and kind.startswith(_CONTENTION):
                ratio = 1.0  # other processes delay steps by any time
            if ratio <= least_ratio:
                nearest = group
                least_ratio = ratio
        return nearest

    def _drop_cheapest(self, new_group: SlowStepGroup) -> None:
        """Drop the group that costs least, but not ``new_group``, if there are too many."""
        if len(self._groups) <= _MOST_GROUPS:
            return
        old_groups = [group for group in self._groups if group is not new_group]
        cheapest = min(old_groups, key=lambda group: group.excess_s)
        self._groups.remove(cheapest)

    def to_write(self, at_s: float, run_is_over: bool) -> Sequence[SlowStepGroup]:
        """Return the groups whose event is to be written now; at the end, all that have changed."""
        groups = []
        for group in self._groups:
            if group.should_write(at_s) or (
                run_is_over and group.has_unwritten_steps()
            ):
                group.mark_written(at_s)
                groups.append(group)
        return groups


def cause_kind(cause: str) -> str:
    """Return ``cause`` without what differs each time: numbers, and which function was compiled."""
    kind = re.sub(r"\d[\d,.]*", "", cause).strip()
    if kind.startswith(("compilation", "recompilation")):
        return kind.split()[0]
    return kind

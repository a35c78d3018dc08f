"""Finds a part of the step that grows, or shrinks, slowly and all the time, whatever the machine does meanwhile.

A part that takes ever longer is hidden if the speed of the machine moves: the step's level then goes up and down. So
each part is compared with the rest of the step, which the machine slows down as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import rank_correlation
from lm_profiler.analysis.watch.level_change import LevelChange
from lm_profiler.analysis.watch.step_blocks import (
    Seconds,
    StepBlock,
    mean_seconds,
    middle_half,
)
from lm_profiler.record.parts import PARTS

_GROUPS = 12  # of successive blocks, by whose medians a part is judged
_FEWEST_BLOCKS = 96
# at the beginning and the end of a growth: they show the levels there
_BLOCKS_AT_ENDS = 12
_LOOK_RATIO = 1.1  # of the steps at two successive looks: the work stays small in the longest training

# -- what is a growth
_TREND = 0.85  # Kendall's rank correlation of the medians with time
_LEAST_OF_STEP = 0.06  # the share of the step that the growth is at least
_LEAST_OF_PART = 0.15  # the same of the part
# the share of it that lies between two successive groups at most: else it is a change
_LARGEST_JUMP = 0.4
# the share of it that the part must show without a comparison
_LEAST_SHARE_OF_RAW = 0.5
_LARGEST_SCATTER = 0.15  # of the medians around their line, as a share of the growth

# -- beside the changes of the whole step
# the share of a growth that is left at least: else the part has gone back
_SHARE_LEFT = 0.5
# the share of a growth from which on a drift of the whole step already stands for it
_SHARE_OF_KNOWN_DRIFT = 0.5
_SHARE_OF_WANDERING = 0.4  # of the distance between the levels of one that wanders


class PartGrowth(NamedTuple):
    """A part that grows, or shrinks, from the first of the blocks to the last."""

    part: str
    begin_s: float  # the part of a step in the first blocks, and in the last ones
    end_s: float

    @property
    def size_s(self) -> float:
        return self.end_s - self.begin_s


class GrowthFollower:
    """Keeps the parts of the step that grow, each as one change of level, which stands for the others of its part.

    ``take_changed`` returns those that are new or corrected.
    """

    def __init__(self) -> None:
        self._changes: dict[str, LevelChange] = {}  # by part
        self._changed: list[LevelChange] = []
        self._next_look = 0  # the step from which on it is worth looking again

    def look(
        self,
        blocks: Sequence[StepBlock],
        reported: Sequence[LevelChange],
        run_is_over: bool = False,
    ) -> None:
        """Look at all ``blocks`` of the run, and at the later half of them, if there are enough new ones.

        A growth that is one of the ``reported`` drifts already is left to it.
        """
        if not blocks:
            return
        step = blocks[-1].last_step
        if step < self._next_look and not run_is_over:
            return
        self._next_look = round(step * _LOOK_RATIO)
        growing = set()
        for window in (blocks, blocks[len(blocks) // 2 :]):
            for growth in growing_parts(window):
                if growth.part in growing or _is_known_drift(growth, reported):
                    continue
                growing.add(growth.part)
                self._keep(growth, window, run_is_over)
        for part in self._changes.keys() - growing:
            self._correct_ended(part, blocks, run_is_over)

    def take_changed(self) -> list[LevelChange]:
        """Return the changes that are new or differ from what was reported of them."""
        changed = self._changed
        self._changed = []
        for change in changed:
            change.mark_reported()
        return changed

    def covers(self, change: LevelChange) -> bool:
        """Return whether ``change`` is a piece of a growth: in its part and direction, after its begin, and smaller.

        A level that wanders is such a piece, too, if the part makes up much of the distance of its levels.
        """
        return any(
            _is_piece(change, part, growth) for part, growth in self._changes.items()
        )

    def _keep(
        self, growth: PartGrowth, blocks: Sequence[StepBlock], run_is_over: bool
    ) -> None:
        """Report ``growth``, or correct the size of the one that was reported."""
        if growth.part not in self._changes:
            before_s = mean_seconds(middle_half(blocks[:_BLOCKS_AT_ENDS]))
            before_s[PARTS.index(growth.part)] = growth.begin_s
            self._changes[growth.part] = LevelChange(
                since_step=blocks[0].first_step,
                before_s=before_s,
                after_s=before_s.copy(),
                found_step=blocks[-1].last_step,
                before_since_step=blocks[0].first_step,
                course="drift",
                is_gradual=True,
            )
        self._correct(growth.part, growth.end_s, run_is_over)

    def _correct_ended(
        self, part: str, blocks: Sequence[StepBlock], run_is_over: bool
    ) -> None:
        """Correct the size of a growth that has come to its end; one that has gone back is left as it was."""
        change = self._changes[part]
        column = PARTS.index(part)
        first = bisect_left(blocks, change.since_step, key=attrgetter("first_step"))
        seconds = np.array([block.seconds for block in blocks[first:]])
        if len(seconds) < 2 * _BLOCKS_AT_ENDS:
            return
        part_s = _at_usual_speed(seconds[:, column], seconds[:, -1])
        end_s = float(np.median(part_s[-_BLOCKS_AT_ENDS:]))
        size_s = (end_s - float(change.before_s[column])) * change.direction
        has_gone_back = size_s < _SHARE_LEFT * abs(change.size_s)
        if not has_gone_back:
            self._correct(part, end_s, run_is_over)

    def _correct(self, part: str, end_s: float, run_is_over: bool) -> None:
        change = self._changes[part]
        column = PARTS.index(part)
        after_s = change.before_s.copy()
        after_s[column] = end_s
        after_s[-1] += end_s - change.before_s[column]
        change.after_s = after_s
        is_due = change.is_corrected or run_is_over
        if is_due and change not in self._changed:
            self._changed.append(change)


def _is_known_drift(growth: PartGrowth, reported: Sequence[LevelChange]) -> bool:
    """Return whether one of the ``reported`` changes is a drift of the same part with most of the size."""
    for change in reported:
        is_drift = change.course == "drift" and change.part == growth.part
        share = change.size_s / growth.size_s
        if is_drift and share >= _SHARE_OF_KNOWN_DRIFT:
            return True
    return False


def _is_piece(change: LevelChange, part: str, growth: LevelChange) -> bool:
    """Return whether ``change`` is a piece of the ``growth`` of ``part``."""
    if change.since_step < growth.since_step:
        return False
    if change.course == "wanders":
        column = PARTS.index(part)
        part_size_s = float(change.after_s[column] - change.before_s[column])
        return part_size_s >= _SHARE_OF_WANDERING * change.size_s
    has_its_direction = change.direction == growth.direction
    is_smaller = abs(change.size_s) <= abs(growth.size_s)
    return change.part == part and has_its_direction and is_smaller


def growing_parts(blocks: Sequence[StepBlock]) -> list[PartGrowth]:
    """Return the parts of the step that grow or shrink all through ``blocks``; none if the blocks are too few."""
    if len(blocks) < _FEWEST_BLOCKS:
        return []
    seconds = np.array([block.seconds for block in blocks])
    groups = _groups_of(blocks)
    step_s = float(np.median(seconds[:, -1]))
    found = []
    for column, part in enumerate(PARTS):
        growth = _growth_of(part, seconds[:, column], seconds[:, -1], groups)
        if growth is not None and abs(growth.size_s) >= _LEAST_OF_STEP * step_s:
            found.append(growth)
    return found


def _groups_of(blocks: Sequence[StepBlock]) -> NDArray[np.int64]:
    """Return the number of the group of each block; all groups have about as many steps."""
    steps_before = np.cumsum([block.steps for block in blocks]) - blocks[0].steps
    groups: NDArray[np.int64] = steps_before * _GROUPS // (steps_before[-1] + 1)
    return groups


def _growth_of(
    part: str, part_s: Seconds, step_s: Seconds, groups: NDArray[np.int64]
) -> PartGrowth | None:
    """Return the growth of ``part``, which took ``part_s`` of ``step_s`` in each block; None if it does not grow."""
    if not (step_s > part_s).all():
        return None
    usual_s = _at_usual_speed(part_s, step_s)
    growth = PartGrowth(
        part,
        begin_s=float(np.median(usual_s[:_BLOCKS_AT_ENDS])),
        end_s=float(np.median(usual_s[-_BLOCKS_AT_ENDS:])),
    )
    medians_s = _medians_of_groups(usual_s, groups)
    line = _line_through(medians_s)
    size_s = abs(growth.size_s)
    if size_s < _LEAST_OF_PART * abs(growth.begin_s):
        return None

    raw_line = _line_through(_medians_of_groups(part_s, groups))
    raw_size_s = float(raw_line[-1] - raw_line[0]) * np.sign(growth.size_s)
    jumps_s = np.abs(np.diff(medians_s))
    scatter_s = float(np.std(medians_s - line))
    is_gradual = (
        abs(rank_correlation(medians_s)) >= _TREND
        and jumps_s.max() <= _LARGEST_JUMP * size_s
        and scatter_s <= _LARGEST_SCATTER * size_s
        and raw_size_s >= _LEAST_SHARE_OF_RAW * size_s
    )
    return growth if is_gradual else None


def _at_usual_speed(part_s: Seconds, step_s: Seconds) -> Seconds:
    """Return ``part_s`` as it would be if the rest of the step took its median in each block."""
    rest_s = step_s - part_s
    speed: Seconds = rest_s / np.median(rest_s)
    return part_s / speed


def _medians_of_groups(values: Seconds, groups: NDArray[np.int64]) -> Seconds:
    medians = [np.median(values[groups == group]) for group in range(_GROUPS)]
    return np.array(medians)


def _line_through(medians: Seconds) -> NDArray[np.float64]:
    """Return the line through ``medians``, at each of them."""
    places = np.arange(len(medians))
    slope, start = np.polyfit(places, medians, 1)
    line: NDArray[np.float64] = start + slope * places
    return line

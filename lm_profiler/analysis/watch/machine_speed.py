"""Takes the speed of the machine out of the steps: what slows all parts of a step alike.

The speed of a real machine moves by several percent, and by tens of percent beside other programs. A change of the
program is hidden among such moves: it lies in one or two parts of the step, while the machine slows all of them. So a
step is split into two factors: its time at the machine's usual speed, and how much slower the machine is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.watch.level_change import LevelChange
from lm_profiler.analysis.watch.levels import SMALLEST_CHANGE, LevelFollower
from lm_profiler.analysis.watch.step_blocks import (
    BLOCK,
    Seconds,
    StepBlock,
    StepNumbers,
    UnfinishedBlock,
    cut_into_blocks,
    logs_of,
)
from lm_profiler.record.parts import PARTS

# -- how slow the machine is
_LEAST_SHARE_OF_STEP = 0.02  # of a part that shows it
_FEWEST_PARTS = 3
# the machine is as slow as this share of the parts shows at least
_SHARE_OF_PARTS = 0.6
_LEAST_PART_S = 1e-9  # the logarithm of nothing is unknown

# -- the usual time of a part
_FIRST_BLOCKS = 5  # from which it is estimated
# It follows a part that the program changes by this share of the distance with each block, at first by more.
_FOLLOWED_SHARE = 0.01
_LARGEST_DISTANCE = 0.5  # a longer one counts as this
_CHANGED_DISTANCE = 0.1  # of a part that the program has changed

# -- how far the speed moves all the time
_BLOCKS_REMEMBERED = 800
_BLOCKS_APART = 50  # a thousand steps
_FEWEST_BLOCKS_APART = 4  # in a short run
_DISTANCES_IN_RUN = 6  # the distance is at most this fraction of the run
_MOST_LEFT = 0.06  # of the moves in the program's time

# -- what is reported of it
_LEAST_DRIFT = 0.02
_LEAST_CHANGE = 0.1
_LEAST_RANGE = 0.1  # of a speed that moves back and forth
_UNUSUAL_RATIO = 3.0  # of a change to the usual moves


class MachineSpeed:
    """Takes the machine's speed out of steps as they come, and follows it.

    Distances and changes of a time are logarithms. ``take_changed`` returns the changes of the speed, as those of a
    step that takes ``usual_step_s`` at the usual speed.
    """

    def __init__(self) -> None:
        self.usual_step_s = 0.0  # 0 until it is known
        self._unfinished = UnfinishedBlock()
        self._usual_parts = _UsualParts()
        # by how much the machine was slower than usual in each of the last blocks
        self._slowness_logs: deque[float] = deque(maxlen=_BLOCKS_REMEMBERED)
        self._follower = LevelFollower(self._is_worth_reporting)

    @property
    def slowness(self) -> float:
        """By which factor the machine is slower now than usual; 1 before it is known."""
        step_s = self._follower.level_s
        if step_s is None:
            return 1.0
        return step_s / self.usual_step_s

    @property
    def smallest_program_change(self) -> float:
        """The smallest change of the program that can be seen.

        The machine does not slow all parts by quite the same factor: the more it moves, the more is left of that.
        """
        return max(SMALLEST_CHANGE, min(self._usual_move(), _MOST_LEFT))

    def remove(
        self, steps: StepNumbers, seconds: Seconds
    ) -> tuple[StepNumbers, Seconds]:
        """Take the next steps, with their (n, TIMED) seconds.

        Returns:
            the numbers of the steps that fill blocks by now, and their (n, TIMED) seconds at the machine's usual speed.
        """
        is_known = self._usual_parts.are_known
        fewest_blocks = 1 if is_known else _FIRST_BLOCKS
        steps, seconds = self._unfinished.fill(steps, seconds, fewest_blocks)
        if len(steps) == 0:
            return steps, seconds

        blocks = cut_into_blocks(steps, seconds)
        if not is_known:
            self._usual_parts.estimate(blocks[:_FIRST_BLOCKS])
            self.usual_step_s = float(np.median(seconds[:, -1]))
        moves = np.array([self._usual_parts.moves_in(block) for block in blocks])
        parts_s = seconds[:, :-1] * np.exp(-np.repeat(moves, BLOCK, axis=0))
        program_s = np.column_stack([parts_s, parts_s.sum(axis=1)])
        program_blocks = cut_into_blocks(steps, program_s)
        self._follow(steps, logs_of(blocks) - logs_of(program_blocks))
        return steps, program_s

    def take_changed(self) -> list[LevelChange]:
        """Return the changes of the speed that are new or corrected."""
        return self._follower.take_changed()

    def finish(self) -> None:
        self._follower.finish()

    def forget_unfinished(self) -> None:
        """Forget the steps that fill no block yet, because steps are left out after them."""
        self._unfinished.forget()

    def _follow(self, steps: StepNumbers, slowness_logs: NDArray[np.float64]) -> None:
        """Follow by how much the machine was slower than usual in the blocks of ``steps``."""
        self._slowness_logs.extend(slowness_logs.tolist())
        step_s = self.usual_step_s * np.exp(np.repeat(slowness_logs, BLOCK))
        equal_shares = np.full(len(PARTS), 1.0 / len(PARTS))
        parts_s = np.outer(step_s, equal_shares)
        self._follower.add(steps, np.column_stack([parts_s, step_s]))

    def _is_worth_reporting(self, change: LevelChange) -> bool:
        """Return whether the speed has changed by more than it moves all the time."""
        if change.course in ("wanders", "alternates"):
            return change.log_size >= _LEAST_RANGE
        least = _LEAST_DRIFT if change.course == "drift" else _LEAST_CHANGE
        return change.log_size >= max(least, _UNUSUAL_RATIO * self._usual_move())

    def _usual_move(self) -> float:
        """Return how far the speed moves over 50 blocks, a thousand steps, or a sixth of a shorter run: the median.

        It is infinite while too few steps are known.
        """
        logs = np.array(self._slowness_logs)
        distance = min(_BLOCKS_APART, len(logs) // _DISTANCES_IN_RUN)
        if distance < _FEWEST_BLOCKS_APART:
            return math.inf
        return float(np.median(np.abs(logs[distance:] - logs[:-distance])))


class _UsualParts:
    """The usual time of each part of the step, from which those of a block differ."""

    def __init__(self) -> None:
        # (PARTS,) logarithms of seconds; empty until they are known
        self._logs: NDArray[np.float64] = np.empty(0)
        self._blocks = 0

    @property
    def are_known(self) -> bool:
        return len(self._logs) > 0

    def estimate(self, blocks: Sequence[StepBlock]) -> None:
        """Estimate the usual times from the first ``blocks``."""
        logs = np.array([_logs_of_parts(block) for block in blocks])
        self._logs = np.median(logs, axis=0)

    def moves_in(self, block: StepBlock) -> NDArray[np.float64]:
        """Return (PARTS,) by how much the machine lengthens the parts in ``block``.

        A part that has not moved, such as one that waits for a disk, stays as it is. One that has moved further than
        the others keeps the rest.
        """
        self._blocks += 1
        distances = _logs_of_parts(block) - self._logs
        common_move = self._common_move(distances)
        moves: NDArray[np.float64] = np.clip(
            distances, min(common_move, 0.0), max(common_move, 0.0)
        )
        # A part that the program has changed moves with the machine from where it is now.
        are_changed = np.abs(distances - moves) > _CHANGED_DISTANCE
        moves[are_changed] = common_move
        # A part that the program changed becomes usual with time, so that it shows the machine's speed again.
        changes = np.clip(distances - moves, -_LARGEST_DISTANCE, _LARGEST_DISTANCE)
        followed_share = max(_FOLLOWED_SHARE, 1.0 / self._blocks)
        self._logs = self._logs + followed_share * changes
        return moves

    def _common_move(self, distances: NDArray[np.float64]) -> float:
        """Return how far most parts have moved in one direction; 0 if they have not, or if too few parts show it."""
        usual_s = np.exp(self._logs)
        are_large = usual_s >= _LEAST_SHARE_OF_STEP * usual_s.sum()
        if are_large.sum() < _FEWEST_PARTS:
            return 0.0
        distances = distances[are_large]
        are_near = np.abs(distances - np.median(distances)) <= _CHANGED_DISTANCE
        if are_near.sum() >= _FEWEST_PARTS:
            distances = distances[are_near]
        low, high = np.quantile(distances, [1.0 - _SHARE_OF_PARTS, _SHARE_OF_PARTS])
        if low > 0.0:
            return float(low)
        return min(float(high), 0.0)


def _logs_of_parts(block: StepBlock) -> NDArray[np.float64]:
    """Return (PARTS,) the logarithms of the parts' seconds."""
    logs: NDArray[np.float64] = np.log(np.maximum(block.seconds[:-1], _LEAST_PART_S))
    return logs

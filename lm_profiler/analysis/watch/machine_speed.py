"""Separates changes of the machine's speed from changes of the program.

The speed of a real machine varies by several percent, and by tens of percent if other programs run. Such variations
hide changes of the program. But a slower machine lengthens all parts of a step, while a change of the program
lengthens one or two of them. So each step time is divided into two factors: the time that the step would take at the
machine's usual speed, and the slowness of the machine. How strongly a part follows the machine is estimated from quick
moves of all parts. So a part that the program lengthens slowly, while the machine becomes faster, is not mistaken for
one that does not depend on the machine.

A *move* is by how much a part has become longer: the logarithm of the factor, so that a move of 0.1 is about 10 %.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

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
from lm_profiler.record.parts import PARTS, TIMED

# All moves, changes and distances of times are differences of natural logarithms.

# -- how slow the machine is
_LEAST_SHARE_OF_STEP = 0.02  # shorter parts are not used to estimate the slowness
_FEWEST_PARTS = 3  # with fewer parts the slowness is not estimated
# the machine counts as slower by the amount that at least this share of the parts exceeds
_SHARE_OF_PARTS = 0.6
_LEAST_PART_S = 1e-9  # shorter parts count as this, because 0 has no logarithm

# -- the usual time of a part
_FIRST_BLOCKS = 5  # blocks from which it is first estimated
# With each block, the usual time of a part moves by this share towards its present time (at first by a larger one).
_FOLLOWED_SHARE = 0.01
_LARGEST_DISTANCE = 0.5  # larger distances from the usual time count as this
_CHANGED_DISTANCE = 0.1  # the program has changed a part that is farther from where the machine moved it
# The program has changed all parts if those that it changed by this much more than most make up this share of what the
# step has changed by.
_FAR_BEYOND = 0.25
_SHARE_BEYOND = 0.5
# blocks before such a change with whose median those after it are compared
_BLOCKS_BEFORE = 10
_FEWEST_BEFORE = 3
_BLOCKS_AFTER = 10  # blocks after it that show whether it lasts
_FEWEST_LASTING = 7  # the fewest of these in which the parts are far beyond the others

# -- how strongly a part follows the machine
_BLOCKS_BETWEEN = 4  # moves of the machine are measured over so many blocks
_LEAST_MOVE = 0.04  # smaller ones are mostly noise
_FEWEST_MOVES = 12  # with fewer moves it is unknown how strongly
# If responses leave more than this share of the parts' squared moves, on average, they are unknown: other programs take
# the CPU away from any part. In real loops it was below 0.15 on nearly all idle machines, and 0.2 to 0.5 on busy ones.
_LARGEST_ERROR_SHARE = 0.15
_LEAST_SQUARES = 1e-12  # smaller sums of squares count as this, to divide by them
_STRONGEST = 1.5  # a part follows at most this many times as far as most parts
# A response is uncertain by so many standard errors (many, because successive moves overlap), and at least by this.
_STANDARD_ERRORS = 4.0
_LEAST_UNCERTAINTY = 0.1
# the program has changed a part that is farther from where its known response may have moved it
_BEYOND_RESPONSE = 0.05

# -- how far the machine's speed usually varies
_BLOCKS_REMEMBERED = 800
_BLOCKS_APART = 50  # the distance over which variations are measured: a thousand steps
_FEWEST_BLOCKS_APART = 4  # the shortest such distance, for short runs
_DISTANCES_IN_RUN = 6  # the run must be at least this many times the distance
# the most of these variations that may remain in the program's times after the division
_MOST_LEFT = 0.06

# -- which changes of the speed are reported
_LEAST_DRIFT = 0.02
_LEAST_CHANGE = 0.13  # parts that follow the machine by more than most parts count, too
_LEAST_RANGE = 0.1  # the least reported range of a speed that moves back and forth
# a reported change is at least this many times the usual variation
_UNUSUAL_RATIO = 3.0


class MachineSpeed:
    """Follows the speed of the machine, and removes its variations from the times of steps as they arrive.

    ``take_changed`` returns the changes of the speed. They are expressed as changes of the time of an imaginary step
    that takes ``usual_step_s`` at the usual speed.
    """

    def __init__(self) -> None:
        self.usual_step_s = 0.0  # 0 until it is known
        self._unfinished = UnfinishedBlock()
        self._usual_parts = _UsualParts()
        # the steps in whole blocks that have not been returned
        self._steps: StepNumbers = np.empty(0, np.int64)
        self._seconds: Seconds = np.empty((0, len(TIMED)))  # their seconds
        # for each of the last blocks, the logarithm of the factor by which the machine was slower than usual
        self._slowness_logs: deque[float] = deque(maxlen=_BLOCKS_REMEMBERED)
        # the first step of each of these blocks
        self._first_steps: deque[int] = deque(maxlen=_BLOCKS_REMEMBERED)
        # the ``_median_speed_change`` of these
        self._usual_change = math.inf
        self._follower = LevelFollower(self._is_worth_reporting)

    @property
    def slowness(self) -> float:
        """The factor by which the machine is slower now than usual; 1 before it is known."""
        step_s = self._follower.level_s
        if step_s is None:
            return 1.0
        return step_s / self.usual_step_s

    def mean_slowness(self, first_step: int, last_step: int) -> float:
        """Return the mean ``slowness`` from ``first_step`` to ``last_step``; that of now if these are not remembered.

        The first block in this range may also hold steps from before it, so the mean begins with the block after it.
        """
        first_steps = np.array(self._first_steps)
        is_in_range = (first_steps >= first_step) & (first_steps <= last_step)
        if not is_in_range.any():
            return self.slowness
        return float(np.exp(np.array(self._slowness_logs)[is_in_range]).mean())

    @property
    def smallest_program_change(self) -> float:
        """The smallest change of the program that can be detected."""
        # A slower machine does not lengthen all parts by exactly the same factor, so that some of its variation
        # remains in the program's times: the more the speed varies, the more.
        remaining_variation = min(self._usual_change, _MOST_LEFT)
        return max(SMALLEST_CHANGE, remaining_variation)

    def remove(
        self, steps: StepNumbers, seconds: Seconds
    ) -> tuple[StepNumbers, Seconds]:
        """Return the seconds that steps would have taken at the machine's usual speed.

        Steps are processed in whole blocks, so the steps returned may differ from those passed: the last steps of this
        call may wait for later calls, and the first ones returned may be from earlier calls.

        Args:
            steps: the numbers of the next steps.
            seconds: (n, TIMED) the seconds of their parts, and of the whole steps in the last column.
        """
        fewest_blocks = 1 if self._usual_parts.are_known else _FIRST_BLOCKS
        steps, seconds = self._unfinished.fill(steps, seconds, fewest_blocks)
        self._steps = np.concatenate([self._steps, steps])
        self._seconds = np.concatenate([self._seconds, seconds])
        return self._remove_from_blocks(run_is_over=False)

    def _remove_from_blocks(self, run_is_over: bool) -> tuple[StepNumbers, Seconds]:
        """Take the steps out for which the slowness of the machine is known; return them and their seconds without it.

        The slowness is passed to the follower.
        """
        blocks = cut_into_blocks(self._steps, self._seconds)
        if blocks and not self._usual_parts.are_known:
            self._usual_parts.estimate(blocks[:_FIRST_BLOCKS])
            self.usual_step_s = float(np.median(self._seconds[:, -1]))
        moves = self._known_moves(blocks, run_is_over)
        steps, seconds = self._take_steps(len(moves) * BLOCK)
        if not moves:
            return steps, seconds
        program_s = _without_moves(seconds, moves)
        program_blocks = cut_into_blocks(steps, program_s)
        slowness_logs = logs_of(blocks[: len(moves)]) - logs_of(program_blocks)
        self._pass_to_follower(steps, slowness_logs)
        return steps, program_s

    def _take_steps(self, count: int) -> tuple[StepNumbers, Seconds]:
        """Remove and return the first ``count`` steps, and their seconds."""
        steps = self._steps[:count]
        seconds = self._seconds[:count]
        self._steps = self._steps[count:]
        self._seconds = self._seconds[count:]
        return steps, seconds

    def _known_moves(
        self, blocks: Sequence[StepBlock], run_is_over: bool
    ) -> list[NDArray[np.float64]]:
        """Return for each of the first ``blocks`` (PARTS,) by how much the machine moves the parts.

        The list ends before a block in which the program may have changed all parts, as long as the run goes on and too
        few blocks follow that block: only they show whether the program has.
        """
        moves = []
        for index, block in enumerate(blocks):
            later = blocks[index + 1 : index + 1 + _BLOCKS_AFTER]
            is_decidable = len(later) == _BLOCKS_AFTER or run_is_over
            if not is_decidable and self._usual_parts.may_change_with(block):
                break
            moves.append(self._usual_parts.moves_in(block, later))
        return moves

    def take_changed(self) -> list[LevelChange]:
        """Return the changes of the speed that are new, or were corrected, since the last call."""
        return self._follower.take_changed()

    def finish(self) -> tuple[StepNumbers, Seconds]:
        """Return the steps that ``remove`` has not returned yet, and their seconds at the usual speed."""
        rest = self._remove_from_blocks(run_is_over=True)
        self._follower.finish()
        return rest

    def forget_unfinished(self) -> None:
        """Forget the steps of the unfinished block: the steps that follow them are missing."""
        self._unfinished.forget()

    def _pass_to_follower(
        self, steps: StepNumbers, slowness_logs: NDArray[np.float64]
    ) -> None:
        """Pass the slowness of the machine on to its follower, as the times of imaginary steps.

        Args:
            steps: the numbers of the steps.
            slowness_logs: (blocks,) the logarithm of the factor by which the machine was slower than usual.
        """
        self._slowness_logs.extend(slowness_logs.tolist())
        self._first_steps.extend(steps[::BLOCK].tolist())
        self._usual_change = self._median_speed_change()
        # (steps,) the imaginary steps
        step_s = self.usual_step_s * np.exp(np.repeat(slowness_logs, BLOCK))
        # The follower expects the times of all parts. Any split will do, because the speed of a machine has no parts.
        equal_shares = np.full(len(PARTS), 1.0 / len(PARTS))
        parts_s = np.outer(step_s, equal_shares)
        self._follower.add(steps, np.column_stack([parts_s, step_s]))

    def _is_worth_reporting(self, change: LevelChange) -> bool:
        """Return whether a change of the speed is large compared with the variation that the machine always has."""
        if change.course in ("wanders", "alternates"):
            return change.log_size >= _LEAST_RANGE
        least = _LEAST_DRIFT if change.course == "drift" else _LEAST_CHANGE
        least_unusual = _UNUSUAL_RATIO * self._usual_change
        return change.log_size >= max(least, least_unusual)

    def _median_speed_change(self) -> float:
        """Return the median change of the speed over 50 blocks (a thousand steps), or a sixth of a shorter run.

        It is infinite while there are too few blocks to estimate it.
        """
        logs = np.array(self._slowness_logs)
        distance = min(_BLOCKS_APART, len(logs) // _DISTANCES_IN_RUN)
        if distance < _FEWEST_BLOCKS_APART:
            return math.inf
        changes = np.abs(logs[distance:] - logs[:-distance])
        return float(np.median(changes))


def _without_moves(seconds: Seconds, moves: Sequence[NDArray[np.float64]]) -> Seconds:
    """Return ``seconds`` of steps without the ``moves`` of their parts, which are given for each block of the steps."""
    moves_by_step = np.repeat(np.array(moves), BLOCK, axis=0)  # (steps, PARTS)
    parts_s = seconds[:, :-1] * np.exp(-moves_by_step)
    return np.column_stack([parts_s, parts_s.sum(axis=1)])


class _UsualParts:
    """The usual time of each part of the step, from which it is computed how much slower the machine is in a block."""

    def __init__(self) -> None:
        # (PARTS,) logarithms of the usual seconds; empty until they are known
        self._logs: NDArray[np.float64] = np.empty(0)
        # (PARTS,) which parts are long enough to show the machine's speed
        self._are_large: NDArray[np.bool_] = np.empty(0, bool)
        self._blocks = 0  # number of blocks processed
        # (PARTS,) logarithms of the parts in each of the last blocks
        self._last_logs: deque[NDArray[np.float64]] = deque(maxlen=_BLOCKS_BEFORE + 1)
        # (PARTS,) their median without the last block, which may hold steps from before and from after a change; None
        # if they are too few
        self._logs_before: NDArray[np.float64] | None = None
        self._responses = _Responses()

    @property
    def are_known(self) -> bool:
        return len(self._logs) > 0

    def estimate(self, blocks: Sequence[StepBlock]) -> None:
        """Estimate the usual times from the first ``blocks``."""
        logs = np.array([_logs_of_parts(block) for block in blocks])
        self._set_logs(np.median(logs, axis=0))

    def may_change_with(self, block: StepBlock) -> bool:
        """Return whether the program may have changed all parts in ``block``; only the blocks after it show whether."""
        return self._moves_beyond_others(_logs_of_parts(block)) is not None

    def moves_in(
        self, block: StepBlock, later: Sequence[StepBlock]
    ) -> NDArray[np.float64]:
        """Return (PARTS,) by how much the machine moves the parts of ``block``; then update their usual times.

        Of the distance of a part from its usual time, only what most parts have in common is due to the machine.

        Args:
            block: the next block.
            later: the blocks after it, as far as they are known.
        """
        logs = _logs_of_parts(block)
        self._follow_change_of_all(logs, later)
        self._responses.add(logs, self._are_large)
        distances = logs - self._logs
        moves = self._moves_by_machine(distances)
        self._follow_program(distances - moves)
        return moves

    def _moves_by_machine(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (PARTS,) the share of the ``distances`` from the usual times that is due to the machine."""
        common_move = self._common_move(distances)
        are_known = self._responses.are_known(self._are_large)
        weakest, usual, strongest = self._responses.ranges(are_known)
        # A part moves with the machine as far as its response allows: a wait for a disk, for example, not at all.
        least_moves = common_move * weakest
        most_moves = common_move * strongest
        machine_is_faster = common_move < 0.0
        if machine_is_faster:
            least_moves, most_moves = most_moves, least_moves
        moves: NDArray[np.float64] = np.clip(distances, least_moves, most_moves)
        # A part beyond its limits was changed by the program. The machine still moves it by its usual response.
        changed_distance = _BEYOND_RESPONSE if are_known else _CHANGED_DISTANCE
        are_changed = np.abs(distances - moves) > changed_distance
        moves[are_changed] = common_move * usual[are_changed]
        return moves

    def _follow_program(self, program_moves: NDArray[np.float64]) -> None:
        """Move the usual times by a share of the (PARTS,) moves of a block that are due to the program.

        So a part that the program has changed gets a new usual time, and can show the machine's speed again.
        """
        self._blocks += 1
        limited_moves = np.clip(program_moves, -_LARGEST_DISTANCE, _LARGEST_DISTANCE)
        # at first the mean of all blocks, later a mean in which old blocks count less and less
        followed_share = max(_FOLLOWED_SHARE, 1.0 / self._blocks)
        self._set_logs(self._logs + followed_share * limited_moves)

    def _follow_change_of_all(
        self, logs: NDArray[np.float64], later: Sequence[StepBlock]
    ) -> None:
        """Change the usual times of all parts if the program has changed one part for good, and with it all others.

        For example, after a sleep of some milliseconds a CPU computes at half its speed for a while, and a part that
        reads much memory leaves less of the caches to the others.

        Args:
            logs: (PARTS,) the logarithms of the parts in the next block.
            later: the blocks after it.
        """
        moves = self._lasting_moves(logs, later)
        if moves is not None:
            self._set_logs(self._logs + moves)
            self._last_logs.clear()
            self._responses.forget_last()
        self._last_logs.append(logs)
        logs_before = list(self._last_logs)[:-1]
        self._logs_before = None
        if len(logs_before) >= _FEWEST_BEFORE:
            self._logs_before = np.median(logs_before, axis=0)

    def _lasting_moves(
        self, logs: NDArray[np.float64], later: Sequence[StepBlock]
    ) -> NDArray[np.float64] | None:
        """Return (PARTS,) how far the parts have moved for good, if some move far beyond the others in the next block.

        Return None if they do not, if too few blocks follow, or if these show that it was only a burst.

        Args:
            logs: (PARTS,) the logarithms of the parts in the next block.
            later: the blocks after it.
        """
        if len(later) < _BLOCKS_AFTER or self._moves_beyond_others(logs) is None:
            return None
        all_later_logs = [_logs_of_parts(block) for block in later]
        lasting_blocks = 0
        for later_logs in all_later_logs:
            if self._moves_beyond_others(later_logs) is not None:
                lasting_blocks += 1
        if lasting_blocks < _FEWEST_LASTING:
            return None
        return self._moves_beyond_others(np.median(all_later_logs, axis=0))

    def _moves_beyond_others(
        self, logs: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Return (PARTS,) how far the parts have moved from the last blocks to ``logs``, if some moved very far.

        These must have moved far beyond the others, in the same direction, and make up most of the change of the step.
        Otherwise, and if too few blocks are known, return None.
        """
        before = self._logs_before
        if before is None:
            return None
        moves: NDArray[np.float64] = logs - before
        common_move = self._common_move(moves)
        if abs(common_move) < _CHANGED_DISTANCE:
            return None
        # compared in seconds, because a short part may change by any factor
        changes_s = np.abs(np.exp(logs) - np.exp(before))
        are_far_beyond = (moves - common_move) * np.sign(common_move) > _FAR_BEYOND
        if changes_s[are_far_beyond].sum() < _SHARE_BEYOND * changes_s.sum():
            return None
        return moves

    def _set_logs(self, logs: NDArray[np.float64]) -> None:
        self._logs = logs
        usual_s = np.exp(logs)
        self._are_large = usual_s >= _LEAST_SHARE_OF_STEP * usual_s.sum()

    def _common_move(self, distances: NDArray[np.float64]) -> float:
        """Return how far most parts have moved in the same direction.

        0 if they have moved in different directions, or if too few parts are long enough.

        Args:
            distances: (PARTS,) the distance of each part from its usual time.
        """
        are_large = self._are_large
        if np.count_nonzero(are_large) < _FEWEST_PARTS:
            return 0.0
        # Plain Python: for eight numbers it takes a tenth of NumPy's time.
        moves = sorted(distances[are_large].tolist())
        # parts far from the median were changed by the program, not by the machine
        middle = median(moves)
        near_moves = [move for move in moves if abs(move - middle) <= _CHANGED_DISTANCE]
        if len(near_moves) >= _FEWEST_PARTS:
            moves = near_moves
        # 60 % of the parts have moved by at least ``low``, and 60 % by at most ``high``
        low = _quantile(moves, 1.0 - _SHARE_OF_PARTS)
        high = _quantile(moves, _SHARE_OF_PARTS)
        if low > 0.0:
            return low
        return min(high, 0.0)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this ``share`` of the sorted ``values`` lies, between two of them linearly."""
    position = share * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])


class _Responses:
    """How strongly each part follows the machine, estimated from moves over a few blocks.

    A response of 1 means that the part moves as far as most parts. Over a few blocks the program changes little, so the
    response of a part can be estimated even if the program lengthens the part over thousands of steps.
    """

    def __init__(self) -> None:
        # (PARTS,) logarithms of the parts in each of the last blocks
        self._last_logs: deque[NDArray[np.float64]] = deque(maxlen=_BLOCKS_BETWEEN)
        self._moves = 0
        # sums over the moves, from which the response of each part is fitted by least squares
        self._squares = 0.0  # the common move (that of most parts), squared
        self._products = np.zeros(len(PARTS))  # the common move times the part's move
        self._part_squares = np.zeros(len(PARTS))  # the part's move, squared

    def add(self, logs: NDArray[np.float64], are_large: NDArray[np.bool_]) -> None:
        """Add the next block. Its parts that ``are_large`` show how far the machine has moved.

        ``logs`` are the (PARTS,) logarithms of the seconds of its parts.
        """
        if len(self._last_logs) == _BLOCKS_BETWEEN and are_large.sum() >= _FEWEST_PARTS:
            moves = logs - self._last_logs[0]
            common_move = median(moves[are_large].tolist())
            if abs(common_move) >= _LEAST_MOVE:
                # clipped because the program may have changed a part by far
                lowest, highest = sorted((0.0, _STRONGEST * common_move))
                moves = np.clip(moves, lowest, highest)
                self._moves += 1
                self._squares += common_move**2
                self._products += common_move * moves
                self._part_squares += moves**2
        self._last_logs.append(logs)

    def forget_last(self) -> None:
        """Forget the last blocks: later blocks differ from them because the program has changed the parts."""
        self._last_logs.clear()

    def are_known(self, are_large: NDArray[np.bool_]) -> bool:
        """Return whether there are enough moves, and the parts that ``are_large`` follow their responses closely."""
        if self._moves < _FEWEST_MOVES:
            return False
        part_squares = np.maximum(self._part_squares, _LEAST_SQUARES)
        error_shares = self._squared_errors() / part_squares
        return float(error_shares[are_large].mean()) <= _LARGEST_ERROR_SHARE

    def ranges(
        self, are_known: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return (PARTS,) the weakest, the likeliest and the strongest response that each part may have.

        Unknown responses may be anything from 0 to 1.
        """
        if not are_known:
            ones = np.ones(len(PARTS))
            return np.zeros(len(PARTS)), ones, ones
        responses = self._products / self._squares
        variances = self._squared_errors() / self._moves / self._squares
        uncertainties = np.maximum(
            _STANDARD_ERRORS * np.sqrt(variances), _LEAST_UNCERTAINTY
        )
        weakest = np.maximum(responses - uncertainties, 0.0)
        strongest = np.minimum(responses + uncertainties, _STRONGEST)
        return weakest, responses, strongest

    def _squared_errors(self) -> NDArray[np.float64]:
        """Return (PARTS,) the sum of squares of each part's moves that its response does not explain."""
        responses = self._products / self._squares
        errors: NDArray[np.float64] = self._part_squares - responses * self._products
        return np.maximum(errors, 0.0)


def _logs_of_parts(block: StepBlock) -> NDArray[np.float64]:
    """Return (PARTS,) logarithms of the seconds of the parts."""
    logs: NDArray[np.float64] = np.log(np.maximum(block.seconds[:-1], _LEAST_PART_S))
    return logs

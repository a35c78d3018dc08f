"""Blocks of successive steps with a robust mean each; and whether the means of blocks form a line or levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import TIMED

BLOCK = 20  # steps per block
# The mean of a block leaves out this many of its shortest steps, and as many of its longest.
_TRIMMED = 6

_LEAST_STEP_S = 1e-9  # shorter steps count as this, because 0 has no logarithm
# A drift counts as begun after the first block only if this reduces the squared error to this share.
_LATER_KNEE = 0.85
_FEWEST_FOR_LINE = 4  # blocks
# blocks on each side that show whether there are two levels, and not one line
_FEWEST_BEFORE_SPLIT, _FEWEST_AFTER_SPLIT = 3, 2
# A block is near a line if its distance from the line is at most this many times the median distance.
_NEAR_LINE = 4.0
_MOST_KNEES = 100  # blocks that are tried as the beginning of a drift
# The values of each of two levels may differ by at most this share of the gap between the levels.
_SPREAD_OF_LEVEL = 0.25
_FEWEST_OF_LEVEL = 2  # times that each of two levels must occur

StepNumbers = NDArray[np.int64]
Seconds = NDArray[np.float64]


class StepBlock(NamedTuple):
    """Successive steps, with means over the steps of middle length."""

    first_step: int
    last_step: int
    log_s: float  # mean logarithm of the seconds of a step
    seconds: Seconds  # (TIMED,) mean seconds of each part, and last of the whole step

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


class UnfinishedBlock:
    """Keeps the steps after the last full block."""

    def __init__(self) -> None:
        self._steps: StepNumbers = np.empty(0, np.int64)
        self._seconds: Seconds = np.empty((0, len(TIMED)))

    def fill(
        self, steps: StepNumbers, seconds: Seconds, fewest_blocks: int = 1
    ) -> tuple[StepNumbers, Seconds]:
        """Add the next steps with their (n, TIMED) seconds. Remove and return the steps that fill whole blocks.

        No step is returned while they fill less than ``fewest_blocks``.
        """
        steps = np.concatenate([self._steps, steps])
        seconds = np.concatenate([self._seconds, seconds])
        full_blocks = len(steps) // BLOCK
        if full_blocks < fewest_blocks:
            full_blocks = 0
        steps_in_blocks = full_blocks * BLOCK
        self._steps = steps[steps_in_blocks:]
        self._seconds = seconds[steps_in_blocks:]
        return steps[:steps_in_blocks], seconds[:steps_in_blocks]

    def forget(self) -> None:
        """Forget the steps: the steps that follow them are missing."""
        self._steps = self._steps[:0]
        self._seconds = self._seconds[:0]


class RecentSteps:
    """The last steps one by one. They show the exact step at which a level changed, which blocks do not."""

    def __init__(self) -> None:
        self._steps: StepNumbers = np.empty(0, np.int64)
        self._seconds: Seconds = np.empty((0, len(TIMED)))

    def add(self, steps: StepNumbers, seconds: Seconds, most_steps: int) -> None:
        """Add steps with their (n, TIMED) seconds, and keep the last ``most_steps``."""
        self._steps = np.concatenate([self._steps, steps])[-most_steps:]
        self._seconds = np.concatenate([self._seconds, seconds])[-most_steps:]

    def steps_between(
        self, first_step: int, last_step: int
    ) -> tuple[StepNumbers, Seconds]:
        """Return the steps from ``first_step`` to ``last_step`` and their seconds."""
        is_in_range = (self._steps >= first_step) & (self._steps <= last_step)
        return self._steps[is_in_range], self._seconds[is_in_range]

    def remove(self, first_step: int, last_step: int) -> None:
        """Forget the steps from ``first_step`` to ``last_step``."""
        is_kept_step = (self._steps < first_step) | (self._steps > last_step)
        self._steps = self._steps[is_kept_step]
        self._seconds = self._seconds[is_kept_step]


def cut_into_blocks(steps: StepNumbers, seconds: Seconds) -> list[StepBlock]:
    """Return n steps as blocks; n must be a multiple of ``BLOCK``.

    Args:
        steps: (n,) the numbers of the steps.
        seconds: (n, TIMED) the seconds of each part, and last of the whole step.
    """
    count = len(steps) // BLOCK
    step_s = seconds[:, -1].reshape(count, BLOCK)
    # (count, 8): the steps of middle length of each block, by their index in the block
    by_length = np.argsort(step_s, axis=1, kind="stable")
    middle_steps = by_length[:, _TRIMMED:-_TRIMMED]
    # the same by their row in ``seconds``
    first_rows = np.arange(count)[:, None] * BLOCK
    middle_rows = first_rows + middle_steps

    means = seconds[middle_rows].mean(axis=1)  # (count, TIMED)
    positive_s = np.maximum(seconds[middle_rows, -1], _LEAST_STEP_S)
    mean_logs = np.log(positive_s).mean(axis=1)
    blocks = []
    for index in range(count):
        block_steps = steps[index * BLOCK : (index + 1) * BLOCK]
        block = StepBlock(
            first_step=int(block_steps[0]),
            last_step=int(block_steps[-1]),
            log_s=float(mean_logs[index]),
            seconds=means[index],
        )
        blocks.append(block)
    return blocks


def merge_blocks(earlier: StepBlock, later: StepBlock) -> StepBlock:
    """Return one block in place of two successive ones; its means are weighted by their numbers of steps."""
    weight = earlier.steps / (earlier.steps + later.steps)
    return StepBlock(
        first_step=earlier.first_step,
        last_step=later.last_step,
        log_s=weight * earlier.log_s + (1.0 - weight) * later.log_s,
        seconds=weight * earlier.seconds + (1.0 - weight) * later.seconds,
    )


def mean_seconds(blocks: Sequence[StepBlock]) -> Seconds:
    """Return (TIMED,) mean seconds over all steps of ``blocks``."""
    weights = np.array([block.steps for block in blocks], dtype=float)
    seconds = np.array([block.seconds for block in blocks])  # (blocks, TIMED)
    mean: Seconds = weights @ seconds / weights.sum()
    return mean


def logs_of(blocks: Sequence[StepBlock]) -> NDArray[np.float64]:
    """Return (blocks,) the mean logarithm of each block's step times."""
    return np.array([block.log_s for block in blocks])


def middle_half(blocks: Sequence[StepBlock]) -> Sequence[StepBlock]:
    """Return ``blocks`` without the fastest quarter and the slowest quarter, which a short burst may have distorted."""
    quarter = len(blocks) // 4
    by_length = sorted(blocks, key=lambda block: block.log_s)
    return by_length[quarter : len(blocks) - quarter]


def winsorized_differences(
    values: NDArray[np.float64], centers: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by how much the mean of the first ``count`` values differs from a center, for each count of 2, 3, ….

    The means are winsorized: the value farthest from the center, on the side of the mean, is replaced by the second
    farthest. So a single outlier, such as a block with many slow steps, does not look like a change of level. If the
    replacement would change the sign of the difference, the difference counts as 0.

    Args:
        values: (n,) the values.
        centers: (n - 1,) the center for each count from 2 to n.
    """
    # (n,) each of the first 1, 2, … values
    counts = np.arange(1, len(values) + 1)
    totals = np.cumsum(values)
    highest = np.maximum.accumulate(values)
    lowest = np.minimum.accumulate(values)
    # (n - 1,) the following arrays are of the first 2, 3, … values
    counts, totals = counts[1:], totals[1:]
    second_highest = np.maximum.accumulate(np.minimum(values[1:], highest[:-1]))
    second_lowest = np.minimum.accumulate(np.maximum(values[1:], lowest[:-1]))
    means_if_above = (totals - highest[1:] + second_highest) / counts
    means_if_below = (totals - lowest[1:] + second_lowest) / counts
    differences: NDArray[np.float64] = np.where(
        totals > counts * centers,
        np.maximum(means_if_above - centers, 0.0),
        np.minimum(means_if_below - centers, 0.0),
    )
    return differences


def fit_line_better(earlier: Sequence[StepBlock], later: Sequence[StepBlock]) -> bool:
    """Return whether one straight line fits ``earlier`` and ``later`` blocks better than a constant level for each.

    The fit with the smaller sum of squared errors is better. The errors are those of the logarithms, weighted by the
    number of steps of each block.
    """
    if len(earlier) < _FEWEST_BEFORE_SPLIT or len(later) < _FEWEST_AFTER_SPLIT:
        return False
    blocks = [*earlier, *later]
    weights = np.array([block.steps for block in blocks], dtype=float)
    logs = logs_of(blocks)

    split = len(earlier)
    levels = np.empty(len(blocks))
    levels[:split] = np.average(logs[:split], weights=weights[:split])
    levels[split:] = np.average(logs[split:], weights=weights[split:])
    error_of_levels = float(weights @ (logs - levels) ** 2)

    middle_steps = _middle_steps(blocks)
    # polyfit squares its weights
    slope, start = np.polyfit(middle_steps, logs, 1, w=np.sqrt(weights))
    error_of_line = float(weights @ (logs - start - slope * middle_steps) ** 2)
    return error_of_line < error_of_levels


def _middle_steps(blocks: Sequence[StepBlock]) -> NDArray[np.float64]:
    """Return (blocks,) the step in the middle of each block, for lines over the steps."""
    first_and_last = [block.first_step + block.last_step for block in blocks]
    middle_steps: NDArray[np.float64] = np.array(first_and_last) / 2.0
    return middle_steps


def knee_of(blocks: Sequence[StepBlock]) -> int:
    """Return the index of the block at which a constant level turns into a rising or falling line.

    For each block in turn, a constant level up to the block and a line from the block on are fitted. The block with the
    least squared error is returned.
    """
    logs = logs_of(blocks)
    first_steps = np.array([float(block.first_step) for block in blocks])
    best_knee = 0
    least_error = math.inf
    stride = max(len(blocks) // _MOST_KNEES, 1)  # of many blocks, not all are tried
    last_knee = len(blocks) - _FEWEST_FOR_LINE
    for knee in range(0, last_knee + 1, stride):
        # a straight line from the knee on, and before it a constant
        steps_since_knee = np.maximum(first_steps - first_steps[knee], 0.0)
        design = np.column_stack([np.ones(len(blocks)), steps_since_knee])
        solution, *_ = np.linalg.lstsq(design, logs, rcond=None)
        error = float(((logs - design @ solution) ** 2).sum())
        # A drift may begin with the run. So a later block replaces the first one only if it fits clearly better.
        needed_share = _LATER_KNEE if best_knee == 0 else 1.0
        if error < needed_share * least_error:
            best_knee = knee
            least_error = error
    return best_knee


def end_of_line(blocks: Sequence[StepBlock]) -> Seconds:
    """Return (TIMED,) the seconds at the last block, from a line through all blocks; the mean if they are too few."""
    if len(blocks) < _FEWEST_FOR_LINE:
        return mean_seconds(blocks)
    middle_steps = _middle_steps(blocks)
    seconds = np.array([block.seconds for block in blocks])  # (blocks, TIMED)
    # from -1 at the first block to 0 at the last, where the line has the value of its constant term
    positions = (middle_steps - middle_steps[-1]) / (middle_steps[-1] - middle_steps[0])
    design = np.column_stack([np.ones(len(blocks)), positions])
    is_near_line = np.full(len(blocks), True)
    # The second fit leaves out blocks whose whole step (the last column) is far from the first line.
    for _ in range(2):
        # (2, TIMED) the constant terms and the slopes
        line, *_ = np.linalg.lstsq(
            design[is_near_line], seconds[is_near_line], rcond=None
        )
        distances_s = np.abs(seconds[:, -1] - design @ line[:, -1])
        is_near_line = distances_s <= _NEAR_LINE * np.median(distances_s)
    end_s: Seconds = line[0]
    return end_s


def are_two_levels(levels_s: Sequence[float]) -> bool:
    """Return whether the levels form two clusters of at least two levels each, narrow compared with the gap between."""
    logs = np.sort(np.log(np.array(levels_s)))
    # The two clusters can only be the levels below and above the widest gap.
    gaps = np.diff(logs)
    widest = int(gaps.argmax())
    low_cluster = logs[: widest + 1]
    high_cluster = logs[widest + 1 :]
    if min(len(low_cluster), len(high_cluster)) < _FEWEST_OF_LEVEL:
        return False
    largest_spread = max(float(np.ptp(low_cluster)), float(np.ptp(high_cluster)))
    return largest_spread <= _SPREAD_OF_LEVEL * float(gaps[widest])

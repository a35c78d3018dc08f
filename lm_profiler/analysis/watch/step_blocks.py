"""Blocks of successive steps, whose means single slow steps do not move; and whether they make a line or levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import TIMED

BLOCK = 20  # steps of a block
_TRIMMED = 6  # of them on either side; the block's value is the mean of the rest

_LEAST_STEP_S = 1e-9  # the logarithm of nothing is unknown
# share of the squared error that is left if a drift began later than with its first block
_LATER_KNEE = 0.85
_MOST_KNEES = 100  # places at which a knee is tried
# two levels: how far each may scatter, as a share of the gap between them
_SPREAD_OF_LEVEL = 0.25
_FEWEST_OF_LEVEL = 2  # times that each of two levels occurs

StepNumbers = NDArray[np.int64]
Seconds = NDArray[np.float64]


class StepBlock(NamedTuple):
    """Some successive steps."""

    first_step: int
    last_step: int
    log_s: float  # mean logarithm of the step's seconds, of those in the middle
    seconds: Seconds  # (TIMED,) means of the same steps

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


class UnfinishedBlock:
    """Keeps the last steps, which fill no block yet."""

    def __init__(self) -> None:
        self._steps: StepNumbers = np.empty(0, np.int64)
        self._seconds: Seconds = np.empty((0, len(TIMED)))

    def fill(
        self, steps: StepNumbers, seconds: Seconds, fewest_blocks: int = 1
    ) -> tuple[StepNumbers, Seconds]:
        """Take the next steps with their (n, TIMED) seconds, and return those that fill whole blocks.

        None are returned if they fill less than ``fewest_blocks``.
        """
        steps = np.concatenate([self._steps, steps])
        seconds = np.concatenate([self._seconds, seconds])
        count = len(steps) // BLOCK * BLOCK
        if count < fewest_blocks * BLOCK:
            count = 0
        self._steps = steps[count:]
        self._seconds = seconds[count:]
        return steps[:count], seconds[:count]

    def forget(self) -> None:
        """Forget the steps, because others are left out after them."""
        self._steps = self._steps[:0]
        self._seconds = self._seconds[:0]


class RecentSteps:
    """The last steps one by one: they show where a level changed more exactly than blocks do."""

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
    """Return the blocks of n steps, a multiple of ``BLOCK``, with their (n, TIMED) seconds."""
    count = len(steps) // BLOCK
    step_s = seconds[:, -1].reshape(count, BLOCK)
    # (count, steps in the middle): the place in its block, then the row of ``seconds``
    by_length = np.argsort(step_s, axis=1, kind="stable")
    middle_places = by_length[:, _TRIMMED:-_TRIMMED]
    middle_rows = middle_places + np.arange(count)[:, None] * BLOCK
    means = seconds[middle_rows].mean(axis=1)
    positive_s = np.maximum(seconds[middle_rows, -1], _LEAST_STEP_S)
    logs = np.log(positive_s).mean(axis=1)
    blocks = []
    for index in range(count):
        first_step = int(steps[index * BLOCK])
        last_step = int(steps[(index + 1) * BLOCK - 1])
        log_s = float(logs[index])
        blocks.append(StepBlock(first_step, last_step, log_s, means[index]))
    return blocks


def merge_blocks(earlier: StepBlock, later: StepBlock) -> StepBlock:
    """Return the two as one block."""
    weight = earlier.steps / (earlier.steps + later.steps)
    log_s = weight * earlier.log_s + (1.0 - weight) * later.log_s
    seconds = weight * earlier.seconds + (1.0 - weight) * later.seconds
    return StepBlock(earlier.first_step, later.last_step, log_s, seconds)


def mean_seconds(blocks: Sequence[StepBlock]) -> Seconds:
    """Return (TIMED,) the mean of the steps of ``blocks``."""
    weights = np.array([block.steps for block in blocks], dtype=float)
    seconds = np.array([block.seconds for block in blocks])
    mean: Seconds = weights @ seconds / weights.sum()
    return mean


def logs_of(blocks: Sequence[StepBlock]) -> NDArray[np.float64]:
    """Return the logarithm of each block."""
    return np.array([block.log_s for block in blocks])


def middle_half(blocks: Sequence[StepBlock]) -> Sequence[StepBlock]:
    """Return the middle half of ``blocks`` by how long their steps took, so that a burst among them counts little."""
    quarter = len(blocks) // 4
    by_length = sorted(blocks, key=lambda block: block.log_s)
    return by_length[quarter : len(blocks) - quarter]


def winsorized_differences(
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


def make_line(earlier: Sequence[StepBlock], later: Sequence[StepBlock]) -> bool:
    """Return whether one line fits the blocks better than two levels."""
    if len(earlier) < 3 or len(later) < 2:
        return False
    blocks = [*earlier, *later]
    weights = np.array([block.steps for block in blocks], dtype=float)
    logs = logs_of(blocks)
    middles = np.array([block.first_step + block.last_step for block in blocks]) / 2.0
    levels = np.empty(len(blocks))
    for side in (slice(0, len(earlier)), slice(len(earlier), None)):
        levels[side] = np.average(logs[side], weights=weights[side])
    slope, start = np.polyfit(middles, logs, 1, w=np.sqrt(weights))
    error_of_levels = float(weights @ (logs - levels) ** 2)
    error_of_line = float(weights @ (logs - start - slope * middles) ** 2)
    return error_of_line < error_of_levels


def knee_of(blocks: Sequence[StepBlock]) -> int:
    """Return the index of the block at which a level becomes a line."""
    logs = logs_of(blocks)
    begins = np.array([float(block.first_step) for block in blocks])
    best_knee = 0
    least_error = math.inf
    for knee in range(0, len(blocks) - 3, max(len(blocks) // _MOST_KNEES, 1)):
        rise = np.maximum(begins - begins[knee], 0.0)
        design = np.column_stack([np.ones(len(blocks)), rise])
        solution, *_ = np.linalg.lstsq(design, logs, rcond=None)
        error = float(((logs - design @ solution) ** 2).sum())
        # The first block stays the choice unless a later one is clearly better: a drift may begin with the run.
        share = _LATER_KNEE if best_knee == 0 else 1.0
        if error < share * least_error:
            best_knee = knee
            least_error = error
    return best_knee


def end_of_line(blocks: Sequence[StepBlock]) -> Seconds:
    """Return (TIMED,) where the line through ``blocks`` ends; of fewer than four, their mean."""
    if len(blocks) < 4:
        return mean_seconds(blocks)
    middles = np.array([(block.first_step + block.last_step) / 2.0 for block in blocks])
    seconds = np.array([block.seconds for block in blocks])
    from_end = (middles - middles[-1]) / (middles[-1] - middles[0])
    design = np.column_stack([np.ones(len(blocks)), from_end])
    is_usual = np.full(len(blocks), True)
    for _ in range(2):  # the second line leaves out what lies far off the first one
        line, *_ = np.linalg.lstsq(design[is_usual], seconds[is_usual], rcond=None)
        distances_s = np.abs(seconds[:, -1] - design @ line[:, -1])
        is_usual = distances_s <= 4.0 * np.median(distances_s)
    end_s: Seconds = line[0]
    return end_s


def are_two_levels(levels_s: Sequence[float]) -> bool:
    """Return whether the levels are two: each is near one of them, and each of the two occurs at least twice."""
    logs = np.sort(np.log(np.array(levels_s)))
    gaps = np.diff(logs)
    split = int(gaps.argmax()) + 1
    low = logs[:split]
    high = logs[split:]
    if len(low) < _FEWEST_OF_LEVEL or len(high) < _FEWEST_OF_LEVEL:
        return False
    spread = max(float(low[-1] - low[0]), float(high[-1] - high[0]))
    return spread <= _SPREAD_OF_LEVEL * float(gaps.max())

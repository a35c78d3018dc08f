"""A change of level: the steps of a running training have become longer or shorter, for more than a moment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lm_profiler.analysis.steps.part_changes import (
    is_uniform,
    part_of_change,
    part_with,
)
from lm_profiler.analysis.steps.step_model import SMALLEST_EFFECT
from lm_profiler.analysis.watch.step_blocks import Seconds
from lm_profiler.record.parts import PARTS

_ONLY_PART_SHARE = 0.8  # with this share of the change, the part counts as the only one
# in logarithms: the speed of real machines varies by this much, above all of shared ones
_LARGEST_OF_MACHINE = 0.1
# A change is undone if the level comes back to within this share of the change.
_RETURN_SHARE = 0.25
# A change is reported again if its estimated size differs by this share from the one reported; a drift, by the second.
_CORRECTED = 0.03
_DRIFT_GROWTH = 0.1
_VERY_SMALL_BESIDE_DRIFT = 0.1  # share of a drift's size

Course = Literal["drift", "wanders", "alternates"]


@dataclass(eq=False, kw_only=True)
class LevelChange:
    """A change in the level of step times. Its estimates are corrected while more steps arrive."""

    since_step: int  # the first step of the new level
    before_s: Seconds  # (TIMED,) the old level: mean seconds of each part, and last of the whole step
    after_s: Seconds  # the same for the new level
    found_step: int  # the last step that was known when the change was found
    before_since_step: int  # the first step of the old level
    course: Course | None = None  # None: a single change
    is_gradual: bool = False  # whether a drift rises continuously, and not in stairs
    # the last step before the level went back; None: it has not
    until_step: int | None = None
    times: int = 1  # number of changes that were merged into this one
    # whether it ended a level that was far longer than those after it, none of which came back to it
    ends_long_level: bool = False
    # whether it was merged into another change, or turned out to be none
    is_withdrawn: bool = False
    # whether it is too small to report, by the present estimate
    is_hidden: bool = False
    _reported_s: float | None = None  # the size that was last reported

    @property
    def size_s(self) -> float:
        return float(self.after_s[-1] - self.before_s[-1])

    @property
    def log_size(self) -> float:
        """The absolute logarithm of the ratio of the new level to the old one."""
        return abs(math.log(self.after_s[-1] / self.before_s[-1]))

    @property
    def direction(self) -> int:
        return 1 if self.size_s > 0 else -1

    @property
    def part(self) -> str | None:
        """The part that makes up most of the change; None if no part does, or all have changed by the same ratio."""
        # without the whole step, which is the last entry of a level
        index = part_of_change(self.before_s[:-1], self.after_s[:-1])
        return None if index is None else PARTS[index]

    @property
    def only_part(self) -> str | None:
        """The part of the step that makes up nearly all of the change; None if no part alone does."""
        index = part_with(self.before_s[:-1], self.after_s[:-1], _ONLY_PART_SHARE)
        return None if index is None else PARTS[index]

    @property
    def was_reported(self) -> bool:
        return self._reported_s is not None

    @property
    def is_corrected(self) -> bool:
        """Whether the estimated size differs clearly from the one last reported, or none was reported."""
        if self._reported_s is None:
            return True
        share = _DRIFT_GROWTH if self.course == "drift" else _CORRECTED
        return abs(self.size_s - self._reported_s) > share * abs(self._reported_s)

    @property
    def is_negligible(self) -> bool:
        """Whether the change has turned out to be none, now that more steps are known."""
        return self.log_size < SMALLEST_EFFECT

    @property
    def is_uniform(self) -> bool:
        """Whether all parts have changed by about the same ratio."""
        # without the whole step, which is the last entry of a level
        return is_uniform(self.before_s[:-1], self.after_s[:-1])

    @property
    def may_be_machine(self) -> bool:
        """Whether the machine's speed may be the cause: the change is small, and in more than one part of the step."""
        return self.log_size <= _LARGEST_OF_MACHINE and self.only_part is None

    def mark_reported(self) -> None:
        self._reported_s = self.size_s

    def reverts(self, earlier: LevelChange) -> bool:
        """Return whether this change goes back to the level that was before ``earlier``."""
        if self.direction == earlier.direction:
            return False
        return earlier.is_undone_at(self.after_s)

    def is_undone_at(self, level_s: Seconds) -> bool:
        """Return whether ``level_s`` is about the level before this change, judged by the whole step, its last entry.

        A drift is also undone by a level beyond the one before it: a part that grows lengthens the others a little.
        """
        # from the level before: positive towards the level after this change, negative beyond the level before it
        distance = math.log(level_s[-1] / self.before_s[-1]) * self.direction
        tolerance = max(SMALLEST_EFFECT, _RETURN_SHARE * self.log_size)
        tolerance_beyond = self.log_size if self.course == "drift" else tolerance
        return -tolerance_beyond <= distance <= tolerance

    def may_belong_to(self, event: LevelChange) -> bool:
        """Return whether this change is in the same part of the step as ``event``, or in several parts."""
        return self.only_part in (None, event.part)

    def may_hide_in(self, drift: LevelChange) -> bool:
        """Return whether this change may be one piece of ``drift``: it is in the same part, or much smaller."""
        least_s = _VERY_SMALL_BESIDE_DRIFT * abs(drift.size_s)
        return abs(self.size_s) <= least_s or self.may_belong_to(drift)

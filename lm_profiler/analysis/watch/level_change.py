"""A change of a running training's level: how large it is, in which part of the step, and what it goes back to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lm_profiler.analysis.steps.step_model import SMALLEST_EFFECT
from lm_profiler.analysis.watch.step_blocks import Seconds
from lm_profiler.record.parts import PARTS

_PART_SHARE = 0.5  # share of a change that its phase must have
_ONLY_PART_SHARE = 0.8  # share of a change from which on it lies in this phase alone
# share of the step from which on a part's change looks like a uniform one
_NEARLY_WHOLE_STEP = 0.75
# of the logarithm of the step: the speed of real machines, shared ones above all, moves by so much
_LARGEST_OF_MACHINE = 0.1
_UNIFORM = 0.4  # share of a change that lies apart from equal ratios of all phases
# a level has gone back if it is nearer to the old one than this share of the change
_RETURN_SHARE = 0.25
# share of the size by which an estimate must differ to be reported again; of a drift, by which it must grow
_CORRECTED = 0.03
_DRIFT_GROWTH = 0.1
_VERY_SMALL_BESIDE_DRIFT = 0.1  # share of a drift's size

Course = Literal["drift", "wanders", "alternates"]


@dataclass(eq=False, kw_only=True)
class LevelChange:
    """A change of level as it is known by now: it is corrected while more steps come in."""

    since_step: int
    before_s: Seconds  # (TIMED,) the level before, by part
    after_s: Seconds
    found_step: int  # the step at which it was found
    before_since_step: int  # the first step of the level before
    course: Course | None = None
    is_gradual: bool = False  # a drift that is no stairs
    until_step: int | None = None  # the last step before the level went back
    times: int = 1  # changes that this one stands for
    is_withdrawn: bool = False  # another change stands for it
    is_hidden: bool = False  # it is not worth reporting, as far as it is known by now
    _reported_s: float | None = None

    @property
    def size_s(self) -> float:
        return float(self.after_s[-1] - self.before_s[-1])

    @property
    def log_size(self) -> float:
        """The size of the change, as a logarithm of the step's ratio; positive or 0."""
        return abs(math.log(self.after_s[-1] / self.before_s[-1]))

    @property
    def direction(self) -> int:
        return 1 if self.size_s > 0 else -1

    @property
    def part(self) -> str | None:
        """The part that makes up most of the change; None if no part does, or all have changed by the same ratio."""
        part = self._part_with(_PART_SHARE)
        if part is None or not self.is_uniform:
            return part
        share_of_step = float(self.before_s[PARTS.index(part)] / self.before_s[-1])
        return part if share_of_step >= _NEARLY_WHOLE_STEP else None

    @property
    def only_part(self) -> str | None:
        """The part of the step that makes up nearly all of the change; None if several do."""
        return self._part_with(_ONLY_PART_SHARE)

    def _part_with(self, share: float) -> str | None:
        differences_s = (self.after_s - self.before_s)[:-1]
        largest = int(np.abs(differences_s).argmax())
        if abs(differences_s[largest]) < share * abs(self.size_s):
            return None
        return PARTS[largest]

    @property
    def was_reported(self) -> bool:
        return self._reported_s is not None

    @property
    def is_corrected(self) -> bool:
        """Whether the size differs from the one that was reported."""
        if self._reported_s is None:
            return True
        share = _DRIFT_GROWTH if self.course == "drift" else _CORRECTED
        return abs(self.size_s - self._reported_s) > share * abs(self._reported_s)

    @property
    def is_negligible(self) -> bool:
        """Whether nothing is left of the change, now that more steps are known."""
        return self.log_size < SMALLEST_EFFECT

    @property
    def is_uniform(self) -> bool:
        """Whether all parts have changed by about the same ratio."""
        differences_s = (self.after_s - self.before_s)[:-1]
        uniform_s = self.before_s[:-1] * (self.size_s / float(self.before_s[-1]))
        apart_s = float(np.abs(differences_s - uniform_s).sum())
        return apart_s < _UNIFORM * abs(self.size_s)

    @property
    def may_be_machine(self) -> bool:
        """Whether the machine may have changed its speed: by a few percent, and in more than one part of the step."""
        return self.log_size <= _LARGEST_OF_MACHINE and self.only_part is None

    def mark_reported(self) -> None:
        self._reported_s = self.size_s

    def reverts(self, earlier: LevelChange) -> bool:
        """Return whether this change goes back to the level before ``earlier``."""
        if self.direction == earlier.direction:
            return False
        return earlier.is_undone_at(self.after_s)

    def is_undone_at(self, level_s: Seconds) -> bool:
        """Return whether a level is the one before this change, about."""
        log_before = math.log(self.before_s[-1])
        distance = abs(math.log(level_s[-1]) - log_before)
        return distance <= max(SMALLEST_EFFECT, _RETURN_SHARE * self.log_size)

    def may_belong_to(self, event: LevelChange) -> bool:
        """Return whether this change lies in the same part of the step as ``event``, or in no part alone."""
        return self.only_part in (None, event.part)

    def may_hide_in(self, drift: LevelChange) -> bool:
        """Return whether this change may be a piece of ``drift``: in its part of the step, or very small beside it."""
        least_s = _VERY_SMALL_BESIDE_DRIFT * abs(drift.size_s)
        return abs(self.size_s) <= least_s or self.may_belong_to(drift)

"""The stages of a run and how many steps each has: warm-up, measure, then those that look closer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lm_profiler.analysis.steps.step_model import FEWEST_STEPS, FINEST_TARGET, known_to
from lm_profiler.record.quantities import counted
from lm_profiler.usage_error import expect


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How long to warm up and to measure.

    Args:
        warmup_steps: Steps before the measured ones; recorded, never summarised.
        measure_steps: Steps to measure; 0 where a run is only watched.
        until_ci: Instead of measure_steps, measure until the 95 % interval of the step's level is within this share on
            both sides of it, such as 0.005: after at least 10 steps, looking again after a quarter more.
        max_steps: Most steps to measure under until_ci.
        max_seconds: Most seconds to measure under until_ci.
        stop_when_done: End the run when the stages are done. Otherwise training goes on without the instruments.
    """

    warmup_steps: int = 5
    measure_steps: int = 40
    until_ci: float | None = None
    max_steps: int = 1000
    max_seconds: float = 600.0
    stop_when_done: bool = True

    def __post_init__(self) -> None:
        expect(self.warmup_steps >= 0, "stages.warmup_steps", "0 or more", self.warmup_steps)
        expect(self.measure_steps >= 0, "stages.measure_steps", "0 or more", self.measure_steps)
        if self.until_ci is not None:
            share = f"a share from {FINEST_TARGET}, the finest that one process can promise, to under 1"
            expect(FINEST_TARGET <= self.until_ci < 1, "stages.until_ci", share, self.until_ci)
        expect(self.max_steps >= FEWEST_STEPS, "stages.max_steps", f"{FEWEST_STEPS} or more", self.max_steps)
        expect(self.max_seconds > 0, "stages.max_seconds", "a positive number", self.max_seconds)

    def checked(self, watch: bool) -> StageOptions:
        """Return these options.

        Raises:
            UsageError: nothing is measured, and the run is not watched, or no step comes before that.
        """
        least = "1 or more, or 0 with watch and a step of warm-up"
        expect(self.planned_steps > 0 or (watch and self.warmup_steps > 0), "stages.measure_steps", least, 0)
        return self

    @property
    def planned_steps(self) -> int:
        """Most steps to measure."""
        return self.measure_steps if self.until_ci is None else self.max_steps


# Share of the measured steps that are measured until the next look. Each look may stop on a lucky streak; with looks
# this far apart, the interval where measuring stops keeps its 95 % (benchmarks/statistics).
_MORE = 0.25


@dataclass
class StoppingRule:
    """Decides under ``until_ci`` whether enough was measured."""

    options: StageOptions  # target and caps
    agree: Callable[[int], int]  # makes rank 0's answer, the steps until the next look, everybody's; a collective call
    _enough: bool = False
    _over: bool = False
    look_at: int = field(init=False)  # measured steps after which to look again; never where no precision was asked for

    def __post_init__(self) -> None:
        # From the first step on, because max_seconds may be over before the tenth.
        self.look_at = sys.maxsize if self.options.until_ci is None else 1

    def reached(self, steps: int, step_s: Sequence[float], elapsed_s: float) -> bool:
        """Return whether ``steps`` measured steps are enough; ``step_s`` are their known seconds."""
        assert self.options.until_ci is not None
        known = known_to(step_s) if len(step_s) >= FEWEST_STEPS else None
        self._enough = known is not None and known <= self.options.until_ci
        left_s = self.options.max_seconds - elapsed_s
        more = 0
        if not self._enough and left_s > 0:
            fitting = steps * left_s / max(elapsed_s, 1e-9)  # steps may take minutes: look before the time is over
            more = max(1, int(min(fitting, max(FEWEST_STEPS - steps, math.ceil(_MORE * steps)))))
        return self._take_answer(steps, more)

    def follow(self, steps: int) -> bool:
        """Return whether the ranks agree that ``steps`` are enough, where this rank's instruments failed."""
        return self._over or (steps >= self.look_at and self._take_answer(steps, 0))

    def _take_answer(self, steps: int, more: int) -> bool:
        more = self.agree(more)
        self.look_at, self._over = steps + more, more == 0
        return self._over

    def missed(self, step_s: Sequence[float]) -> list[str]:
        """Return the note that a limit ended the measuring of ``step_s`` before they were precise enough, if it did."""
        if self._enough or self.options.until_ci is None:
            return []
        width = known_to(step_s)
        known = "unknown" if width is None else f"known to ±{width:.1%}"
        steps = counted(len(step_s), "step")
        reached = f"after {steps} the level is {known}, the target was ±{self.options.until_ci:.1%}"
        return [f"measuring stopped at its limit: {reached}; raise stages.max_steps or stages.max_seconds"]


class StageCounter:
    """Counts steps through the stages, in the order of ``steps``; a stage of no steps is passed over.

    ``stage`` is that of the step that runs now or comes next, None when all are done; ``done`` counts its steps.
    """

    def __init__(self, steps: Mapping[str, int]) -> None:
        self.planned = dict(steps)
        self._left = [stage for stage, count in steps.items() if count > 0]
        self.stage: str | None = self._left[0] if self._left else None
        self.done = 0
        self.left = sum(self.planned[stage] for stage in self._left)
        """Steps until all stages are done."""

    def advance(self) -> bool:
        """Count one step; True if it was its stage's last."""
        self.done += 1
        self.left -= 1
        if self.done < self.planned[self._left[0]]:
            return False
        self.end_stage()
        return True

    def end_stage(self) -> None:
        """Go on to the next stage now."""
        self.left -= self.planned[self._left.pop(0)] - self.done
        self.stage = self._left[0] if self._left else None
        self.done = 0

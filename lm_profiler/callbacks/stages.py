"""Counts the steps through the stages: warm-up, measure, then stages that look closer."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from lm_profiler.analysis.steps.step_model import FEWEST_STEPS, is_level_known, known_to
from lm_profiler.callbacks.instruments.profiling_options import (
    TIMED_MOST_SECONDS,
    TIMED_MOST_STEPS,
    TIMED_SECONDS,
    TIMED_STEPS,
    StageOptions,
)
from lm_profiler.measure.boundary import put
from lm_profiler.record.parts import STAGE_NAMES
from lm_profiler.record.quantities import counted

# Share of the measured steps that are measured until the next look. Each look may stop on a lucky streak; with looks
# this far apart, the interval where measuring stops keeps its 95 % (benchmarks/statistics).
_MORE = 0.25

_REDRAW_S = 0.5  # least seconds between two drawings on a terminal
_WIDTH = 40  # of the longest line that is drawn, at least


@dataclass
class StoppingRule:
    """Decides whether enough was measured, where precision (``until_ci``) or time decides that."""

    options: StageOptions  # target and caps
    agree: Callable[[int], int]  # makes rank 0's answer, the steps until the next look, everybody's; a collective call
    # most steps that the loop has for measuring, if time decides; the other stages need the rest
    steps_of_loop: float = math.inf
    look_at: int = field(init=False)  # measured steps after which to look again; never if their number was given
    _enough: bool = False
    _over: bool = False

    def __post_init__(self) -> None:
        # Checked from the first step on, because the time may be over before the tenth.
        has_given_number = self.options.until_ci is None and not self.options.is_timed
        self.look_at = sys.maxsize if has_given_number else 1

    def reached(self, steps: int, step_s: Sequence[float], elapsed_s: float) -> bool:
        """Return whether ``steps`` measured steps are enough; ``step_s`` are their known seconds."""
        if self.options.is_timed:
            return self._take_answer(steps, self._steps_until_time(steps, elapsed_s))
        assert self.options.until_ci is not None
        self._enough = len(step_s) >= FEWEST_STEPS and is_level_known(step_s, self.options.until_ci)
        left_s = self.options.max_seconds - elapsed_s
        more = 0
        if not self._enough and left_s > 0:
            fitting = steps * left_s / max(elapsed_s, 1e-9)  # steps may take minutes: look before the time is over
            more = max(1, int(min(fitting, max(FEWEST_STEPS - steps, math.ceil(_MORE * steps)))))
        return self._take_answer(steps, more)

    def _steps_until_time(self, steps: int, elapsed_s: float) -> int:
        """Return after how many more steps to look again; 0 if enough was measured.

        The steps are at most doubled between two looks, because steps may become slower.
        """
        steps_per_second = steps / max(elapsed_s, 1e-9)
        wanted = max(TIMED_STEPS, math.ceil(TIMED_SECONDS * steps_per_second))
        fitting = math.floor(TIMED_MOST_SECONDS * steps_per_second)
        affordable = max(min(wanted, fitting), FEWEST_STEPS)
        available = max(self.steps_of_loop, TIMED_STEPS)
        steps_left = int(min(affordable, available, TIMED_MOST_STEPS)) - steps
        doubled = max(steps, FEWEST_STEPS - steps)
        return max(min(steps_left, doubled), 0)

    def follow(self, steps: int) -> bool:
        """Return whether the ranks agree that ``steps`` are enough, where this rank's instruments failed."""
        return self._over or (steps >= self.look_at and self._take_answer(steps, 0))

    def _take_answer(self, steps: int, more: int) -> bool:
        more = self.agree(more)
        self.look_at, self._over = steps + more, more == 0
        return self._over

    def missed(self, step_s: Sequence[float]) -> list[str]:
        """Return the note that a limit ended the measuring before the level of ``step_s`` was precise enough, if so."""
        if self._enough or self.options.until_ci is None:
            return []
        width = known_to(step_s)
        known = "unknown" if width is None else f"known to ±{width:.1%}"
        steps = counted(len(step_s), "step")
        reached = f"after {steps} the level is {known}, the target was ±{self.options.until_ci:.1%}"
        return [f"measuring stopped at its limit: {reached}; raise stages.max_steps or stages.max_seconds"]


class StageCounter:
    """Counts steps through the stages, in the order of ``steps``; a stage without steps is skipped."""

    def __init__(self, steps: Mapping[str, int]) -> None:
        self.planned = dict(steps)
        self._left = [stage for stage, count in steps.items() if count > 0]
        # the stage of the step that runs now or comes next; None when all are done
        self.stage: str | None = self._left[0] if self._left else None
        self.done = 0  # steps of that stage
        self.left = sum(self.planned[stage] for stage in self._left)  # steps until all stages are done

    def advance(self) -> bool:
        """Count one step; True if it was its stage's last."""
        self.done += 1
        self.left -= 1
        if self.done < self.planned[self._left[0]]:
            return False
        self.end_stage()
        return True

    def end_stage(self) -> None:
        self.left -= self.planned[self._left.pop(0)] - self.done
        self.stage = self._left[0] if self._left else None
        self.done = 0


class Progress:
    """Draws ``measuring 7/20`` over itself on a terminal or in a notebook; elsewhere prints a line for each stage."""

    def __init__(
        self, options: StageOptions, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_timed = options.is_timed
        self._may_end_early = options.until_ci is not None
        self._out: TextIO | None = out if out is not None else sys.stderr
        self._clock = clock
        screen = self._out is not None and self._out.isatty()
        # A notebook obeys a carriage return, but not the code that erases a line.
        notebook = type(self._out).__module__.startswith("ipykernel.")
        self._live, self._begin = screen or notebook, "\r\x1b[K" if screen else f"\r{'':{_WIDTH}}\r"
        self._drawn_at = float("-inf")
        self._stage: str | None = None

    def draw(self, stage: str, done: int, planned: int) -> None:
        new = stage != self._stage
        if self._live:
            now = self._clock()
            if not new and now - self._drawn_at < _REDRAW_S:
                return
            self._drawn_at = now
            put(self._out, f"{self._begin}{STAGE_NAMES[stage]} {self._count_text(stage, done, planned)}")
        elif new:
            put(self._out, f"{STAGE_NAMES[stage]}: {self._plan_text(stage, planned)}\n")
        self._stage = stage

    def _count_text(self, stage: str, done: int, planned: int) -> str:
        number = min(done + 1, planned)
        if stage == "measure" and self._is_timed:
            return f"step {number}"
        return f"{number}/{planned}"

    def _plan_text(self, stage: str, planned: int) -> str:
        steps = counted(planned, "step")
        if stage != "measure":
            return steps
        if self._is_timed:
            return f"{TIMED_STEPS} steps and {TIMED_SECONDS:.0f} s, at most a minute"
        if self._may_end_early:
            return f"at most {steps}"
        return steps

    def clear(self) -> None:
        if self._live and self._stage is not None:
            put(self._out, self._begin)
        self._stage = None

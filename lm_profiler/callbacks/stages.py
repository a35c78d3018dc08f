"""Counts the steps through the stages: warm-up, measure, then stages that look closer."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from lm_profiler.analysis.steps.step_model import FEWEST_STEPS, is_level_known, known_to
from lm_profiler.callbacks.instruments.profiling_options import StageOptions
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
    """Decides under ``until_ci`` whether enough was measured."""

    options: StageOptions  # target and caps
    agree: Callable[[int], int]  # makes rank 0's answer, the steps until the next look, everybody's; a collective call
    look_at: int = field(init=False)  # measured steps after which to look again; never if no precision was asked for
    _enough: bool = False
    _over: bool = False

    def __post_init__(self) -> None:
        # Checked from the first step on, because max_seconds may be over before the tenth.
        self.look_at = sys.maxsize if self.options.until_ci is None else 1

    def reached(self, steps: int, step_s: Sequence[float], elapsed_s: float) -> bool:
        """Return whether ``steps`` measured steps are enough; ``step_s`` are their known seconds."""
        assert self.options.until_ci is not None
        self._enough = len(step_s) >= FEWEST_STEPS and is_level_known(step_s, self.options.until_ci)
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
        self._measured = "" if options.until_ci is None else "at most "
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
            put(self._out, f"{self._begin}{STAGE_NAMES[stage]} {min(done + 1, planned)}/{planned}")
        elif new:
            limit = self._measured if stage == "measure" else ""
            put(self._out, f"{STAGE_NAMES[stage]}: {limit}{counted(planned, 'step')}\n")
        self._stage = stage

    def clear(self) -> None:
        if self._live and self._stage is not None:
            put(self._out, self._begin)
        self._stage = None

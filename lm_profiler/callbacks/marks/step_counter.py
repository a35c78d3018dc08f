"""Counts how many steps of a loop are left until all stages of a profile (warm-up, measuring, trace) are done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Timeline


@dataclass(eq=False)
class StepCounter:
    """Counts the steps of a loop without a Trainer; a Trainer's ``PhaseProfiler`` counts by itself."""

    timeline: Timeline  # takes the mark that ends a step
    steps_left: int  # the number of steps until the stages are done
    # called between a step and the next; returns how many are left
    step_ended: Callable[[], int]
    # called if the instruments failed: takes this rank's count of steps left and returns that of the other ranks; does
    # not raise
    agree_on_steps_left: Callable[[int], int] = lambda steps_left: steps_left
    # called when no step is left; returns the object that marks the rest of training, or None; does not raise
    stages_ended: Callable[[], Any] = lambda: None
    # whether the loop ends with the stages, if it can be ended
    ends_loop: bool = False
    # whether an optimizer has stepped; the step ends when the next begins
    is_step_done: bool = False

    def end_step_if_done(self) -> bool:
        """End the step if it is done, and the stages if it was the last; return whether it was done."""
        if not self.is_step_done or self.steps_left <= 0:
            return False
        self.is_step_done = False
        guard = self.timeline.guard
        steps_left = self.steps_left - 1
        if not guard.is_disabled:
            try:
                self.timeline.note((tape.END, self.timeline.clock()))
                steps_left = self.step_ended()
            except BaseException as error:
                guard.handle(error)
        if guard.is_disabled:
            # Usually ``step_ended`` agrees with the other ranks on the steps left. It does not run if the instruments
            # failed, but the other ranks still wait for this rank's answer.
            steps_left = self.agree_on_steps_left(steps_left)
        self.steps_left = steps_left
        if self.steps_left <= 0:
            self.stages_ended()
        return True

"""Counts the steps of each stage: warm-up, measure, then stages whose instruments would disturb the timing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from lm_profiler.analysis.steps.step_model import (
    FEWEST_STEPS,
    is_level_known,
    level_half_width,
)
from lm_profiler.callbacks.instruments.profiling_options import (
    TIMED_MOST_SECONDS,
    TIMED_MOST_STEPS,
    TIMED_SECONDS,
    TIMED_STEPS,
    StageOptions,
)
from lm_profiler.measure.boundary import write_text
from lm_profiler.record.parts import STAGE_NAMES
from lm_profiler.record.quantities import count_text

# The number of steps until the next check, as a share of the measured steps. Each check may stop on a lucky streak.
# With checks this far apart, the interval at which measuring stops keeps its coverage of 95 % (benchmarks/statistics).
_SHARE_UNTIL_CHECK = 0.25

_REDRAW_S = 0.5  # least seconds between two drawings on a terminal
_WIDTH = 40  # the number of blanks that erase any line


@dataclass
class StoppingRule:
    """Decides whether enough steps were measured, if that depends on their precision (``until_ci``) or on time."""

    options: StageOptions  # the target and the limits
    # returns on all ranks the number that rank 0 passes; all ranks have to call it
    agree: Callable[[int], int]
    # the most steps that the loop has for measuring, if time decides; the other stages need the rest
    steps_of_loop: float = math.inf
    # the number of measured steps after which to check next; never reached if the number of steps is fixed
    next_check: int = field(init=False)
    _is_precise: bool = False  # whether ``until_ci`` is reached
    _has_stopped: bool = False

    def __post_init__(self) -> None:
        if self.options.until_ci is not None or self.options.is_timed:
            # from the first step on, because ten steps may take too long
            self.next_check = 1
        else:
            self.next_check = sys.maxsize

    def is_enough(self, steps: int, step_s: Sequence[float], elapsed_s: float) -> bool:
        """Return whether ``steps`` measured steps are enough; ``step_s`` are their known seconds.

        All ranks call this after the same step, and all get rank 0's answer. If it is no, ``next_check`` is set to the
        number of steps after which to call it again.
        """
        target = self.options.until_ci
        if target is None:
            steps_until_check = self._steps_until_time(steps, elapsed_s)
            return self._agree_on_check(steps, steps_until_check)

        self._is_precise = len(step_s) >= FEWEST_STEPS and is_level_known(
            step_s, target
        )
        seconds_left = self.options.max_seconds - elapsed_s
        if self._is_precise or seconds_left <= 0:
            return self._agree_on_check(steps, steps_until_check=0)

        steps_wanted = max(FEWEST_STEPS - steps, math.ceil(_SHARE_UNTIL_CHECK * steps))
        # Steps may take minutes: check before the time is over.
        steps_that_fit = steps * seconds_left / max(elapsed_s, 1e-9)
        steps_until_check = max(1, int(min(steps_that_fit, steps_wanted)))
        return self._agree_on_check(steps, steps_until_check)

    def _steps_until_time(self, steps: int, elapsed_s: float) -> int:
        """Return after how many more steps to check again; 0 if enough was measured."""
        steps_per_second = steps / max(elapsed_s, 1e-9)
        steps_wanted = max(TIMED_STEPS, math.ceil(TIMED_SECONDS * steps_per_second))
        steps_that_fit = math.floor(TIMED_MOST_SECONDS * steps_per_second)
        affordable_steps = max(min(steps_wanted, steps_that_fit), FEWEST_STEPS)
        available_steps = max(self.steps_of_loop, TIMED_STEPS)
        total_steps = int(min(affordable_steps, available_steps, TIMED_MOST_STEPS))
        steps_left = total_steps - steps
        # At most as many as so far, because steps may become slower.
        most_steps_until_check = max(steps, FEWEST_STEPS - steps)
        return max(min(steps_left, most_steps_until_check), 0)

    def follow_rank_0(self, steps: int) -> bool:
        """Return whether rank 0 has decided that ``steps`` are enough, for a rank whose instruments failed."""
        if self._has_stopped:
            return True
        if steps < self.next_check:
            return False
        return self._agree_on_check(steps, steps_until_check=0)

    def _agree_on_check(self, steps: int, steps_until_check: int) -> bool:
        """Note when to check next, by the ``steps_until_check`` of rank 0, and return whether measuring stops.

        It stops if rank 0's number is 0.
        """
        agreed_steps = self.agree(steps_until_check)
        self.next_check = steps + agreed_steps
        self._has_stopped = agreed_steps == 0
        return self._has_stopped

    def missed_target(self, step_s: Sequence[float]) -> list[str]:
        """Return a note if a limit ended the measuring before the level of ``step_s`` was precise enough; else none."""
        if self._is_precise or self.options.until_ci is None:
            return []
        width = level_half_width(step_s)
        precision = "unknown" if width is None else f"known to ±{width:.1%}"
        steps = count_text(len(step_s), "step")
        outcome = f"after {steps} the step time is {precision}, and the target was ±{self.options.until_ci:.1%}"
        return [
            f"measuring stopped at its limit: {outcome}; raise stages.max_steps or stages.max_seconds"
        ]


class StageCounter:
    """Counts the steps of each stage.

    Args:
        steps: the number of steps of each stage, in order; a stage without steps is skipped.
    """

    def __init__(self, steps: Mapping[str, int]) -> None:
        self.planned = dict(steps)
        self._stages_left: list[str] = []  # the current stage first
        self.steps_left = 0  # steps left in all stages together
        for stage, count in steps.items():
            if count > 0:
                self._stages_left.append(stage)
                self.steps_left += count
        self._begin_stage()

    def _begin_stage(self) -> None:
        """Begin the next stage that is left."""
        # the stage of the step that runs now or comes next; None when all are done
        self.stage: str | None = None
        if self._stages_left:
            self.stage = self._stages_left[0]
        self.steps_done = 0  # steps of that stage

    def advance(self) -> bool:
        """Count one step; return whether it was the last of its stage."""
        self.steps_done += 1
        self.steps_left -= 1
        if self.steps_done < self.planned[self._stages_left[0]]:
            return False
        self.end_stage()
        return True

    def extend(self, stage: str, steps: int) -> None:
        """Plan ``steps`` for a stage that has not begun and had fewer."""
        self.steps_left += steps - self.planned[stage]
        self.planned[stage] = steps

    def end_stage(self) -> None:
        """End the current stage, even if not all of its planned steps are done, and begin the next one."""
        stage = self._stages_left.pop(0)
        self.steps_left -= self.planned[stage] - self.steps_done
        self._begin_stage()


class Progress:
    """Shows progress: on a terminal or in a notebook one line like ``measuring 7/20``; elsewhere a line per stage."""

    def __init__(
        self,
        options: StageOptions,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_timed = options.is_timed
        self._may_end_early = options.until_ci is not None
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._clock = clock
        is_terminal = self._stream is not None and self._stream.isatty()
        is_notebook = type(self._stream).__module__.startswith("ipykernel.")
        self._is_live = is_terminal or is_notebook
        # What erases the previous line. A notebook ignores the terminal's code for that, so spaces overwrite the line.
        self._line_start = "\r\x1b[K" if is_terminal else f"\r{'':{_WIDTH}}\r"
        self._drawn_at_s = float("-inf")
        self._stage: str | None = None

    def draw(self, stage: str, steps_done: int, planned: int) -> None:
        """Draw the progress of ``stage``: on a terminal twice per second at most, elsewhere one line per stage."""
        is_new_stage = stage != self._stage
        if self._is_live:
            now_s = self._clock()
            if not is_new_stage and now_s - self._drawn_at_s < _REDRAW_S:
                return
            self._drawn_at_s = now_s
            step = self._count_text(stage, steps_done, planned)
            write_text(self._stream, f"{self._line_start}{STAGE_NAMES[stage]} {step}")
        elif is_new_stage:
            write_text(
                self._stream,
                f"{STAGE_NAMES[stage]}: {self._plan_text(stage, planned)}\n",
            )
        self._stage = stage

    def _count_text(self, stage: str, steps_done: int, planned: int) -> str:
        """Return which step of ``stage`` runs: ``7/20``, or ``step 7`` if time decides how many there are."""
        number = min(steps_done + 1, planned)
        if stage == "measure" and self._is_timed:
            return f"step {number}"
        return f"{number}/{planned}"

    def _plan_text(self, stage: str, planned: int) -> str:
        """Return the number of steps that ``stage`` will have, as text."""
        steps = count_text(planned, "step")
        if stage != "measure":
            return steps
        if self._is_timed:
            return f"at least {TIMED_STEPS} steps and {TIMED_SECONDS:.0f} s, at most a minute"
        if self._may_end_early:
            return f"at most {steps}"
        return steps

    def clear(self) -> None:
        if self._is_live and self._stage is not None:
            write_text(self._stream, self._line_start)
        self._stage = None

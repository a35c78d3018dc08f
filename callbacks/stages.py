"""What the loop is doing and for how many steps: warm-up, measure, then memory and trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def require(condition: bool, subject: str, expected: str, given: object) -> None:
    """Raise the ValueError that every option of the instruments uses."""
    if not condition:
        raise ValueError(f"{subject}: expected {expected}, given {given!r}")


@dataclass(frozen=True)
class StageOptions:
    """How long to warm up and to measure.

    Args:
        warmup_steps: Steps before the measured ones; recorded, never summarised.
        measure_steps: Steps to measure.
        stop_when_done: End the run when the stages are done. Otherwise training goes on without the instruments.
    """

    warmup_steps: int = 5
    measure_steps: int = 20
    stop_when_done: bool = True

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "stages.warmup_steps", "0 or more", self.warmup_steps)
        require(self.measure_steps >= 1, "stages.measure_steps", "1 or more", self.measure_steps)


class Schedule:
    """Counts steps through the stages, in the order of ``steps``; a stage of no steps is passed over.

    ``stage`` is that of the step that runs now or comes next, None when all are done; ``done`` counts its steps.
    """

    def __init__(self, steps: Mapping[str, int]) -> None:
        self.planned = dict(steps)
        self._left = [stage for stage, count in steps.items() if count > 0]
        self.stage: str | None = self._left[0] if self._left else None
        self.done = 0

    def advance(self) -> bool:
        """Count one step; True if it was its stage's last."""
        self.done += 1
        if self.done < self.planned[self._left[0]]:
            return False
        self.end_stage()
        return True

    def end_stage(self) -> None:
        """Go on to the next stage now."""
        self._left.pop(0)
        self.stage = self._left[0] if self._left else None
        self.done = 0

"""Peak memory of the measured steps, and of each part of a step in a stage of its own."""

from __future__ import annotations

from dataclasses import dataclass

from lm_profiler.callbacks.stages import require
from lm_profiler.measure.memory import PartPeaks, Probe
from lm_profiler.measure.timeline import Timeline
from lm_profiler.record.steps import Peaks


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Peak memory by phase.

    Args:
        steps: Steps after the measured ones in which memory is read at every mark; they are not timed.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        require(self.steps >= 0, "memory.steps", "0 or more", self.steps)


class MemoryReader:
    """Reads peaks once a step, between steps; in the ``memory`` stage at every mark."""

    def __init__(self, probe: Probe, timeline: Timeline) -> None:
        self._probe = probe
        self._timeline = timeline
        self._parts: PartPeaks | None = None
        self.by_part: dict[str, Peaks] = {}

    def begin(self, stage: str) -> None:
        """``stage`` starts with the next step."""
        self._probe.reset()
        if stage == "memory":
            self._parts = PartPeaks(self._probe)
            self._timeline.observers += (self._parts,)

    def end(self, stage: str) -> None:
        """``stage`` is over."""
        if self._parts is not None:
            self._timeline.observers = tuple(o for o in self._timeline.observers if o is not self._parts)
            self.by_part = self._parts.by_part()
            self._parts = None

    def step_peaks(self) -> Peaks:
        """Peaks up to the end of the step that has just ended, since its stage began; in ``memory``, of that step."""
        return self._probe.peaks() if self._parts is None else self._parts.take_step()

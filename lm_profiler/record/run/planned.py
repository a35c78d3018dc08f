"""What a run was planned to need, before anything of it was built."""

from __future__ import annotations

from pydantic import Field

from lm_profiler.record.run.memory_facts import MemoryCauses, MemoryLevels
from lm_profiler.record.run.part import Part


class PlannedMemory(Part):
    """Bytes of a step on one device, as it was rehearsed on tensors without data; none of them where that is unknown.

    ``peaks`` are the most at one time, by phase, ``at_peak`` what the largest of them consists of, ``held`` what is
    held at moments of the step. ``available`` is what a replica could have had when the run began, in the device's
    memory or its part of the machine's; None where the device does not say. ``reserved`` is what the allocator of a GPU
    would take of it, if that is not short; None on the CPU, where nobody reserves. Of a run that is ``compiled`` the
    step was rehearsed without.
    """

    peaks: dict[str, int] = Field(default_factory=dict)
    at_peak: MemoryCauses | None = None
    held: MemoryLevels | None = None
    reserved: int | None = None
    available: int | None = None
    compiled: bool = False
    unknown: str | None = None
    """Why it could not be planned."""

    @property
    def phase(self) -> str | None:
        """The one with the largest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase], default=None)

    @property
    def peak(self) -> int | None:
        """Of the step."""
        return max(self.peaks.values(), default=None)

"""What a run was planned to need, before anything of it was built."""

from __future__ import annotations

from typing import Annotated

from lm_profiler.record.figure import Figure, Place, figure, within
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run.memory_facts import HOW_HELD, MemoryCauses, MemoryLevels
from lm_profiler.record.run.part import Part

PEAK = Figure("planned peak", "GiB", "most bytes at one time, rehearsed", "planned_peak_bytes", place=Place.TABLE)
PHASE = Figure("phase of the planned peak", "text", "where the peak would be", "planned_phase")


class PlannedMemory(Part):
    """Bytes of a step on one device, as it was rehearsed on tensors without data; none of them where that is unknown.

    ``peaks`` are the most at one time, by phase, ``at_peak`` what the largest of them consists of, ``held`` what is
    held at moments of the step. ``available`` is what a replica could have had when the run began, in the device's
    memory or its part of the machine's; None where the device does not say. ``reserved`` is what the allocator of a GPU
    would take of it, if that is not short; None on the CPU, where nobody reserves. Of a run that is ``compiled`` the
    step was rehearsed without.
    """

    peaks: dict[str, int] = figure(
        "{key}: planned",
        "GiB",
        "planned peak within {key}",
        "{key}_planned_peak_bytes",
        keys=PARTS,
        default_factory=dict,
    )
    at_peak: MemoryCauses | None = within(
        name="planned_{name}_bytes", title="planned {title}", meaning="of the planned peak", default=None
    )
    held: MemoryLevels | None = within(
        name="planned_{name}_held_bytes", title="planned: {title}", meaning="bytes that would be held when {title}",
        instead={"source": Figure("source of planned levels", "text", HOW_HELD, "planned_held_source")}, default=None,
    )  # fmt: skip
    reserved: int | None = figure(
        "planned reserved",
        "GiB",
        "what the allocator of a GPU would take of it, gaps between blocks included, if that is not short",
        "planned_reserved_bytes",
        default=None,
    )
    available: int | None = figure(
        "free before the run",
        "GiB",
        "what one replica could have had when the run began",
        "available_bytes",
        default=None,
    )
    compiled: bool = False
    unknown: str | None = figure(
        "not planned", "text", "why it could not be rehearsed", "planned_unknown", default=None
    )

    @property
    def phase(self) -> Annotated[str | None, PHASE]:
        """The one with the largest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase], default=None)

    @property
    def peak(self) -> Annotated[int | None, PEAK]:
        """Of the step."""
        return max(self.peaks.values(), default=None)

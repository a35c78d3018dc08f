"""The memory of a run, as measured and as planned, and the least time of each phase."""

from __future__ import annotations

from typing import Annotated, Literal

from lm_profiler.record.figure import Figure, Place, figure, within
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run.part import Newer, Part

HOW_HELD = "`allocator`: all tensors of the device; `counted`: parameters, gradients, states, buffers, saved tensors"


class MemoryReading(Part):
    """Peaks of memory; None where this device or system cannot say."""

    allocated_peak: int | None = figure(
        "peak allocated", "GiB", "most bytes held by tensors on the device", "allocated_peak_bytes",
        place=Place.HEADLINE, tag="memory_gib/allocated_peak", run_tag="allocated_peak_gib", default=None,
    )  # fmt: skip
    reserved_peak: int | None = figure(
        "peak reserved", "GiB", "most bytes the allocator took from the device", "reserved_peak_bytes",
        tag="memory_gib/reserved_peak", default=None,
    )  # fmt: skip
    resident_peak: int | None = figure(
        "peak resident", "GiB", "most bytes of the process in the machine's memory, since it began",
        "resident_peak_bytes", place=Place.HEADLINE, tag="memory_gib/resident_peak", run_tag="resident_peak_gib",
        default=None,
    )  # fmt: skip


class MemoryCauses(Part):
    """The causes of an allocated peak; ``activations_and_rest`` is what the others leave of it, None is unknown."""

    parameters: int = figure("parameters", "GiB", "{title}")
    gradients: int = figure("gradients", "GiB", "{title}")
    optimizer_states: int = figure("optimizer states", "GiB", "{title}")
    buffers: int = figure("buffers", "GiB", "{title}")
    activations_and_rest: int | None = figure("activations and rest", "GiB", "{title}")


# moments at which sharded and unsharded runs differ, each with its title
MOMENTS = {
    "set_up": "after set-up",
    "before_optimizer": "before the optimizer's step",
    "after_optimizer": "after the optimizer's step",
}


class AllocatorReading(Part):
    """The device's caching allocator over the measured steps; None where it does not say."""

    allocated_peak: int | None = figure(
        "allocated", "GiB", "most bytes held by tensors over the measured steps", "allocator_allocated_peak_bytes"
    )
    requested_peak: int | None = figure(
        "requested", "GiB", "the same before the allocator rounds it up to its blocks",
        "allocator_requested_peak_bytes", default=None,
    )  # fmt: skip
    active_peak: int | None = figure(
        "in use", "GiB", "most bytes in use, blocks that wait for a stream included", "allocator_active_peak_bytes"
    )
    reserved_peak: int | None = figure(
        "reserved", "GiB", "most bytes taken from the device", "allocator_reserved_peak_bytes"
    )
    inactive_split_peak: int | None = figure(
        "inactive split", "GiB", "most bytes free in blocks that are partly in use",
        "allocator_inactive_split_peak_bytes",
    )  # fmt: skip
    fragmentation: int | None = figure(
        "fragmentation", "GiB", "upper bound of what was reserved but unused at the peak of use",
        "allocator_fragmentation_bytes",
    )  # fmt: skip
    driver_used: int | None = figure(
        "used on the device", "GiB", "memory that all processes use, as the driver reports",
        "allocator_driver_used_bytes",
    )  # fmt: skip
    alloc_retries: int | None = figure(
        "retries", "count", "how often the allocator had to free its cache, since the process began"
    )
    ooms: int | None = figure("OOMs", "count", "how often memory ran out, since the process began")


class MemoryLevels(Part):
    """Bytes held (not peaks) at moments of a step of the ``memory`` stage; None where the step has no such phase.

    ``start`` counts the module, optimizer states, and gradients that are not cleared before forward. ``forward`` and
    ``backward`` are the most of the step's batches. With the source ``allocator`` these are all the device's tensors,
    batch and loss included; ``counted`` (on the CPU) are parameters, gradients, optimizer states, buffers and the
    tensors that autograd saved.
    """

    start: int | None = figure("forward begins", "GiB", "{title}")
    forward: int | None = figure("forward has ended", "GiB", "{title}")
    backward: int | None = figure("backward has ended", "GiB", "{title}")
    source: Annotated[Literal["allocator", "counted"], Newer]


class MemoryFacts(Part):
    """Peaks over the measured steps; their causes by part of the step, and bytes held, from the ``memory`` stage."""

    measured: MemoryReading
    parts: dict[str, MemoryReading] = within(
        group="Memory by phase", keys=PARTS, name="{key}_{name}", title="{key}: {title}",
        meaning="{title} within {key}", place=Place.ASKED,
    )  # fmt: skip
    causes: dict[str, MemoryCauses] = within(
        group="Memory by cause", keys=PARTS, name="{key}_{name}_bytes", title="{key}: {title}",
        meaning="{title} in the peak allocated of {key}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    moments: dict[str, MemoryCauses] = within(
        group="Memory at three moments", keys=MOMENTS, name="{key}_{name}_bytes", title="{word}: {title}",
        meaning="{title} held {word}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    held: MemoryLevels | None = within(
        name="held_{name}_bytes", title="held: {title}", meaning="bytes held when {title}",
        instead={"source": Figure("source of held", "text", HOW_HELD, "held_source")}, default=None,
    )  # fmt: skip
    allocator: AllocatorReading | None = within(group="Allocator", default=None)

    @property
    def saved_bytes(self) -> Annotated[int | None, SAVED]:
        """The bytes that are held after forward and were not before it."""
        return None if self.held is None else _less(self.held.forward, self.held.start)

    @property
    def backward_added_bytes(self) -> Annotated[int | None, ADDED]:
        """The bytes that are held after backward, less those held before it."""
        return None if self.held is None else _less(self.held.backward, self.held.forward)


SAVED = Figure("saved for backward", "GiB", "bytes that forward leaves for backward")
ADDED = Figure("added by backward", "GiB", "what backward added: gradients, less what was saved for it")


def _less(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


PEAK = Figure("planned peak", "GiB", "most bytes at one time, rehearsed", "planned_peak_bytes", place=Place.TABLE)
PHASE = Figure("phase of the planned peak", "text", "where the peak would be", "planned_phase")


class PlannedMemory(Part):
    """The memory of a step on one device, rehearsed on tensors without data; empty where that failed.

    Nothing is ``reserved`` on the CPU. A ``compiled`` step is rehearsed without torch.compile.
    """

    peaks: dict[str, int] = figure(
        "{key}: planned", "GiB", "planned peak within {key}", "{key}_planned_peak_bytes", keys=PARTS,
        default_factory=dict,
    )  # fmt: skip
    at_peak: MemoryCauses | None = within(
        name="planned_{name}_bytes", title="planned {title}", meaning="of the planned peak", default=None
    )
    moments: dict[str, MemoryCauses] = within(
        group="Memory at three moments", keys=MOMENTS, name="planned_{key}_{name}_bytes",
        title="{word}: planned {title}",
        meaning="{title} that would be held {word}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    held: MemoryLevels | None = within(
        name="planned_{name}_held_bytes", title="planned: {title}", meaning="bytes that would be held when {title}",
        instead={"source": Figure("source of planned levels", "text", HOW_HELD, "planned_held_source")}, default=None,
    )  # fmt: skip
    reserved: int | None = figure(
        "planned reserved", "GiB",
        "what the allocator of a GPU would take of it, gaps between blocks included, if that is not short",
        "planned_reserved_bytes", default=None,
    )  # fmt: skip
    available: int | None = figure(
        "free before the run", "GiB", "what one replica could have had when the run began", "available_bytes",
        default=None,
    )  # fmt: skip
    compiled: bool = False
    unknown: str | None = figure(
        "not planned", "text", "why it could not be rehearsed", "planned_unknown", default=None
    )

    @property
    def phase(self) -> Annotated[str | None, PHASE]:
        """The phase with the largest peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase], default=None)

    @property
    def peak(self) -> Annotated[int | None, PEAK]:
        """The largest peak of all phases, in bytes."""
        return max(self.peaks.values(), default=None)


class Floor(Part):
    """The least work of a phase on one device and the least time that it takes (roofline). None is unknown.

    ``seconds`` is the longer of two times: the FLOPs at the peak, or the bytes at the full bandwidth
    (``RunRecord.rates``). Bytes move between the device and its memory; those of ``transfer`` move over the bus.
    """

    flops: dict[str, int] = figure(
        "in {key}", "GFLOP", "FLOPs of PHASE whose factors are {key}, one device", "{key}_flops",
        keys=("float32", "bfloat16", "float16", "float64"), default_factory=dict,
    )  # fmt: skip
    bytes: int | None = figure(
        "bytes at least", "GiB", "bytes that PHASE has to move at least, one device", "floor_bytes", default=None
    )
    seconds: float | None = figure(
        "floor (ms)", "ms", "least time of PHASE: its FLOPs at the peak or its bytes at the bandwidth", "floor_s",
        default=None,
    )  # fmt: skip
    bound: Annotated[Literal["compute", "memory"] | None, Newer] = figure(
        "floor is of", "text", "what the floor of PHASE is of: compute or memory", "floor_bound", default=None
    )
    times: float | None = figure("x floor", "x", "mean time of PHASE over its floor", "times_floor", default=None)

"""What memory a run took, when, and for what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run.part import Newer, Part


class MemoryReading(Part):
    """Most bytes at one time. None where this device or system cannot say."""

    allocated_peak: int | None = None
    reserved_peak: int | None = None
    resident_peak: int | None = None


class MemoryCauses(Part):
    """What a part's allocated peak consisted of, in bytes.

    ``activations_and_rest`` is what the others leave of the peak; None where the peak is unknown.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    buffers: int
    activations_and_rest: int | None


class AllocatorReading(Part):
    """The device's caching allocator over the measured steps, in bytes and counts; None where it does not say.

    ``requested_peak`` is what tensors and workspaces asked for, ``allocated_peak`` the blocks that they were given.
    ``fragmentation`` is an upper bound of what was reserved but unused at the peak of use; ``driver_used`` counts other
    processes too; the last two count since the process began.
    """

    allocated_peak: int | None
    requested_peak: int | None = None
    active_peak: int | None
    reserved_peak: int | None
    inactive_split_peak: int | None
    fragmentation: int | None
    driver_used: int | None
    alloc_retries: int | None
    ooms: int | None


class MemoryLevels(Part):
    """Bytes held (not peaks) at moments of a step of the ``memory`` stage; None where the step has no such phase.

    ``start``: forward begins: the module, optimizer states, and gradients that are not cleared before it.
    ``forward``: it has ended, the most of the step's batches. ``forward - start`` is what forward left for backward.
    ``backward``: backward has ended, likewise. ``backward - forward`` is what backward added: gradients, less what was
    saved for it.
    Where ``source`` is ``allocator`` these are all the device's tensors, batch and loss included. ``counted`` (the CPU)
    are parameters, gradients, optimizer states, buffers and the tensors that autograd saved.
    """

    start: int | None
    forward: int | None
    backward: int | None
    source: Annotated[Literal["allocator", "counted"], Newer]


class MemoryFacts(Part):
    """Peaks over the measured steps; per part of a step, their causes, and what is held, from the ``memory`` stage."""

    measured: MemoryReading
    parts: dict[str, MemoryReading]
    causes: dict[str, MemoryCauses] = Field(default_factory=dict)
    held: MemoryLevels | None = None
    allocator: AllocatorReading | None = None

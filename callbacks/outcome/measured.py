"""What a run measured, before it is a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lm_profiler.callbacks.instruments.work import SeenFlops
from lm_profiler.measure.device.contention import CpuUse
from lm_profiler.measure.memory.holdings import HeldAtPeak
from lm_profiler.record.run import AllocatorReading, MemoryLevels, Sync, Telemetry
from lm_profiler.record.steps import Peaks, StepRow


@dataclass(frozen=True)
class Measured:
    """All that a run has to say when it ends: of one rank, or of every one brought together."""

    rows: Sequence[StepRow]
    part_peaks: Mapping[str, Peaks]
    planned: Mapping[str, int]
    between_steps_s: float | None
    device_idle: float | None
    """Share of the measured phases at whose beginning the device had nothing left to do."""
    recompilations: int
    notes: Sequence[str]
    held: Mapping[str, HeldAtPeak] = field(default_factory=dict)
    levels: MemoryLevels | None = None
    allocator: AllocatorReading | None = None
    telemetry: Telemetry | None = None
    syncs: list[Sync] | None = None
    cpu_uses: Sequence[CpuUse] = ()
    """Of each rank that knows."""
    flops: SeenFlops = field(default_factory=SeenFlops)

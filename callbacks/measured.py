"""What a run measured: what the steps and the instruments leave, before Trainer and machine are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lm_profiler.analysis.ranks.rank_timeline import RankTimeline, ReducerTimes
from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.callbacks.instruments.work import SeenFlops
from lm_profiler.measure.device.contention import CpuUse
from lm_profiler.measure.memory.traffic import StepTraffic
from lm_profiler.record.run import (
    AllocatorReading,
    BetweenSteps,
    LoaderFacts,
    MemoryCauses,
    MemoryLevels,
    OtherByOwner,
    PythonTime,
    StepCounters,
    Sync,
    Telemetry,
    ThreadUse,
)
from lm_profiler.record.steps import Peaks, StepRow


@dataclass(frozen=True)
class Measured:
    """What one rank measured, or all of them merged."""

    rows: Sequence[StepRow]
    steps_planned: Mapping[str, int]
    # steps at which a rank's batches or samples of a step change, for each rank
    batch_counts: Sequence[Sequence[BatchCount]] = ()
    between_steps_s: float | None = None
    between: Sequence[BetweenSteps] = ()
    # share of the measured phases at whose beginning the device had nothing left to do
    device_idle: float | None = None
    notes: Sequence[str] = ()
    # What the instruments say, each under the name of its facts.
    part_peaks: Mapping[str, Peaks] = field(default_factory=dict)
    causes: Mapping[str, MemoryCauses] = field(default_factory=dict)
    moments: Mapping[str, MemoryCauses] = field(default_factory=dict)
    levels: MemoryLevels | None = None
    traffic: StepTraffic | None = None
    other_by_owner: OtherByOwner | None = None
    # what the training thread did in each phase of a step of the ``actions`` stage
    thread_use: Mapping[str, ThreadUse] = field(default_factory=dict)
    python_times: Sequence[PythonTime] = ()
    allocator: AllocatorReading | None = None
    recompilations: int = 0
    loader: LoaderFacts | None = None
    telemetry: Telemetry | None = None
    syncs: list[Sync] | None = None
    cpu_uses: Sequence[CpuUse] = ()  # CPU use on each rank that can read it
    counters: Sequence[StepCounters] = ()  # readings of each measured step, of each rank that has them
    flops: SeenFlops = field(default_factory=SeenFlops)
    ranks_heard: int = 1  # number of ranks that sent their facts; ``rows`` may be of more, whose files were found
    timelines: Sequence[RankTimeline] = ()  # one of each rank that knows when it came to its collectives
    reducers: Sequence[ReducerTimes] = ()  # DDP's own timings, of each rank where DDP trains

"""What happened to the process in each measured step: an instrument that reads between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.counts.step_counters import Beside, step_counters
from lm_profiler.measure.counts.step_reader import StepReader
from lm_profiler.measure.device.fault_cost import fault_cost
from lm_profiler.measure.device.telemetry import TelemetrySampler
from lm_profiler.record.run import StepCounters


@dataclass(eq=False)
class StepWatch:
    """Reads at the end of each measured step; the figures are made when the last has ended.

    Args:
        reader: of the counts.
        rank: of this process.
        sampler: of its GPU's clock.
    """

    reader: StepReader
    rank: int = 0
    sampler: TelemetrySampler | None = None
    part: Guard = UNGUARDED
    facts: dict[str, Sequence[StepCounters]] = field(default_factory=dict)
    name: str = "counters of the steps"

    def begin(self, stage: str) -> None:
        if stage == "measure":
            self.reader.start()

    def end(self, stage: str) -> None:
        reader = self.reader
        if stage == "measure":
            reader.stop()
            beside = Beside(reader.collections, reader.compilations, fault_cost())
            if self.sampler is not None:
                beside = replace(beside, gpu=self.sampler.during)
            self.facts = {"counters": step_counters(reader.raw, beside, self.rank)}

    def discard(self) -> None:
        self.reader.stop()

"""Reads between steps what happened to the process in each measured step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.counts.step_reader import Beside, StepReader, step_counters
from lm_profiler.measure.device.nvml import TelemetrySampler
from lm_profiler.record.run import StepCounters


@dataclass(eq=False)
class StepWatch:
    """Instrument that reads counters at the end of each measured step."""

    reader: StepReader  # reads the counts
    rank: int = 0  # this process's
    sampler: TelemetrySampler | None = None  # samples the clock of its GPU; None without one
    part: Guard = UNGUARDED
    name: str = "counters of the steps"

    @property
    def facts(self) -> Mapping[str, Any]:
        """The figures of each step; made when they are asked for, after everything that is timed."""
        return self.part.run(self._facts, otherwise={})

    def _facts(self) -> Mapping[str, Sequence[StepCounters]]:
        reader, sampler = self.reader, self.sampler
        if not reader.raw:
            return {}
        beside = Beside(reader.collections, reader.compilations)
        if sampler is not None:
            beside = replace(beside, gpu=sampler.during)
        return {"counters": step_counters(reader.raw, beside, self.rank)}

    def begin(self, stage: str) -> None:
        if stage == "measure":
            self.reader.start()

    def end(self, stage: str) -> None:
        if stage == "measure":
            self.reader.stop()

    def discard(self) -> None:
        self.reader.stop()

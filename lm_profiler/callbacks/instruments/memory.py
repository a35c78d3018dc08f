"""Peak memory of the measured steps, and of each part of a step in its own stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.traffic import ForwardTraffic, TrafficReader
from lm_profiler.measure.memory.causes import HoldingsReader, by_cause, holdings
from lm_profiler.measure.memory.history import allocator_facts, graph_pool_bytes
from lm_profiler.measure.memory.peaks import PartPeaks, Probe
from lm_profiler.measure.memory.storage_notes import TensorReporter
from lm_profiler.record.run_record import MemoryCauses
from lm_profiler.record.steps import Peaks


@dataclass(eq=False)
class MemoryReader(Instrument):
    """Instrument that reads memory peaks between steps; in the ``memory`` stage at every mark, with their causes."""

    probe: Probe  # reads the peaks
    timeline: Timeline  # its marks are observed
    device: torch.device  # the device whose allocator is asked
    # returns the module and the optimizers whose tensors count; called once they exist
    parties: Callable[[], tuple[nn.Module, Sequence[Optimizer]]]
    # hears of the operators of forward passes, from the instrument that counts FLOPs
    forward: ForwardTraffic = field(default_factory=ForwardTraffic)
    # in the ``memory`` stage, gets what ``TensorReporter`` reports of tensors and their causes; None: nobody needs it
    heard: Callable[..., object] | None = None
    storage: Callable[[Any], int] = id  # returns the identity of a storage for ``heard``
    name = "memory"
    _set_up: MemoryCauses | None = None
    _seen: TensorReporter | None = None
    _readers: tuple[HoldingsReader, TrafficReader, PartPeaks] | None = None

    def __post_init__(self) -> None:
        self.step_peaks = self.probe.peaks  # since the stage began; in the ``memory`` stage, those of the last step

    def _step_peaks(self) -> Peaks:
        assert self._readers is not None
        causes, traffic, parts = self._readers
        causes.step_ended()
        traffic.step_ended()
        if self._seen is not None:
            self._seen.step_ended()
        return parts.take_step()

    def begin(self, stage: str) -> None:
        self.probe.reset()  # each stage has its own peaks
        module, optimizers = self.parties()
        if self._set_up is None:
            self._set_up = by_cause(self.probe.held(), holdings(module, optimizers, self.device))
        if stage != "memory":
            return
        # In this order: the last resets the peak that the first reads.
        peak, held = lambda: self.probe.peaks()[0], self.probe.held
        causes = HoldingsReader(module, optimizers, peak, self.device, held, self.part)
        traffic = TrafficReader(module, optimizers, self.device, self.timeline, causes.saved, self.forward)
        self._readers = causes, traffic, PartPeaks(self.probe)
        causes.start()
        if self.heard is not None:
            self._seen = TensorReporter(module, optimizers, causes.saved, self.storage, self.heard)
        self.observe(self.timeline, *([] if self._seen is None else [self._seen]), *self._readers)
        self.step_peaks = self._step_peaks  # swapped instead of a branch: the steps of other stages are timed

    def end(self, stage: str) -> None:
        if stage == "measure":
            self.facts.update(allocator=allocator_facts(self.device), graph_pools=graph_pool_bytes(self.device))
        if self._readers is None:
            return
        causes, traffic, parts = self._readers
        self.discard()
        self.facts.update(part_peaks=parts.by_part(), causes=causes.by_part(), levels=causes.levels)
        self.facts.update(traffic=traffic.traffic, moments={"set_up": self._set_up, **causes.moments})

    def discard(self) -> None:
        if self._readers is None:
            return
        self.step_peaks = self.probe.peaks
        causes, *_ = self._readers
        super().discard()
        causes.stop()
        if not causes.saved.seeing:
            self._readers = None  # only now: the next call tries again what could not be undone

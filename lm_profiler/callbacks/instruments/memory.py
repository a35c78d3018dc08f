"""Reads the peak memory of the measured steps, and, in a stage of its own, of each part of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.traffic import ForwardTraffic, TrafficReader
from lm_profiler.measure.memory.causes import HoldingsReader, holdings, split_by_cause
from lm_profiler.measure.memory.history import allocator_facts, graph_pool_bytes
from lm_profiler.measure.memory.peaks import PartPeaks, Probe, available_bytes
from lm_profiler.measure.memory.storage_notes import TensorReporter
from lm_profiler.record.run_record import MemoryCauses
from lm_profiler.record.steps import Peaks


class _Readers(NamedTuple):
    """The observers of marks in the ``memory`` stage, in this order: the last resets the peak that the first reads."""

    causes: HoldingsReader
    traffic: TrafficReader
    peaks: PartPeaks


@dataclass(eq=False)
class MemoryReader(Instrument):
    """Instrument that reads memory peaks between steps; in the ``memory`` stage at every mark, with their causes."""

    probe: Probe  # reads the peaks
    timeline: Timeline  # the timeline whose marks are observed
    device: torch.device  # the device whose allocator is read
    # returns the module and the optimizers whose tensors count; called once they exist
    parties: Callable[[], tuple[nn.Module, Sequence[Optimizer]]]
    # receives the operators of forward passes from the instrument that counts FLOPs
    forward: ForwardTraffic = field(default_factory=ForwardTraffic)
    # receives the reports of ``TensorReporter`` in the ``memory`` stage; None if they are not needed
    note_tensors: Callable[..., object] | None = None
    # returns the identity of a storage for ``note_tensors``
    storage_id: Callable[[Any], int] = id
    name = "memory"
    _set_up: MemoryCauses | None = None
    _reporter: TensorReporter | None = None
    _readers: _Readers | None = None

    def __post_init__(self) -> None:
        # Returns the peaks since the stage began. In the ``memory`` stage it is replaced by a function that also ends
        # the step of the observers, and returns the peaks of that step.
        self.end_step = self.probe.peaks

    def _end_observed_step(self) -> Peaks:
        """End the step of all observers of the ``memory`` stage, and return its peaks."""
        readers = self._readers
        assert readers is not None
        readers.causes.step_ended()
        readers.traffic.step_ended()
        if self._reporter is not None:
            self._reporter.step_ended()
        return readers.peaks.take_step()

    def begin(self, stage: str) -> None:
        """Restart the peaks; in the ``memory`` stage, also observe at each mark which bytes are held and moved."""
        self.probe.reset()  # each stage has its own peaks
        module, optimizers = self.parties()
        if self._set_up is None:
            self._set_up = split_by_cause(
                self.probe.held(), holdings(module, optimizers, self.device)
            )
        if stage == "memory":
            self._observe_marks(module, optimizers)

    def _observe_marks(
        self, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        """Read at each mark, until the stage ends, what is held, moved and at its peak."""
        causes = HoldingsReader(
            module,
            optimizers,
            peak_bytes=self._allocated_peak,
            device=self.device,
            held_bytes=self.probe.held,
            guard=self.guard,
        )
        traffic = TrafficReader(
            module,
            optimizers,
            self.device,
            self.timeline,
            causes.saved_tensors,
            self.forward,
        )
        self._readers = _Readers(causes, traffic, PartPeaks(self.probe))
        causes.start()
        observers: list[Callable[[int], object]] = [*self._readers]
        if self.note_tensors is not None:
            self._reporter = TensorReporter(
                module,
                optimizers,
                saved=causes.saved_tensors,
                identity_of=self.storage_id,
                report=self.note_tensors,
            )
            observers.insert(0, self._reporter)
        self.observe(self.timeline, *observers)
        # replaced here instead of a branch in it, because the steps of other stages are timed
        self.end_step = self._end_observed_step

    def _allocated_peak(self) -> int | None:
        """Return the most bytes that tensors held; None if the allocator does not count them."""
        return self.probe.peaks()[0]

    def end(self, stage: str) -> None:
        """After ``measure``, keep the counts of the allocator, and the free memory of a CPU.

        After ``memory``, keep the results of the observers.
        """
        if stage == "measure":
            self.facts["allocator"] = allocator_facts(self.device)
            self.facts["graph_pools"] = graph_pool_bytes(self.device)
            if self.device.type == "cpu":
                self.facts["resident_bytes"] = psutil.Process().memory_info().rss
                self.facts["available_bytes"] = available_bytes(self.device)
        readers = self._readers
        if readers is None:
            return
        self.discard()
        self.facts["part_peaks"] = readers.peaks.by_part()
        self.facts["causes"] = readers.causes.by_part()
        self.facts["levels"] = readers.causes.levels
        self.facts["traffic"] = readers.traffic.traffic
        self.facts["moments"] = {"set_up": self._set_up, **readers.causes.moments}

    def discard(self) -> None:
        """Remove the observers of the ``memory`` stage."""
        if self._readers is None:
            return
        self.end_step = self.probe.peaks
        super().discard()
        causes = self._readers.causes
        causes.stop()
        if not causes.saved_tensors.is_watching:
            # Otherwise the next call tries again to stop watching.
            self._readers = None

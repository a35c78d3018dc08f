"""Peak memory of the measured steps, and of each part of a step in a stage of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.traffic import ForwardTraffic, TrafficReader
from lm_profiler.measure.memory.causes import HoldingsReader, by_cause, holdings
from lm_profiler.measure.memory.history import allocator_facts, graph_pool_bytes
from lm_profiler.measure.memory.levels import LevelsReader
from lm_profiler.measure.memory.peaks import PartPeaks, Probe
from lm_profiler.measure.memory.storage_notes import TensorsSeen
from lm_profiler.record.run import MemoryCauses
from lm_profiler.record.steps import Peaks
from lm_profiler.usage_error import UsageError, expect


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Peak memory by phase and by cause.

    Args:
        steps: Steps after the measured ones in which memory is read at every mark, and FLOPs are counted; they are not
            timed. With 0, FLOPs are counted on shapes alone when the run is over, which takes some seconds; with
            trace.steps=0 too, they are not.
        history: Record the allocator's history in those steps (CUDA), as memory_snapshot.pickle for memory_viz.
    """

    steps: int = 1
    history: bool = False

    def __post_init__(self) -> None:
        expect(self.steps >= 0, "memory.steps", "0 or more", self.steps)
        expect(self.steps > 0 or not self.history, "memory.steps", "1 or more with memory.history", self.steps)
        if self.history and not torch.cuda.is_available():
            raise UsageError("memory.history: expected a CUDA device, given none; leave the option out")


@dataclass(eq=False)
class MemoryReader:
    """Instrument that reads memory peaks between steps; in the ``memory`` stage at every mark, with their causes."""

    probe: Probe  # reads the peaks
    timeline: Timeline  # its marks are observed
    device: torch.device  # the device whose allocator is asked
    # returns the module and the optimizers whose tensors count; called once they exist
    parties: Callable[[], tuple[nn.Module, Sequence[Optimizer]]]
    # hears of the operators of forward passes, from the instrument that counts FLOPs
    forward: ForwardTraffic = field(default_factory=ForwardTraffic)
    # in the ``memory`` stage, hears of tensors and their causes, as ``TensorsSeen`` says; None: nobody does
    told: Callable[..., object] | None = None
    storage: Callable[[Any], int] = id  # returns the identity of a storage for ``told``
    part: Guard = UNGUARDED
    facts: dict[str, Any] = field(default_factory=dict)
    _set_up: MemoryCauses | None = None
    _seen: TensorsSeen | None = None
    _readers: tuple[HoldingsReader, LevelsReader, TrafficReader, PartPeaks] | None = None
    _observers: tuple[Callable[[int], None], ...] = ()
    name: str = "memory"

    def __post_init__(self) -> None:
        self.step_peaks = self.probe.peaks
        """Returns the peaks since the stage began; in the ``memory`` stage, those of the last step."""

    def _step_peaks(self) -> Peaks:
        assert self._readers is not None
        causes, levels, traffic, parts = self._readers
        causes.step_ended()
        traffic.step_ended()
        levels.step_ended()
        if self._seen is not None:
            self._seen.step_ended()
        return parts.take_step()

    def begin(self, stage: str) -> None:
        self.probe.reset()  # each stage has peaks of its own
        module, optimizers = self.parties()
        if self._set_up is None:
            self._set_up = by_cause(self.probe.held(), holdings(module, optimizers, self.device))
        if stage != "memory":
            return
        # In this order: the last resets the peak that the first reads.
        levels = LevelsReader(module, optimizers, self.probe.held, self.device, self.part)
        self._readers = (
            HoldingsReader(module, optimizers, lambda: self.probe.peaks()[0], self.device, self.probe.held, self.part),
            levels,
            TrafficReader(module, optimizers, self.device, self.timeline, levels.saved, self.forward),
            PartPeaks(self.probe),
        )
        self._readers[0].start()
        self._observers = tuple(self.part.guard(reader) for reader in self._readers)
        if self.told is not None:
            self._seen = TensorsSeen(module, optimizers, levels.saved, self.storage, self.told)
            self._observers = (self.part.guard(self._seen), *self._observers)
        self.timeline.observers += self._observers
        self.step_peaks = self._step_peaks  # swapped, and no branch: other stages' steps are timed

    def end(self, stage: str) -> None:
        if stage == "measure":
            self.facts["allocator"] = allocator_facts(self.device)
            self.facts["graph_pools"] = graph_pool_bytes(self.device)
        if self._readers is None:
            return
        causes, levels, traffic, parts = self._readers
        self.discard()
        self.facts |= {"part_peaks": parts.by_part(), "causes": causes.by_part(), "levels": levels.levels}
        self.facts |= {"traffic": traffic.traffic, "moments": {"set_up": self._set_up, **causes.moments}}

    def discard(self) -> None:
        if self._readers is None:
            return
        self.step_peaks = self.probe.peaks
        causes, levels, *_ = self._readers
        self.timeline.unobserve(*self._observers)
        self._observers = ()
        causes.stop()
        levels.stop()
        if not levels.watching:
            self._readers = None  # only now: what could not be undone is tried again by the next call

"""What is looked at beside time: each instrument is told when a stage begins and ends, and keeps what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch

from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.trace import Tracer
from lm_profiler.callbacks.instruments.work import FlopsWatch
from lm_profiler.measure.boundary import UNGUARDED, Part
from lm_profiler.measure.counts.recompiles import recompilations, recompiled_since
from lm_profiler.measure.counts.syncs import sync_detector_of
from lm_profiler.measure.device.contention import ContentionWatch
from lm_profiler.measure.device.telemetry import telemetry_of
from lm_profiler.measure.memory.history import memory_history_of
from lm_profiler.record.run import Sync, Telemetry


class Instrument(Protocol):
    """Told of every stage; works between steps. What it raises takes it out, and ``discard`` is called."""

    name: str
    part: Part
    """Answers for what training calls of it during a step."""

    def begin(self, stage: str) -> None:
        """``stage`` starts with the next step."""

    def end(self, stage: str) -> None:
        """``stage`` is over; of ``measure``, on the device too."""

    def discard(self) -> None:
        """Stop, leave training's objects as they were, and keep nothing."""


class TelemetryWatch:
    """Clock, power and energy of the GPU over the measured steps; None elsewhere."""

    name = "telemetry"
    part: Part = UNGUARDED

    def __init__(self, device: torch.device) -> None:
        self._telemetry = telemetry_of(device)
        self.reading: Telemetry | None = None

    def begin(self, stage: str) -> None:
        if stage == "measure" and self._telemetry is not None:
            self._telemetry.start()

    def end(self, stage: str) -> None:
        if stage == "measure" and self._telemetry is not None:
            self.reading = self._telemetry.stop()

    def discard(self) -> None:
        if self._telemetry is not None:
            self._telemetry.stop()


class CompileWatch:
    """How often torch.compile compiled while steps were measured, and what."""

    name = "recompilations"
    part: Part = UNGUARDED

    def __init__(self) -> None:
        self.recompilations = 0
        self.names: list[str] = []

    def begin(self, stage: str) -> None:
        if stage == "measure":
            self._before = recompilations()

    def end(self, stage: str) -> None:
        if stage == "measure":
            self.recompilations = recompilations() - self._before
            self.names = recompiled_since(self._before) or []

    def discard(self) -> None:
        self.recompilations, self.names = 0, []


class SyncWatch:
    """The lines that make the host wait for the device, found in the ``memory`` stage; None without a device."""

    name = "waits for the device"
    part: Part = UNGUARDED

    def __init__(self, device: torch.device) -> None:
        self._detector = sync_detector_of(device)
        self.points: list[Sync] | None = None

    def begin(self, stage: str) -> None:
        if stage == "memory" and self._detector is not None:
            self._detector.begin()

    def end(self, stage: str) -> None:
        if stage == "memory" and self._detector is not None:
            self.points = self._detector.end()

    def discard(self) -> None:
        if self._detector is not None:
            self._detector.end()


class HistoryWatch:
    """The allocator's history of the ``memory`` stage, when asked for, in ``path``."""

    name = "memory.history"
    part: Part = UNGUARDED

    def __init__(self, device: torch.device, path: Path, wanted: bool) -> None:
        self._history = memory_history_of(device) if wanted else None
        self._path = path

    def begin(self, stage: str) -> None:
        if stage == "memory" and self._history is not None:
            self._history.start()

    def end(self, stage: str) -> None:
        if stage == "memory" and self._history is not None:
            try:
                self._history.dump(self._path)
            finally:
                self._history.stop()

    def discard(self) -> None:
        if self._history is not None:
            self._history.stop()


def require_history(device: torch.device) -> None:
    """Raise a ValueError where the allocator of ``device`` keeps no history."""
    if memory_history_of(device) is None:
        raise ValueError(f"memory.history: expected a CUDA device, given {device.type}; leave the option out")


@dataclass(frozen=True)
class Instruments:
    """All of one run's, in the order in which they begin; they end in the opposite one."""

    memory: MemoryReader
    compiles: CompileWatch
    syncs: SyncWatch
    history: HistoryWatch
    tracer: Tracer
    telemetry: TelemetryWatch
    flops: FlopsWatch
    contention: ContentionWatch  # the last to begin, the first to end

    def __iter__(self) -> Iterator[Instrument]:
        return (getattr(self, each.name) for each in fields(self))

    def guard(self, tell: Callable[[str], object]) -> None:
        """Let each fail by itself; ``tell`` is told."""
        for instrument in self:
            instrument.part = Part(instrument.name, tell, instrument.discard)

    def begin(self, stage: str) -> None:
        """``stage`` starts with the next step."""
        for instrument in self:
            instrument.part.run(instrument.begin, stage)

    def end(self, stage: str) -> None:
        """``stage`` is over."""
        for instrument in reversed(list(self)):
            if instrument.part.out:
                instrument.part.undo()  # what it could not undo where it failed, amid a backward pass
            else:
                instrument.part.run(instrument.end, stage)

    def discard(self) -> None:
        """Stop them all."""
        for instrument in reversed(list(self)):
            instrument.part.run(instrument.discard)

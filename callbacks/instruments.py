"""What is looked at beside time: each instrument is told when a stage begins and ends, and keeps what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch

from lm_profiler.callbacks.extras import said
from lm_profiler.callbacks.memory import MemoryReader
from lm_profiler.callbacks.trace import Tracer
from lm_profiler.measure.history import memory_history_of
from lm_profiler.measure.recompiles import recompilations, recompiled_since
from lm_profiler.measure.syncs import sync_detector_of
from lm_profiler.measure.telemetry import telemetry_of
from lm_profiler.record.run import Sync, Telemetry


class Instrument(Protocol):
    """Told of every stage; works between steps."""

    def begin(self, stage: str) -> None:
        """``stage`` starts with the next step."""

    def end(self, stage: str) -> None:
        """``stage`` is over; of ``measure``, on the device too."""


class TelemetryWatch:
    """Clock, power and energy of the GPU over the measured steps; None elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._telemetry = telemetry_of(device)
        self.reading: Telemetry | None = None

    def begin(self, stage: str) -> None:
        if stage == "measure" and self._telemetry is not None:
            self._telemetry.start()

    def end(self, stage: str) -> None:
        if stage == "measure" and self._telemetry is not None:
            self.reading = self._telemetry.stop()


class CompileWatch:
    """How often torch.compile compiled while steps were measured, and what."""

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


class SyncWatch:
    """The lines that make the host wait for the device, found in the ``memory`` stage; None without a device."""

    def __init__(self, device: torch.device) -> None:
        self._detector = sync_detector_of(device)
        self.points: list[Sync] | None = None

    def begin(self, stage: str) -> None:
        if stage == "memory" and self._detector is not None:
            self._detector.begin()

    def end(self, stage: str) -> None:
        if stage == "memory" and self._detector is not None:
            self.points = self._detector.end()


class HistoryWatch:
    """The allocator's history of the ``memory`` stage, when asked for, in ``path``."""

    def __init__(self, device: torch.device, path: Path, wanted: bool) -> None:
        self._history = memory_history_of(device) if wanted else None
        if wanted and self._history is None:
            raise ValueError(f"memory.history: expected a CUDA device, given {device.type}; leave the option out")
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


@dataclass(frozen=True)
class Instruments:
    """All of one run's, in the order in which they begin; they end in the opposite one."""

    memory: MemoryReader
    compiles: CompileWatch
    syncs: SyncWatch
    history: HistoryWatch
    tracer: Tracer
    telemetry: TelemetryWatch

    def __iter__(self) -> Iterator[Instrument]:
        return (getattr(self, field.name) for field in fields(self))

    def begin(self, stage: str) -> list[str]:
        """``stage`` starts with the next step; returns a note for each instrument that cannot."""
        return _told([instrument.begin for instrument in self], stage)

    def end(self, stage: str) -> list[str]:
        """``stage`` is over; returns a note for each instrument that lost what it had."""
        return _told([instrument.end for instrument in reversed(list(self))], stage)


def _told(listeners: Sequence[Callable[[str], None]], stage: str) -> list[str]:
    """Tell everyone, whoever fails: a driver or a full disk must not end somebody's training."""
    notes = []
    for tell in listeners:
        try:
            tell(stage)
        except Exception as error:
            notes.append(f"{tell.__qualname__}({stage!r}) failed: {said(error)}")
    return notes

"""Instruments that read something at the beginning and the end of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lm_profiler.callbacks.instruments.instrument import Watch
from lm_profiler.measure.counts.recompiles import recompilations, recompiled_since
from lm_profiler.measure.counts.syncs import sync_detector_of
from lm_profiler.measure.device.contention import CpuUseReader
from lm_profiler.measure.device.telemetry import TelemetrySampler
from lm_profiler.measure.memory.history import memory_history_of
from lm_profiler.usage_error import UsageError


def watches_of(
    device: torch.device, history: Path | None = None, sampler: TelemetrySampler | None = None
) -> list[Watch]:
    """All that have a meaning on ``device``, in the order in which they begin; ``history`` is a snapshot's file,
    ``sampler`` that of its GPU."""
    watches = [recompilations_watch()]
    if (detector := sync_detector_of(device)) is not None:
        finish = detector.end
        watches.append(Watch("waits for the device", "memory", detector.begin, lambda: {"syncs": finish()}, finish))
    if history is not None:
        watches.append(history_watch(device, history))
    if sampler is not None:
        stop = sampler.stop
        watches.append(Watch("telemetry", "measure", sampler.start, lambda: {"telemetry": stop()}, stop))
    # The last to begin and the first to end: it counts the CPU time of all that runs in between.
    cpu = CpuUseReader(None if sampler is None else sampler.gpu)
    return [*watches, Watch("contention", "measure", cpu.begin, lambda: {"cpu_uses": cpu.end()})]


def recompilations_watch() -> Watch:
    """How often torch.compile compiled while steps were measured, and what."""
    before = 0

    def start() -> None:
        nonlocal before
        before = recompilations()

    def facts() -> Mapping[str, Any]:
        return {"recompilations": recompilations() - before, "recompiled": recompiled_since(before) or ()}

    return Watch("recompilations", "measure", start, facts)


def history_watch(device: torch.device, path: Path) -> Watch:
    """The allocator's history of the ``memory`` stage, in ``path``.

    Raises:
        UsageError: the allocator of ``device`` keeps none.
    """
    history = memory_history_of(device)
    if history is None:
        raise UsageError(f"memory.history: expected a CUDA device, given {device.type}; leave the option out")

    def facts() -> Mapping[str, Any]:
        try:
            history.dump(path)
        finally:
            history.stop()
        return {}

    return Watch("memory.history", "memory", history.start, facts, history.stop)

"""Instruments that read something at the beginning and the end of one stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lm_profiler.callbacks.instruments.instrument import Watch
from lm_profiler.lightning_names import COMBINED, FETCHER
from lm_profiler.measure.boundary import Guard, say
from lm_profiler.measure.counts.recompiles import recompilations, recompiled_since
from lm_profiler.measure.counts.step_reader import ready_batches
from lm_profiler.measure.counts.syncs import sync_detector_of
from lm_profiler.measure.device.contention import CpuUseReader
from lm_profiler.measure.device.nvml import TelemetrySampler
from lm_profiler.measure.memory.history import memory_history_of
from lm_profiler.measure.memory.storage_notes import MarksHeard, timeline_of
from lm_profiler.record.memory_timeline import write_timeline
from lm_profiler.record.run import LoaderFacts
from lm_profiler.usage_error import UsageError


def profiler_range() -> Watch:
    """Tell CUDA's profiling API where the measured steps begin and end, for a program that records between the two."""

    def start() -> None:
        torch.cuda.synchronize()  # else kernels of the warm-up that still run would be recorded as well
        torch.cuda.profiler.start()

    def finish() -> Mapping[str, Any]:
        torch.cuda.profiler.stop()
        return {}

    return Watch("trace.cuda_profiler_range", "measure", start, finish, torch.cuda.profiler.stop)


def watches_of(
    device: torch.device,
    history: Path | None = None,
    sampler: TelemetrySampler | None = None,
    heard: MarksHeard | None = None,
) -> list[Watch]:
    """Return the watches that mean something on ``device``, in the order in which they begin.

    Args:
        device: the run's.
        history: file for a snapshot of the allocator; None where its history is not recorded.
        sampler: reads the GPU's clock, power and temperature; None where there is no GPU.
        heard: the marks of the steps whose history is recorded.
    """
    watches = [recompilations_watch()]
    if (detector := sync_detector_of(device)) is not None:
        finish = detector.end
        watches.append(Watch("waits for the device", "memory", detector.begin, lambda: {"syncs": finish()}, finish))
    if history is not None:
        watches.append(history_watch(device, history, heard))
    if sampler is not None:
        stop = sampler.stop
        watches.append(Watch("telemetry", "measure", sampler.start, lambda: {"telemetry": stop()}, stop))
    # This one begins last and ends first: it counts the CPU time of all that runs in between.
    cpu = CpuUseReader(None if sampler is None else sampler.gpu)
    return [*watches, Watch("contention", "measure", cpu.begin, lambda: {"cpu_uses": cpu.end()})]


def recompilations_watch() -> Watch:
    """Return the watch that counts what torch.compile compiled while steps were measured."""
    before = 0

    def start() -> None:
        nonlocal before
        before = recompilations()

    def facts() -> Mapping[str, Any]:
        return {"recompilations": recompilations() - before, "recompiled": recompiled_since(before) or ()}

    return Watch("recompilations", "measure", start, facts)


def loader_watch(trainer: Trainer) -> Watch:
    """Return the watch that counts how many batches the training loader's workers have prefetched.

    It looks where the measured steps begin and where they end. With several loaders the counts stay unknown.
    """
    before: int | None = None

    def ready() -> int | None:
        iterators = _loader_iterators(trainer)
        loader = trainer.train_dataloader
        return ready_batches(iterators[0], getattr(loader, "num_workers", None)) if len(iterators) == 1 else None

    def start() -> None:
        nonlocal before
        before = ready()

    def facts() -> Mapping[str, Any]:
        loader = trainer.train_dataloader
        workers, each = (getattr(loader, name, None) for name in ("num_workers", "prefetch_factor"))
        ahead = workers * (each or 0) if isinstance(workers, int) else None
        return {"loader": LoaderFacts(workers=workers, ahead=ahead, ready_before=before, ready_after=ready())}

    return Watch("prefetched batches", "measure", start, facts)


def _loader_iterators(trainer: Trainer) -> list[Iterator[Any]]:
    """Return the loader's iterators in Lightning's loop (2.6: FitLoop, CombinedLoader), as far as there are any."""
    fetcher = FETCHER.of(trainer.fit_loop)
    combined = None if fetcher is None else COMBINED.of(fetcher.combined_loader)
    return [] if combined is None else combined.iterators


def history_watch(device: torch.device, path: Path, heard: MarksHeard | None = None) -> Watch:
    """Return the watch that writes the allocator's history of the ``memory`` stage to ``path``.

    With what was ``heard`` at its marks, it also writes the memory timeline of the last step beside it.

    Raises:
        UsageError: the allocator of ``device`` keeps none.
    """
    history = memory_history_of(device)
    if history is None:
        raise UsageError(f"memory.history: expected a CUDA device, given {device.type}; leave the option out")

    def facts() -> Mapping[str, Any]:
        try:
            recorded = history.dump(path)
            if heard is not None:
                part = Guard("the measured memory timeline", say, outcome="unknown")
                timeline = part.run(timeline_of, recorded, device.index or 0, heard)
                if timeline is not None:
                    part.run(write_timeline, timeline, path.parent)
        finally:
            history.stop()
        return {}

    return Watch("memory.history", "memory", history.start, facts, history.stop)

"""Instruments that read something when the measured steps begin and end, or between steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lm_profiler.callbacks.instruments.instrument import Instrument, Watch
from lm_profiler.lightning_names import COMBINED, FETCHER
from lm_profiler.measure.boundary import Guard, print_message
from lm_profiler.measure.counts.recompiles import recompilations
from lm_profiler.measure.counts.step_reader import (
    StepReader,
    ready_batches,
    seconds_compiling,
    step_counters,
)
from lm_profiler.measure.counts.syncs import SyncDetector, sync_detector_of
from lm_profiler.measure.device.contention import cpu_reading, cpu_use_since
from lm_profiler.measure.device.nvml import TelemetrySampler
from lm_profiler.measure.memory.history import memory_history_of
from lm_profiler.measure.memory.storage_notes import MarkLog, timeline_from_snapshot
from lm_profiler.record.memory_timeline import write_timeline
from lm_profiler.record.run_record import LoaderFacts
from lm_profiler.usage_error import UsageError


@dataclass(eq=False)
class StepWatch(Instrument):
    """Instrument that reads counters of the process at the end of measured steps."""

    reader: StepReader  # reads the counters
    rank: int = 0  # the rank of this process
    # samples the clock of the rank's GPU; None without a GPU
    sampler: TelemetrySampler | None = None
    # when each checkpoint began and ended, in turn
    checkpoint_instants_ns: Sequence[int] = ()
    name = "counters of the steps"
    stage = "measure"

    @property
    def facts(self) -> dict[str, Any]:
        """The counters. They are computed when they are requested, which is after all timing."""
        return self.guard.run(self._counter_facts, otherwise={})

    def _counter_facts(self) -> dict[str, Any]:
        """Return the counters of the measured steps; empty if no step was read."""
        reader = self.reader
        if not reader.timed_readings:
            return {}
        gpu_readings = None if self.sampler is None else self.sampler.readings_between
        counters = step_counters(
            reader.timed_readings,
            reader.collections,
            reader.compilations,
            self.rank,
            gpu_readings,
            self.checkpoint_instants_ns,
        )
        return {"counters": list(counters)}

    def start(self) -> None:
        self.reader.start()

    def end(self, stage: str) -> None:
        if stage == self.stage:
            self.reader.stop()

    def discard(self) -> None:
        self.reader.stop()


def watches_of(
    device: torch.device,
    history: Path | None = None,
    sampler: TelemetrySampler | None = None,
    mark_log: MarkLog | None = None,
) -> list[Watch]:
    """Return the watches that apply to ``device``, in the order in which they begin.

    If ``history`` is given, the allocator's history is written there; the memory timeline also uses ``mark_log``.
    """
    watches = [_recompilations_watch(), _warmup_compile_watch()]
    detector = sync_detector_of(device)
    if detector is not None:
        watches.append(_syncs_watch(detector))
    if history is not None:
        watches.append(history_watch(device, history, mark_log))
    if sampler is not None:
        watches.append(_telemetry_watch(sampler))
    # The last to begin and the first to end, so that it does not count the CPU time of the others.
    watches.append(_contention_watch(sampler))
    return watches


def _recompilations_watch() -> Watch:
    """Return the watch that counts the compilations by torch.compile during the measured steps."""
    return Watch(
        name="recompilations",
        stage="measure",
        start=lambda: recompilations(),
        result=lambda before: {"recompilations": recompilations() - before},
    )


def _warmup_compile_watch() -> Watch:
    """Return the watch of the seconds that torch.compile takes during warm-up."""
    return Watch(
        name="compilation in warm-up",
        stage="warmup",
        start=time.time,
        result=lambda began_s: {"warmup_compile_s": seconds_compiling(began_s)},
    )


def _syncs_watch(detector: SyncDetector) -> Watch:
    """Return the watch of the lines that make the host wait for the device, in the ``memory`` stage."""
    return Watch(
        name="waits for the device",
        stage="memory",
        start=detector.begin,
        result=lambda _: {"syncs": detector.end()},
        stop=detector.end,
    )


def _telemetry_watch(sampler: TelemetrySampler) -> Watch:
    """Return the watch of the GPU's clock, power and temperature during the measured steps."""
    return Watch(
        name="telemetry",
        stage="measure",
        start=sampler.start,
        result=lambda _: {"telemetry": sampler.stop()},
        stop=sampler.stop,
    )


def _contention_watch(sampler: TelemetrySampler | None) -> Watch:
    """Return the watch of the CPU time that this process and others use during the measured steps."""
    gpu = None if sampler is None else sampler.gpu

    def facts(begin: tuple[Any, float]) -> Mapping[str, Any]:
        reading, began_s = begin
        return {"cpu_uses": cpu_use_since(reading, began_s, gpu)}

    return Watch(
        name="contention",
        stage="measure",
        start=lambda: (cpu_reading(), time.time()),
        result=facts,
    )


def profiler_range() -> Watch:
    """Return the watch that marks the measured steps in CUDA's profiling API, for programs such as Nsight Systems."""

    def start() -> None:
        torch.cuda.synchronize()  # so that kernels of the warm-up are not recorded
        torch.cuda.profiler.start()

    def stop(_: object = None) -> Mapping[str, Any]:
        torch.cuda.profiler.stop()
        return {}

    return Watch(
        name="trace.cuda_profiler_range",
        stage="measure",
        start=start,
        result=stop,
        stop=stop,
    )


def loader_watch(trainer: Any) -> Watch:
    """Return the watch that counts how many batches the loader's workers have prefetched.

    The number is unknown if there are several loaders.
    """

    def count_ready() -> int | None:
        """Return how many batches are prefetched; None if that is unknown."""
        iterators = _loader_iterators(trainer)
        if len(iterators) != 1:
            return None
        return ready_batches(
            iterators[0], getattr(trainer.train_dataloader, "num_workers", None)
        )

    def facts(ready_before: int | None) -> Mapping[str, Any]:
        loader = trainer.train_dataloader
        workers = getattr(loader, "num_workers", None)
        most_ready: int | None = None
        if isinstance(workers, int):
            batches_per_worker = getattr(loader, "prefetch_factor", None) or 0
            most_ready = workers * batches_per_worker
        loader_facts = LoaderFacts(
            workers=workers,
            ahead=most_ready,
            ready_before=ready_before,
            ready_after=count_ready(),
        )
        return {"loader": loader_facts}

    return Watch(
        name="prefetched batches",
        stage="measure",
        start=count_ready,
        result=facts,
    )


def _loader_iterators(trainer: Any) -> list[Iterator[Any]]:
    """Return the iterators over the loaders in Lightning's loop (2.6: FitLoop, CombinedLoader), if there are any."""
    fetcher = FETCHER.get(trainer.fit_loop)
    if fetcher is None:
        return []
    combined = COMBINED.get(fetcher.combined_loader)
    if combined is None:
        return []
    iterators: list[Iterator[Any]] = combined.iterators
    return iterators


def history_watch(
    device: torch.device, path: Path, mark_log: MarkLog | None = None
) -> Watch:
    """Return the watch that writes the allocator's history to ``path``, and the last step's memory timeline beside it.

    Raises:
        UsageError: the allocator of ``device`` keeps no history.
    """
    history = memory_history_of(device)
    if history is None:
        raise UsageError(f"memory.history: expected a CUDA device, given {device.type}")

    def facts(_: object) -> Mapping[str, Any]:
        try:
            recorded = history.dump(path)
            if mark_log is not None:
                _write_timeline(recorded, device, mark_log, path.parent)
        finally:
            history.stop()
        return {}

    return Watch(
        name="memory.history",
        stage="memory",
        start=history.start,
        result=facts,
        stop=history.stop,
    )


def _write_timeline(
    recorded: Any, device: torch.device, mark_log: MarkLog, folder: Path
) -> None:
    """Write the memory timeline of ``device`` that the ``recorded`` history shows; an error is only reported."""
    guard = Guard("the measured memory timeline", print_message, outcome="unknown")
    timeline = guard.run(timeline_from_snapshot, recorded, device.index or 0, mark_log)
    if timeline is not None:
        guard.run(write_timeline, timeline, folder)

"""Other processes on the run's GPU, as NVML tells."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

import torch

from lm_profiler.measure.device.nvml import Gpu, gpu_of
from lm_profiler.record.run import GpuSharing

_PATIENCE_S = 5.0


class GpuNeighbours:
    """Looks at one GPU once, when the measured steps are over.

    Args:
        gpu: the card.
        clock: seconds since 1970, which is what NVML stamps its samples with.
    """

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.time) -> None:
        self._gpu = gpu
        self._clock = clock
        self._since_us = 0

    def begin(self) -> None:
        """Samples count from now on."""
        self._since_us = int(self._clock() * 1e6)

    def end(self) -> GpuSharing | None:
        """What others had since ``begin``; None where NVML does not say, or not in time: it can hang on a lost GPU."""
        readings: list[GpuSharing | None] = []
        thread = threading.Thread(target=lambda: readings.append(self._look()), name="lm_profiler gpu", daemon=True)
        thread.start()
        thread.join(timeout=_PATIENCE_S)
        return readings[0] if readings else None

    def _look(self) -> GpuSharing | None:
        processes = self._gpu.ask("nvmlDeviceGetComputeRunningProcesses")
        if processes is None:
            return None
        running = {each.pid: each.usedGpuMemory for each in processes}
        if os.getpid() not in running:
            # Inside a container NVML tells the host's numbers, or nothing. One of the processes is this one.
            return GpuSharing(processes=len(running) - 1, utilisation=None, memory_bytes=None) if running else None
        del running[os.getpid()]
        used = self._utilisation()
        held = list(running.values())
        return GpuSharing(
            processes=len(running.keys() | (used or {}).keys()),
            utilisation=None if used is None else min(sum(used.values()), 1.0),
            memory_bytes=None if None in held else sum(held),
        )

    def _utilisation(self) -> dict[int, float] | None:
        """Share of the time in which kernels of each other process ran, of those that had any."""
        try:
            samples = self._gpu.nvml.nvmlDeviceGetProcessUtilization(self._gpu.handle, self._since_us)
        except Exception as error:
            return {} if getattr(error, "value", None) == _NOT_FOUND else None
        shares = defaultdict[int, list[float]](list)
        for sample in samples:
            if sample.pid not in (0, os.getpid()) and sample.timeStamp >= self._since_us:
                shares[sample.pid].append(sample.smUtil / 100)
        return {pid: fmean(seen) for pid, seen in shares.items() if any(seen)}


_NOT_FOUND = 6  # nvml.h, NVML_ERROR_NOT_FOUND: nothing ran on the GPU since


def gpu_neighbours_of(device: torch.device) -> GpuNeighbours | None:
    """Of a CUDA device; None off NVIDIA, without NVML, and under MIG."""
    gpu = gpu_of(device)
    return None if gpu is None else GpuNeighbours(gpu)

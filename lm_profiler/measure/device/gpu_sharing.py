"""Finds other processes on the run's GPU through NVML."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from statistics import fmean

from lm_profiler.measure.device.nvml import Gpu
from lm_profiler.record.run import GpuSharing

_PATIENCE_S = 5.0  # seconds to wait for NVML


_NOT_FOUND = 6  # nvml.h, NVML_ERROR_NOT_FOUND: nothing ran on the GPU since


def gpu_sharing(gpu: Gpu, since_s: float) -> GpuSharing | None:
    """Return the use of ``gpu`` by others after ``since_s`` (seconds since 1970, as NVML stamps its samples).

    None where NVML does not answer in time: it can hang on a lost GPU, hence the thread.
    """
    readings: list[GpuSharing | None] = []
    thread = threading.Thread(
        target=lambda: readings.append(_look(gpu, int(since_s * 1e6))), name="lm_profiler gpu", daemon=True
    )
    thread.start()
    thread.join(timeout=_PATIENCE_S)
    return readings[0] if readings else None


def _look(gpu: Gpu, since_us: int) -> GpuSharing | None:
    processes = gpu.ask("nvmlDeviceGetComputeRunningProcesses")
    if processes is None:
        return None
    running = {each.pid: each.usedGpuMemory for each in processes}
    if os.getpid() not in running:
        # Inside a container NVML has the host's process ids, or none. One of the processes is this one.
        return GpuSharing(processes=len(running) - 1, utilisation=None, memory_bytes=None) if running else None
    del running[os.getpid()]
    used = _utilisation(gpu, since_us)
    held = list(running.values())
    return GpuSharing(
        processes=len(running.keys() | (used or {}).keys()),
        utilisation=None if used is None else min(sum(used.values()), 1.0),
        memory_bytes=None if None in held else sum(held),
    )


def _utilisation(gpu: Gpu, since_us: int) -> dict[int, float] | None:
    """Return the share of time in which kernels of each other process ran; processes without kernels are left out."""
    try:
        samples = gpu.nvml.nvmlDeviceGetProcessUtilization(gpu.handle, since_us)
    except Exception as error:
        return {} if getattr(error, "value", None) == _NOT_FOUND else None
    shares = defaultdict[int, list[float]](list)
    for sample in samples:
        if sample.pid not in (0, os.getpid()) and sample.timeStamp >= since_us:
            shares[sample.pid].append(sample.smUtil / 100)
    return {pid: fmean(seen) for pid, seen in shares.items() if any(seen)}

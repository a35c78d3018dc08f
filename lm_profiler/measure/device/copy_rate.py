"""Measures the machine's memory bandwidth: the rate of a large copy, for devices with and without a datasheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lm_profiler.measure.device.ceiling import usable_bytes
from lm_profiler.measure.device.stopwatch import Stopwatch

# bytes of each of the two buffers: several times the cache of any GPU (an H100's L2 has 50 MB)
ON_A_GPU_BYTES = 512 << 20

# bytes of each buffer on a CPU, where they enlarge the process: both are twice the last-level cache of many CPUs
ON_A_CPU_BYTES = 32 << 20

_MEMORY_SHARE = 0.5
_PROBES, _PAUSE_S, _COPIES = 3, 0.05, 3


def copy_rate(
    device: torch.device,
    clock: Callable[[], int] = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
    buffer_bytes: int | None = None,
) -> float | None:
    """Return the bytes read and written per second by the fastest of a few large copies.

    Bytes count as in STREAM (McCalpin 1995): the cache lines that a CPU reads before it overwrites them do not count,
    so that a phase which only reads may be up to half as fast again. Where a CPU's caches hold a part of the buffers,
    the result is an upper bound of the memory's rate, and times computed from it are still lower bounds. It waits for
    the device: call it when all timing is over and the peaks are read. The CPU uses ``torch.get_num_threads()``
    threads. There are pauses between the probes, as in ``matmul_ceiling``.

    Args:
        device: timed by its own events where it has them, else by ``clock``.
        clock: nanoseconds.
        pause: waits between two probes, in seconds.
        buffer_bytes: bytes of each of the two buffers.

    Returns:
        Bytes/s; None if memory does not suffice for such buffers, or the clock is too coarse.
    """
    size = buffer_bytes or (ON_A_CPU_BYTES if device.type == "cpu" else ON_A_GPU_BYTES)
    if 2 * size > _MEMORY_SHARE * usable_bytes(device):
        return None
    seconds_of = Stopwatch(device, clock)
    try:
        # Filled first: the first write to a fresh page includes the kernel's work.
        source, target = (torch.ones(size // 4, device=device, dtype=torch.float32) for _ in range(2))
    except torch.OutOfMemoryError:  # free memory is fragmented
        return None
    best_s = float("inf")
    for probe in range(_PROBES):
        if probe:
            pause(_PAUSE_S)
        best_s = min(best_s, *(seconds_of(lambda: target.copy_(source)) for _ in range(_COPIES)))
    return 2 * source.nbytes / best_s if best_s > 0 else None

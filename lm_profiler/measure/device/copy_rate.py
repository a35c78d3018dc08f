"""The machine's own memory bandwidth: the rate of a large copy, for devices with and without a datasheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lm_profiler.measure.device.ceiling import usable_bytes
from lm_profiler.measure.device.stopwatch import Stopwatch

ON_A_GPU_BYTES = 512 << 20
"""Of each of the two buffers: several times the cache of any GPU (an H100's L2 has 50 MB)."""

ON_A_CPU_BYTES = 32 << 20
"""The same where it is the process that grows: together twice the last-level cache of many CPUs."""

_MEMORY_SHARE = 0.5
_PROBES, _PAUSE_S, _COPIES = 3, 0.05, 3


def copy_rate(
    device: torch.device,
    clock: Callable[[], int] = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
    buffer_bytes: int | None = None,
) -> float | None:
    """Bytes read and bytes written by the fastest of a few large copies, per second.

    Counted as by STREAM (McCalpin 1995): what a CPU reads to write whole cache lines anew is not counted, so that a
    phase which only reads may be up to half as fast again there. Where a CPU's caches hold a part of the buffers, it is
    an upper bound of the memory's rate, and what is held against it still the least time. It waits for the device: call
    it when all timing is over and the peaks are read. The CPU uses ``torch.get_num_threads()`` threads. Pauses lie
    between the probes, as in ``matmul_ceiling``.

    Args:
        device: timed by its own events where it has them, else by ``clock``.
        clock: nanoseconds.
        pause: waits between two probes, in seconds.
        buffer_bytes: of each of the two buffers.

    Returns:
        Bytes/s; None if memory does not suffice for such buffers, or the clock is too coarse.
    """
    size = buffer_bytes or (ON_A_CPU_BYTES if device.type == "cpu" else ON_A_GPU_BYTES)
    if 2 * size > _MEMORY_SHARE * usable_bytes(device):
        return None
    seconds_of = Stopwatch(device, clock)
    try:
        # Written before, because the first write of a fresh page is the kernel's work.
        source, target = (torch.ones(size // 4, device=device, dtype=torch.float32) for _ in range(2))
    except torch.OutOfMemoryError:  # what is free lies in pieces
        return None
    best_s = float("inf")
    for probe in range(_PROBES):
        if probe:
            pause(_PAUSE_S)
        best_s = min(best_s, *(seconds_of(lambda: target.copy_(source)) for _ in range(_COPIES)))
    return 2 * source.nbytes / best_s if best_s > 0 else None

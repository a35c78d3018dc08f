"""The machine's own ceiling: the rate of a large matrix product, for devices with and without a datasheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lm_profiler.measure.device.stopwatch import Stopwatch
from lm_profiler.measure.memory.peaks import available_bytes

SMALLEST, LARGEST = 128, 16384
"""Sides of the square matrices. The smallest takes milliseconds even where a dtype is emulated."""

LONG_ENOUGH_S = 0.01
"""A product of this length hides what launching and timing it cost (microseconds)."""

SETTLED = 1.1
"""Doubling the size no longer pays once it raised the rate by less than this factor."""

BELIEVABLE_S = 0.001
"""A product that lack of memory keeps shorter than this, and whose rate had not ``SETTLED``, is no ceiling."""

_PROBES, _PAUSE_S = 3, 0.05
_TILE = 256
_MEMORY_SHARE = 0.5

_ON_A_CPU_BYTES = 256 << 20
"""Of which it takes a quarter: 2048 rows. There the process grows that trains, and a product of this size is long."""


def matmul_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float = 0.25,
    clock: Callable[[], int] = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
) -> float | None:
    """The best rate of square products [N, N] · [N, N], 2·N³ FLOPs each, found within ``budget_s`` seconds.

    Several short probes share the budget, with pauses between them: what else uses the machine comes and goes, and can
    only slow a product, so that the best is nearest to the truth.

    It waits for the device and takes up to half of its free memory: call it when all timing is over and the peaks are
    read. float32 follows torch's switch of its precision as it is now, and the CPU uses
    ``torch.get_num_threads()`` threads. Short products may run at a clock rate that a long run does not hold.

    Args:
        device: Timed by its own events where it has them, else by ``clock`` around a synchronized product.
        dtype: Of the factors and of the product.
        budget_s: Wall time, in seconds; the last product may end a little after it.
        clock: Nanoseconds.
        pause: Waits between two probes, in seconds.

    Returns:
        FLOP/s; None if the device has no product in this dtype, or no memory for one that is long enough.
    """
    try:
        products = Products(device, dtype, clock)
        products(1)
    except (RuntimeError, TypeError):  # RuntimeError with NotImplementedError; MPS raises TypeError for float64
        return None
    best: tuple[int, float] | None = None
    for probe in range(_PROBES):
        end_ns = clock() + round(budget_s / _PROBES * 1e9)

        def left_s(end_ns: int = end_ns) -> float:
            return (end_ns - clock()) * 1e-9

        if probe == 0:
            free = usable_bytes(device)
            free = min(free, _ON_A_CPU_BYTES) if device.type == "cpu" else free
            best = fastest(products, largest_size(free, dtype), left_s)
        elif best is not None:
            pause(_PAUSE_S)
            best = _repeat(products, dict([best]), left_s)
    if best is None:
        return None
    size, seconds = best
    return 2 * size**3 / seconds


def usable_bytes(device: torch.device) -> int:
    """What is free, and what torch's allocator keeps for reuse: on a full device that is most of it."""
    free = available_bytes(device)
    if free is None:  # the device shares the machine's memory
        return available_bytes(torch.device("cpu")) or 0
    if device.type == "cpu":
        return free
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def fastest(
    time_product: Callable[[int], float], largest: int, left_s: Callable[[], float]
) -> tuple[int, float] | None:
    """Which size gives the highest rate, and the seconds of its best product.

    Sizes double from ``SMALLEST`` until a product takes ``LONG_ENOUGH_S`` and the rate has ``SETTLED`` (both, because a
    busy CPU may stall any product for that long), or memory or time would not do for the next, which takes eight times
    as long at worst. Then the two best sizes repeat until time is up.

    Args:
        time_product: Does one product of the given size, and says how many seconds it took.
        largest: No size above this is tried, but for the smallest.
        left_s: Seconds of the budget that are left; negative once it is spent.

    Returns:
        None if there is no memory for the smallest product or for one that is ``BELIEVABLE_S`` long, or the clock is
        too coarse for all of them.
    """
    seconds, ended_by_memory = _grow(time_product, largest, left_s)
    best = _repeat(time_product, seconds, left_s)
    if best is not None and ended_by_memory and best[1] < BELIEVABLE_S and not _settled(seconds):
        return None
    return best


def _grow(
    time_product: Callable[[int], float], largest: int, left_s: Callable[[], float]
) -> tuple[dict[int, float], bool]:
    """The seconds of each size that was tried, and whether lack of memory ended the growth."""
    seconds: dict[int, float] = {}
    size, previous = SMALLEST, float("inf")
    while not seconds or 8 * previous < left_s():
        if seconds and size > largest:
            return seconds, largest < LARGEST
        try:
            seconds[size] = time_product(size)  # pays for fresh pages and for choosing a kernel
            if seconds[size] < left_s():
                seconds[size] = min(seconds[size], time_product(size))
        except torch.OutOfMemoryError:  # what is free lies in pieces
            return seconds, True
        if seconds[size] >= LONG_ENOUGH_S and 8 * previous < SETTLED * seconds[size]:
            break
        size, previous = 2 * size, seconds[size]
    return seconds, False


def _settled(seconds: dict[int, float]) -> bool:
    """Whether the last doubling no longer paid."""
    *_, before, last = (float("inf"), *(seconds[size] for size in sorted(seconds)))
    return 8 * before < SETTLED * last


def _repeat(
    time_product: Callable[[int], float], seconds: dict[int, float], left_s: Callable[[], float]
) -> tuple[int, float] | None:
    def seconds_per_flop(size: int) -> float:
        # A clock too coarse for the product has told nothing.
        return seconds[size] / size**3 if seconds[size] > 0 else float("inf")

    while True:
        best = sorted(seconds, key=seconds_per_flop)[:2]
        fitting = [size for size in best if seconds[size] < left_s()]
        if not fitting:
            return (best[0], seconds[best[0]]) if best and seconds[best[0]] > 0 else None
        for size in fitting:
            seconds[size] = min(seconds[size], time_product(size))


def largest_size(available_bytes: int, dtype: torch.dtype) -> int:
    """The largest side up to ``LARGEST`` whose matrices fit into half of ``available_bytes``."""
    # Three of this size, and a third as much again for all the halved sizes before it: 1/4 + 1/16 + ... = 1/3.
    elements = _MEMORY_SHARE * available_bytes / dtype.itemsize / 4
    return min(LARGEST, int(elements**0.5))


class Products:
    """Does and times one product at a time; keeps the matrices of every size, since sizes take turns."""

    def __init__(self, device: torch.device, dtype: torch.dtype, clock: Callable[[], int]) -> None:
        self._device = device
        self._seconds = Stopwatch(device, clock)
        # Random values, since zeros draw less power and so run faster. From a generator of our own: the run's stays.
        generator = torch.Generator(device).manual_seed(0)
        tile = torch.empty(_TILE, _TILE, device=device, dtype=torch.float32).uniform_(-1, 1, generator=generator)
        self._tile = tile.to(dtype)
        self._matrices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, size: int) -> float:
        """Seconds of one product of [size, size] matrices."""
        if size not in self._matrices:
            self._matrices[size] = self._make(size), self._make(size), self._make(size)
        left, right, out = self._matrices[size]
        # autocast leaves calls with `out` alone
        return self._seconds(lambda: torch.mm(left, right, out=out))

    def _make(self, size: int) -> Tensor:
        # Repeated, because filling a large matrix with random numbers takes longer than multiplying it.
        times = -(-size // _TILE)
        return self._tile.repeat(times, times)[:size, :size].contiguous()

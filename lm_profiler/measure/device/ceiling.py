"""Measures the machine's matmul ceiling: the rate of a large matmul, for devices with and without a datasheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lm_profiler.measure.device.stopwatch import Stopwatch
from lm_profiler.measure.memory.peaks import available_bytes

# Sides of the square matrices. The smallest matmul takes milliseconds even where a dtype is emulated.
SMALLEST, LARGEST = 128, 16384

# seconds: a matmul of this length hides the cost of launching and timing it, which is microseconds
LONG_ENOUGH_S = 0.01

SETTLED = 1.1  # sizes grow until doubling the side raises the rate by less than this factor

# seconds: a shorter matmul whose size memory limits, and whose rate has not ``SETTLED``, is no ceiling
BELIEVABLE_S = 0.001

_PROBES, _PAUSE_S = 3, 0.05
_TILE = 256
_MEMORY_SHARE = 0.5  # the share of free memory that the matrices may take

# Memory that counts as free on a CPU at most, so that 2048 is the largest side in float32. There the matrices enlarge
# the training process itself, and matmuls of this size are long enough.
_ON_A_CPU_BYTES = 256 << 20


def matmul_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float = 0.25,
    clock: Callable[[], int] = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
) -> float | None:
    """Measure the best rate of square matmuls [N, N] · [N, N], 2·N³ FLOPs each, within ``budget_s`` seconds.

    Several short probes share the budget, with pauses between them: other users of the machine come and go, and can
    only slow a matmul, so that the best rate is nearest to the truth.

    It waits for the device and takes up to half of its free memory: call it when all timing is over and the peaks are
    read. float32 follows torch's current precision setting, and the CPU uses
    ``torch.get_num_threads()`` threads. Short products may run at a clock rate that a long run does not hold.

    Args:
        device: Timed by its own events where it has them, else by ``clock`` around a synchronized matmul.
        dtype: The dtype of the factors and of the result.
        budget_s: Wall time, in seconds; the last matmul may end a little after it.
        clock: Nanoseconds.
        pause: Waits between two probes, in seconds.

    Returns:
        FLOP/s; None if the device has no matmul in this dtype, or too little memory for one that is long enough.
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
    """Return the free bytes of ``device``, including what torch's allocator caches: on a full device that is most."""
    free = available_bytes(device)
    if free is None:  # the device shares the machine's memory
        return available_bytes(torch.device("cpu")) or 0
    if device.type == "cpu":
        return free
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def fastest(
    time_product: Callable[[int], float], largest: int, left_s: Callable[[], float]
) -> tuple[int, float] | None:
    """Return the size with the highest rate, and the seconds of its best matmul.

    Sizes double from ``SMALLEST`` until a matmul takes ``LONG_ENOUGH_S`` and the rate has ``SETTLED`` (both, because a
    busy CPU may stall any matmul for that long), or until memory or time is too short for the next size, which takes up
    to eight times as long. Then the two best sizes repeat until time is up.

    Args:
        time_product: Runs one matmul of the given size, and returns its seconds.
        largest: The largest size to try; the smallest is always tried.
        left_s: Returns the seconds that are left of the budget; negative once it is spent.

    Returns:
        None if there is too little memory for the smallest matmul or for one of ``BELIEVABLE_S``, or the clock is too
        coarse for all of them.
    """
    seconds, ended_by_memory = _grow(time_product, largest, left_s)
    best = _repeat(time_product, seconds, left_s)
    if best is not None and ended_by_memory and best[1] < BELIEVABLE_S and not _settled(seconds):
        return None
    return best


def _grow(
    time_product: Callable[[int], float], largest: int, left_s: Callable[[], float]
) -> tuple[dict[int, float], bool]:
    """Return the seconds of each size that was tried, and whether lack of memory ended the growth."""
    seconds: dict[int, float] = {}
    size, previous = SMALLEST, float("inf")
    while not seconds or 8 * previous < left_s():
        if seconds and size > largest:
            return seconds, largest < LARGEST
        try:
            seconds[size] = time_product(size)  # includes fresh pages and the choice of a kernel, so it runs twice
            if seconds[size] < left_s():
                seconds[size] = min(seconds[size], time_product(size))
        except torch.OutOfMemoryError:  # free memory is fragmented
            return seconds, True
        if seconds[size] >= LONG_ENOUGH_S and 8 * previous < SETTLED * seconds[size]:
            break
        size, previous = 2 * size, seconds[size]
    return seconds, False


def _settled(seconds: dict[int, float]) -> bool:
    """Return whether the last doubling raised the rate by less than ``SETTLED``."""
    *_, before, last = (float("inf"), *(seconds[size] for size in sorted(seconds)))
    return 8 * before < SETTLED * last


def _repeat(
    time_product: Callable[[int], float], seconds: dict[int, float], left_s: Callable[[], float]
) -> tuple[int, float] | None:
    """Repeat the two best sizes until time is up; return the best size and its seconds, None without a time."""

    def seconds_per_flop(size: int) -> float:
        # Zero seconds: the clock is too coarse for this size.
        return seconds[size] / size**3 if seconds[size] > 0 else float("inf")

    while True:
        best = sorted(seconds, key=seconds_per_flop)[:2]
        fitting = [size for size in best if seconds[size] < left_s()]
        if not fitting:
            return (best[0], seconds[best[0]]) if best and seconds[best[0]] > 0 else None
        for size in fitting:
            seconds[size] = min(seconds[size], time_product(size))


def largest_size(available_bytes: int, dtype: torch.dtype) -> int:
    """Return the largest side up to ``LARGEST`` whose matrices fit into half of ``available_bytes``."""
    # Three matrices of this size, and a third as much for all smaller sizes: 3 · (1 + 1/4 + 1/16 + ...) = 4.
    elements = _MEMORY_SHARE * available_bytes / dtype.itemsize / 4
    return min(LARGEST, int(elements**0.5))


class Products:
    """Runs and times one matmul at a time; keeps the matrices of every size, since sizes take turns."""

    def __init__(self, device: torch.device, dtype: torch.dtype, clock: Callable[[], int]) -> None:
        self._device = device
        self._seconds = Stopwatch(device, clock)
        # Random values: zeros draw less power and so run faster. An own generator leaves the run's unchanged.
        generator = torch.Generator(device).manual_seed(0)
        tile = torch.empty(_TILE, _TILE, device=device, dtype=torch.float32).uniform_(-1, 1, generator=generator)
        self._tile = tile.to(dtype)
        self._matrices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, size: int) -> float:
        """Return the seconds of one matmul of [size, size] matrices."""
        if size not in self._matrices:
            self._matrices[size] = self._make(size), self._make(size), self._make(size)
        left, right, out = self._matrices[size]
        # With `out`, autocast does not change the dtype.
        return self._seconds(lambda: torch.mm(left, right, out=out))

    def _make(self, size: int) -> Tensor:
        # A tile is repeated: filling a large matrix with random numbers takes longer than multiplying it.
        times = -(-size // _TILE)
        return self._tile.repeat(times, times)[:size, :size].contiguous()

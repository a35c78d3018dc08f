"""Measures the machine's ceilings: the rate of a large matmul, and of a large copy.

Other users of the machine come and go, and can only slow it down. So the best of several short probes is nearest to
the truth, and the best readings are kept across runs. The probes wait for the device and take a part of its free
memory: call them after all timing, when the peaks are read. On the CPU they use ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lm_profiler.measure.clocks.stream import Stopwatch
from lm_profiler.measure.device.environment import (
    cpu_name,
    device_name,
    float32_matmul_precision,
)
from lm_profiler.measure.memory.peaks import available_bytes
from lm_profiler.record.process_spread import FigureCache

AGREE = 0.8  # two readings agree if the smaller is at least this share of the larger

# how long there is no new reading after two readings have agreed, because a reading costs each run CPU time
FRESH_S = 86_400.0

_PROBES = 3  # the probes of a reading, of which the fastest counts
_PAUSE_S = 0.05  # the pause between two probes
_MEMORY_SHARE = 0.5  # the share of free memory that a reading may take

# Sides of the square matrices. The smallest matmul takes milliseconds even if the dtype is emulated.
SMALLEST = 128
LARGEST = 16384

LONG_ENOUGH_S = 0.01  # next to this, the microseconds of launching and timing a matmul are negligible
# sizes grow until doubling the side raises the rate by less than this factor
SETTLED = 1.1
# If all matmuls are shorter, because memory is too small for larger ones, the ceiling is unknown.
BELIEVABLE_S = 0.001

_TILE = 256  # side of the tile of random values that a matrix repeats

# The most memory that is used on a CPU, so that 2048 is the largest side in float32. There the matrices enlarge the
# training process itself, and matmuls of this size take long enough.
_ON_A_CPU_BYTES = 256 << 20


def matmul_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float = 0.25,
    clock: Callable[[], int] = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
) -> float | None:
    """Return the best FLOP/s of square matmuls [N, N] · [N, N], 2·N³ FLOPs each, within ``budget_s`` seconds.

    None if the device has no matmul in this dtype, or too little memory for one that takes long enough. float32 uses
    torch's current precision setting. Short products may run at a higher clock rate than a long run can sustain.
    """
    try:
        products = Products(device, dtype, clock)
        products(1)
    except (RuntimeError, TypeError):
        # RuntimeError includes NotImplementedError. MPS raises TypeError for float64.
        return None
    # the best size, and the seconds of its fastest matmul
    best: tuple[int, float] | None = None
    for probe in range(_PROBES):
        end_ns = clock() + round(budget_s / _PROBES * 1e9)

        def left_s(end_ns: int = end_ns) -> float:
            """Return the seconds that are left of this probe's share of the budget."""
            return (end_ns - clock()) * 1e-9

        # The first probe searches for the best size, which the others repeat.
        if probe == 0:
            free_bytes = usable_bytes(device)
            if device.type == "cpu":
                free_bytes = min(free_bytes, _ON_A_CPU_BYTES)
            best = fastest(products, largest_size(free_bytes, dtype), left_s)
        elif best is not None:
            pause(_PAUSE_S)
            size, seconds = best
            best = _repeat_best_sizes(products, {size: seconds}, left_s)
    if best is None:
        return None
    size, seconds = best
    return 2 * size**3 / seconds


def usable_bytes(device: torch.device) -> int:
    """Return the free bytes of ``device``, including those in the cache of torch's allocator."""
    free = available_bytes(device)
    if free is None:  # the device shares the machine's memory
        return available_bytes(torch.device("cpu")) or 0
    if device.type == "cpu":
        return free
    reserved = torch.accelerator.memory_reserved(device)
    cached = reserved - torch.accelerator.memory_allocated(device)
    return free + cached


def fastest(
    time_product: Callable[[int], float], largest: int, left_s: Callable[[], float]
) -> tuple[int, float] | None:
    """Return the size with the highest rate, and the seconds of its fastest matmul; None if all are too short.

    Sizes double from ``SMALLEST`` until a matmul takes ``LONG_ENOUGH_S`` and the rate has ``SETTLED``; both are
    required, because a busy CPU may stall any matmul for that long. Growing also ends if memory or time is too short
    for the next size, which takes up to eight times as long. Then the two best sizes are repeated until ``left_s`` is
    negative.
    """
    # the size of a matmul to its least seconds
    seconds: dict[int, float] = {}
    size = SMALLEST
    # the seconds of the previous size, which had an eighth of the FLOPs
    previous_s = inf
    while not seconds or (size <= largest and 8 * previous_s < left_s()):
        try:
            # Twice, because the first time includes fresh pages and the choice of a kernel.
            seconds[size] = time_product(size)
            if seconds[size] < left_s():
                seconds[size] = min(seconds[size], time_product(size))
        except torch.OutOfMemoryError:  # free memory is fragmented
            break
        is_long_enough = seconds[size] >= LONG_ENOUGH_S
        at_previous_rate_s = 8 * previous_s
        has_settled = at_previous_rate_s < SETTLED * seconds[size]
        if is_long_enough and has_settled:
            break
        previous_s = seconds[size]
        size = 2 * size
    longest_s = max(seconds.values(), default=0.0)
    if longest_s < BELIEVABLE_S:
        return None
    return _repeat_best_sizes(time_product, seconds, left_s)


def _repeat_best_sizes(
    time_product: Callable[[int], float],
    seconds: dict[int, float],
    left_s: Callable[[], float],
) -> tuple[int, float] | None:
    """Repeat the two best sizes until time is up; return the best size and its seconds, None if they are unknown.

    ``seconds`` has the least seconds of a matmul by its size, and is updated.
    """

    def seconds_per_flop(size: int) -> float:
        """Return a number proportional to the seconds per FLOP; a matmul has 2·size³ FLOPs."""
        if seconds[size] <= 0:  # the clock is too coarse for this size
            return inf
        return seconds[size] / size**3

    while True:
        two_best = sorted(seconds, key=seconds_per_flop)[:2]
        fitting = [size for size in two_best if seconds[size] < left_s()]
        if not fitting:
            break
        for size in fitting:
            seconds[size] = min(seconds[size], time_product(size))
    if not two_best:
        return None
    best_size = two_best[0]
    if seconds[best_size] <= 0:
        return None
    return best_size, seconds[best_size]


def largest_size(available_bytes: int, dtype: torch.dtype) -> int:
    """Return the largest side up to ``LARGEST`` whose matrices fit into half of ``available_bytes``."""
    # There are three matrices of this size, and for all smaller sizes a third as much: 3 · (1 + 1/4 + 1/16 + ...) = 4.
    elements = _MEMORY_SHARE * available_bytes / dtype.itemsize / 4
    return min(LARGEST, int(elements**0.5))


class Products:
    """Runs and times one matmul at a time; keeps the matrices of every size, because sizes alternate."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, clock: Callable[[], int]
    ) -> None:
        self._stopwatch = Stopwatch(device, clock)
        # Random values, because zeros draw less power and so run faster. From a separate generator, so that the state
        # of the run's generator does not change.
        generator = torch.Generator(device).manual_seed(0)
        tile = torch.empty(_TILE, _TILE, device=device, dtype=torch.float32).uniform_(
            -1, 1, generator=generator
        )
        self._tile = tile.to(dtype)
        self._matrices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, size: int) -> float:
        """Return the seconds of one matmul of two matrices of this ``size``."""
        if size not in self._matrices:
            self._matrices[size] = (
                self._matrix(size),
                self._matrix(size),
                self._matrix(size),
            )
        factor, other_factor, product = self._matrices[size]
        # into ``out``, because then autocast does not change the dtype
        return self._stopwatch(lambda: torch.mm(factor, other_factor, out=product))

    def _matrix(self, size: int) -> Tensor:
        """Return a square matrix of random values."""
        # Repeated tiles, because filling a large matrix with random numbers takes longer than multiplying it.
        tiles = -(-size // _TILE)  # rounded up
        return self._tile.repeat(tiles, tiles)[:size, :size].contiguous()


# Bytes of each of the two buffers: on a GPU several times its cache (the L2 of an H100 has 50 MB). On a CPU, where they
# enlarge the process, both together are twice the last-level cache of many CPUs.
ON_A_GPU_BYTES = 512 << 20
ON_A_CPU_BYTES = 32 << 20
_COPIES = 3  # the copies of a probe; the fastest of all probes counts


def copy_rate(
    device: torch.device,
    clock: Callable[[], int] = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
    buffer_bytes: int | None = None,
) -> float | None:
    """Return the bytes read and written per second by the fastest of a few large copies; None without memory for them.

    Bytes count as in STREAM (McCalpin 1995), without the cache lines that a CPU reads before it overwrites them. So a
    phase that only reads may be up to 1.5 times as fast. If a CPU's caches hold a part of the buffers, the result is an
    upper bound of the memory's rate, and times computed from it are still lower bounds.
    """
    size_bytes = buffer_bytes
    if not size_bytes:
        size_bytes = ON_A_CPU_BYTES if device.type == "cpu" else ON_A_GPU_BYTES
    if 2 * size_bytes > _MEMORY_SHARE * usable_bytes(device):
        return None
    stopwatch = Stopwatch(device, clock)
    elements = size_bytes // 4
    try:
        # Filled, because the first write to a fresh page includes the kernel's work.
        source = torch.ones(elements, device=device, dtype=torch.float32)
        target = torch.ones(elements, device=device, dtype=torch.float32)
    except torch.OutOfMemoryError:  # free memory is fragmented
        return None
    best_s = inf
    for probe in range(_PROBES):
        if probe > 0:
            pause(_PAUSE_S)
        for _ in range(_COPIES):
            copy_s = stopwatch(lambda: target.copy_(source))
            best_s = min(best_s, copy_s)
    if best_s <= 0:
        return None
    return 2 * source.nbytes / best_s


_AGREED = "agreed_at"  # the key of the time at which two readings agreed, in seconds since 1970


class _RateReadings(NamedTuple):
    """The rate measured now, and the best rate of earlier runs; None means unknown."""

    current: float | None
    stored: float | None


def known_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[str], None],
    folder: Path | None = None,
    probe: Callable[[torch.device, torch.dtype], float | None] = matmul_ceiling,
    clock: Callable[[], float] = time.time,
) -> float | None:
    """Return the matmul ceiling in FLOP/s: the better of the current and the stored reading, if the two agree.

    ``report`` receives the reason if they do not. The best reading is kept in a file of ``folder`` for each device,
    CPU, number of threads, dtype, precision and version of torch. After two readings have agreed, it is used without a
    new reading for ``FRESH_S``. A file that cannot be read or written counts as absent.
    """
    dtype_facts = {
        "dtype": str(dtype).removeprefix("torch."),
        "precision": float32_matmul_precision(device.type),
    }
    file = _rate_file("ceiling", device, dtype_facts, folder)
    rates = _read_rates(file, "flops_per_s", lambda: probe(device, dtype), clock())
    if rates.current is None or rates.stored is None:
        return rates.current
    if not _agree(rates.current, rates.stored):
        report(
            f"ceiling unknown: the matmul rate of this device is {rates.current / 1e9:.3g} GFLOP/s now, and was "
            f"{rates.stored / 1e9:.3g} GFLOP/s before: another program uses the device, or used it before; if the "
            f"device was replaced, remove {file.path}"
        )
        return None
    return max(rates.current, rates.stored)


def known_copy_rate(
    device: torch.device,
    folder: Path | None = None,
    probe: Callable[[torch.device], float | None] = copy_rate,
    clock: Callable[[], float] = time.time,
) -> float | None:
    """Return the memory bandwidth in bytes/s: the better of the current and the stored reading.

    They need not agree: bandwidth gives a lower bound of a phase's time, and other users of the machine slow a copy.
    """
    file = _rate_file("bandwidth", device, {}, folder)
    rates = _read_rates(file, "bytes_per_s", lambda: probe(device), clock())
    if rates.current is None:
        return None
    return max(rates.current, rates.stored or 0.0)


def _rate_file(
    kind: str, device: torch.device, facts: Mapping[str, str], folder: Path | None
) -> FigureCache:
    """Return the file of a rate, named after the machine and further ``facts`` on which it depends."""
    dependencies: dict[str, object] = {
        "device": device_name(device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    dependencies.update(facts)
    return FigureCache(kind, dependencies, folder)


def _read_rates(
    file: FigureCache, key: str, probe: Callable[[], float | None], now_s: float
) -> _RateReadings:
    """Return the current and the stored rate; store the better of them, and the time if they agree."""
    figures = file.read()
    stored = figures.get(key) or None
    agreed_s = figures.get(_AGREED)
    if stored is not None and agreed_s is not None:
        # A time in the future means that the clock was set back; then measure again.
        is_fresh = 0.0 <= now_s - agreed_s < FRESH_S
        if is_fresh:
            return _RateReadings(current=stored, stored=stored)

    current = probe()
    if current is None:
        return _RateReadings(current=None, stored=stored)
    if stored is None:
        file.write({key: current})
    elif _agree(current, stored):
        file.write({key: max(current, stored), _AGREED: now_s})
    elif current > stored:
        file.write({key: current})
    return _RateReadings(current, stored)


def _agree(rate: float, other_rate: float) -> bool:
    return min(rate, other_rate) >= AGREE * max(rate, other_rate)

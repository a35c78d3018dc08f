"""The search for the ceiling against machines of known speed; on the real one only loosely, for it is shared."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from faults import fault_in

from lm_profiler.measure.clocks.stream import Stopwatch
from lm_profiler.measure.device import ceilings as module
from lm_profiler.measure.device.ceilings import (
    LARGEST,
    SMALLEST,
    copy_rate,
    fastest,
    largest_size,
    matmul_ceiling,
    usable_bytes,
)

CPU = torch.device("cpu")
AROUND_S = 1e-4
"""What Python takes around a product, outside its time."""


class Machine:
    """Takes ``seconds(size)`` of its own clock for a product."""

    def __init__(self, seconds: Callable[[int], float], budget_s: float = 0.5) -> None:
        self.seconds = seconds
        self.budget_s = budget_s
        self.now_s = 0.0
        self.sizes: Counter[int] = Counter()

    def product(self, size: int) -> float:
        self.sizes[size] += 1
        seconds = self.seconds(size)
        self.now_s += seconds + AROUND_S
        return seconds

    def left_s(self) -> float:
        return self.budget_s - self.now_s

    def best(self, largest: int = LARGEST) -> tuple[int, float] | None:
        return fastest(self.product, largest, self.left_s)


def at_rate(flops_per_s: float, overhead_s: float = 0.0) -> Callable[[int], float]:
    return lambda size: overhead_s + 2 * size**3 / flops_per_s


@pytest.mark.parametrize("flops_per_s", [1e9, 1e11, 1e13, 1e15])
def test_known_rate_is_found_within_the_budget(flops_per_s: float) -> None:
    machine = Machine(at_rate(flops_per_s, overhead_s=1e-5))
    size, seconds = machine.best() or pytest.fail("nothing found")
    assert 2 * size**3 / seconds == pytest.approx(flops_per_s, rel=0.01)
    assert machine.now_s <= 0.6


def test_products_grow_until_launching_is_hidden() -> None:
    machine = Machine(at_rate(1e12, overhead_s=1e-4))
    machine.best()
    # 2048 takes 17 ms, of which 0.6 % are overhead, but raised the rate by 4 %: settled.
    assert max(machine.sizes) == 2048


def test_stalls_of_a_busy_cpu_do_not_end_the_search() -> None:
    size, _ = Machine(at_rate(1e11, overhead_s=0.016)).best() or pytest.fail("nothing found")
    assert size >= 1024  # though a product of the smallest size already takes longer than LONG_ENOUGH_S


def test_the_budget_ends_the_search() -> None:
    machine = Machine(at_rate(2 * SMALLEST**3 / 0.7))
    assert machine.best() == (SMALLEST, pytest.approx(0.7))
    assert machine.sizes == {SMALLEST: 1}


def test_a_size_beyond_a_cliff_is_not_chosen() -> None:
    machine = Machine(lambda size: at_rate(1e11 if size < 1024 else 3e10)(size))
    size, seconds = machine.best() or pytest.fail("nothing found")
    assert (size, seconds) == (512, at_rate(1e11)(512)) or size < 512
    assert machine.now_s <= 0.6


def test_the_best_of_repeated_products_counts() -> None:
    machine = Machine(lambda size: 0.0)

    def seconds(size: int) -> float:
        times = machine.sizes[size]
        return at_rate(1e13)(size) * (5 if times == 1 else 1.0 if times == 4 else 1.2)

    machine.seconds = seconds
    size, best = machine.best() or pytest.fail("nothing found")
    assert best == at_rate(1e13)(size)


def test_a_coarse_clock_gives_no_ceiling() -> None:
    machine = Machine(at_rate(1e15))

    def product(size: int) -> float:
        machine.product(size)
        machine.now_s += 0.01
        return 0.0

    assert fastest(product, LARGEST, machine.left_s) is None
    assert matmul_ceiling(CPU, torch.bool, budget_s=0.05) is None


def test_the_largest_size_is_not_exceeded() -> None:
    machine = Machine(at_rate(1e15))
    machine.best(largest=1000)
    assert max(machine.sizes) == 512


def test_memory_limits_the_size() -> None:
    """All matrices of all sizes up to the largest are in half of it."""
    assert largest_size(2 * 4 * 4096**2 * 2, torch.bfloat16) == 4096
    assert largest_size(2**50, torch.float32) == LARGEST
    size = largest_size(10**8, torch.float64)
    sizes = [size >> halvings for halvings in range(20)]
    assert sum(3 * 8 * side**2 for side in sizes) <= 10**8 / 2


def test_a_ceiling_is_measured_within_the_free_memory(set_free_memory: Callable[[int], None]) -> None:
    """Three matrices of float32."""
    set_free_memory(2**20)
    ticks = iter(range(0, 10**12, 1_000_000))
    result = matmul_ceiling(CPU, torch.float32, budget_s=0.03, clock=lambda: next(ticks))
    assert 3 * 4 * _size(result) ** 2 <= 2**20 / 2


@pytest.mark.parametrize("fitting, expected", [(512, {SMALLEST, 256, 512}), (0, {None})])
def test_running_out_of_memory_ends_the_growth(fitting: int, expected: set[int | None]) -> None:
    machine = Machine(at_rate(1e11))

    def product(size: int) -> float:
        if size > fitting:
            raise torch.OutOfMemoryError
        return machine.product(size)

    best = fastest(product, LARGEST, machine.left_s)
    assert (best[0] if best else None) in expected


def fast_gpu(size: int) -> float:
    """A fast card: 30 us are mostly launching."""
    return 25e-6 + 2 * size**3 / 8e14


def test_a_product_that_memory_keeps_short_is_no_ceiling() -> None:
    assert Machine(fast_gpu).best(largest=1500) is None
    size, _ = Machine(fast_gpu).best() or pytest.fail("nothing found")
    assert size == LARGEST

    machine = Machine(fast_gpu)

    def full(size: int) -> float:
        if size > 1024:
            raise torch.OutOfMemoryError
        return machine.product(size)

    assert fastest(full, LARGEST, machine.left_s) is None


def test_memory_that_torch_keeps_for_reuse_is_free(
    set_free_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    """A device whose driver has 1 GiB left, of which the allocator holds 70 and uses 20."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib, 80 * gib))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 70 * gib)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 20 * gib)
    assert usable_bytes(torch.device("cuda", 0)) == 51 * gib
    set_free_memory(2**20)
    assert usable_bytes(CPU) == 2**20


def test_the_best_of_several_probes_counts() -> None:
    """Something else takes nine tenths of the machine until the second pause: each product 10 ms, and 1 ms alone."""
    now_ns, pauses = [0], list[float]()

    def clock() -> int:
        now_ns[0] += 1_000_000 if len(pauses) == 2 else 10_000_000
        return now_ns[0]

    result = matmul_ceiling(CPU, torch.float32, 0.6, clock, pauses.append)
    assert _size(result) == pytest.approx(256)  # after 128; 512 might take longer than is left
    assert len(pauses) == 2
    assert now_ns[0] < 1e9


def _size(rate: float) -> float:
    """The side of the matrices whose product takes a millisecond."""
    return (rate * 1e-3 / 2) ** (1 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_product_on_the_cpu(dtype: torch.dtype) -> None:
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = matmul_ceiling(CPU, dtype, budget_s=0.2)
    assert 1e7 < result < 1e14
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_is_timed_by_its_events(dtype: torch.dtype) -> None:
    with fault_in(Stopwatch._synchronize) as timed_by_host:
        result = matmul_ceiling(torch.device("cuda", 0), dtype)
    assert timed_by_host == []
    assert 1e11 < result < 1e16


MIB = 1 << 20


def test_bytes_count_over_the_best_copy() -> None:
    """Copies take 1 ms by this clock but for the fourth, which takes half of it."""
    pauses: list[float] = []
    seconds = iter([1e-3, 1e-3, 1e-3, 0.5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    now, starts = [0.0], iter([True, False] * 9)

    def clock() -> int:
        if not next(starts):
            now[0] += next(seconds)
        return round(now[0] * 1e9)

    rate = copy_rate(CPU, clock, pauses.append, buffer_bytes=MIB)
    assert rate == pytest.approx(2 * MIB / 0.5e-3)
    assert len(pauses) == 2
    # A real copy on the cpu.
    state = torch.get_rng_state()
    rate = copy_rate(CPU, buffer_bytes=16 * MIB)
    assert 1e8 < rate < 1e13
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_fine_clock_or_memory_the_rate_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_rate(CPU, lambda: 0, lambda _: None, buffer_bytes=MIB) is None
    made: list[int] = []
    monkeypatch.setattr(torch, "ones", lambda *size, **_: made.append(1))
    assert copy_rate(CPU, buffer_bytes=module.usable_bytes(CPU) // 2) is None
    assert not made


@pytest.mark.gpu
def test_a_real_copy_on_a_gpu_stays_below_its_datasheet() -> None:
    from lm_profiler.analysis.hardware.roofline import bandwidth

    device = torch.device("cuda", 0)
    rate, sheet = copy_rate(device), bandwidth(torch.cuda.get_device_name(device))
    assert rate > 1e10
    assert sheet is None or 0.5 * sheet.per_s < rate < 1.05 * sheet.per_s

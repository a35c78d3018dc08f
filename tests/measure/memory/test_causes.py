"""Memory by cause."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lm_profiler.measure.clocks.tape import BACKWARD, FORWARD, OPTIMIZER, OTHER, OUTSIDE, ZERO_GRAD
from lm_profiler.measure.memory.causes import Holdings, HoldingsReader, holdings, plain_tensors_of, split_by_cause

CPU = torch.device("cpu")
FLOAT = 4
NONE = Holdings(0, 0, 0, 0)


def _linear(n: int = 10) -> nn.Linear:
    return nn.Linear(n, n, bias=False)


def test_each_cause_is_counted_as_it_comes_to_be() -> None:
    module = nn.Sequential(_linear(), nn.BatchNorm1d(10, affine=False))
    optimizer = torch.optim.AdamW(module.parameters())
    size = 100 * FLOAT
    buffers = 2 * 10 * FLOAT + 8  # running mean and variance; the count of batches is an int64
    assert holdings(module, [optimizer], CPU) == Holdings(size, 0, 0, buffers)
    module(torch.ones(2, 10)).sum().backward()
    assert holdings(module, [optimizer], CPU) == Holdings(size, size, 0, buffers)
    optimizer.step()
    states = 2 * size + FLOAT  # two moments, and the step as a number of its own
    assert holdings(module, [optimizer], CPU) == Holdings(size, size, states, buffers)
    optimizer.zero_grad()
    assert holdings(module, [optimizer], CPU) == Holdings(size, 0, states, buffers)


def test_each_storage_counts_once() -> None:
    module = nn.Sequential(_linear(), _linear())
    module[1].weight = module[0].weight
    module.register_buffer("view", module[0].weight.detach()[2:])
    assert holdings(module, [], CPU) == Holdings(100 * FLOAT, 0, 0, 0)
    assert holdings(module, [torch.optim.SGD(module.parameters())], CPU) == Holdings(100 * FLOAT, 0, 0, 0)


def test_a_storage_counts_in_full_if_a_view_is_held() -> None:
    module = _linear()
    module.weight = nn.Parameter(torch.zeros(50, 10)[:10])
    assert holdings(module, [], CPU).parameters == 500 * FLOAT


def test_master_weights_are_optimizer_states() -> None:
    module = _linear().bfloat16()
    master = nn.Parameter(module.weight.detach().float())
    master.grad = torch.zeros_like(master)
    held = holdings(module, [torch.optim.SGD([master])], CPU)
    assert held == Holdings(200, 100 * FLOAT, 100 * FLOAT, 0)


def test_storages_of_another_device_do_not_count() -> None:
    module = nn.Sequential(_linear(), _linear().to("meta"))
    assert holdings(module, [], CPU).parameters == 100 * FLOAT
    assert holdings(module, [], torch.device("meta")).parameters == 100 * FLOAT
    assert holdings(module, [], torch.device("cuda", 0)) == NONE
    assert holdings(nn.Identity(), [], CPU) == NONE


@pytest.fixture
def world_of_two() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("world_of_two")
def test_only_the_local_part_of_a_sharded_tensor_counts() -> None:
    module = _linear()
    mesh = init_device_mesh("cpu", (2,))
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    module.weight.grad = torch.zeros_like(module.weight)
    assert holdings(module, [], CPU) == Holdings(50 * FLOAT, 50 * FLOAT, 0, 0)


def test_the_causes_of_a_peak_add_up() -> None:
    held = Holdings(100, 50, 200, 5)
    assert split_by_cause(1000, held).model_dump() == {
        "parameters": 100,
        "gradients": 50,
        "optimizer_states": 200,
        "buffers": 5,
        "activations_and_rest": 645,
    }
    assert split_by_cause(355, held).activations_and_rest == 0


@pytest.mark.parametrize("peak", [None, 354])
def test_an_unknown_or_impossible_remainder_is_unknown_never_negative(peak: int | None) -> None:
    assert split_by_cause(peak, Holdings(100, 50, 200, 5)).activations_and_rest is None


class Allocator:
    """An allocator whose peak the test sets."""

    now: int | None = 0

    def __call__(self) -> int | None:
        return self.now


class Loop:
    """Steps of two layers, as the loop marks them."""

    def __init__(self) -> None:
        self.module = nn.Sequential(_linear(), _linear())
        self.optimizer = torch.optim.SGD(self.module.parameters(), momentum=0.9)
        self.peak = Allocator()
        self.reader = HoldingsReader(self.module, [self.optimizer], self.peak, CPU, lambda: None)

    def part(self, code: int, peak: int | None) -> None:
        """``code`` begins; by its end the allocator's peak will have been ``peak``."""
        self.reader(code)
        self.peak.now = peak

    def step(self, peaks: tuple[int, int, int, int]) -> None:
        self.part(FORWARD, peaks[0])
        loss = self.module(torch.ones(2, 10)).sum()
        self.part(BACKWARD, peaks[1])
        loss.backward()
        self.part(OPTIMIZER, peaks[2])
        self.optimizer.step()
        self.part(ZERO_GRAD, peaks[3])
        self.optimizer.zero_grad()
        self.reader(OTHER)
        self.reader.step_ended()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.reader.stop()  # else hooks of autograd are left


def test_each_part_has_the_causes_at_its_highest_peak(loop: Loop) -> None:
    size = 200 * FLOAT
    loop.step((2000, 3000, 4000, 5000))
    assert loop.reader.by_part() == {
        "forward": split_by_cause(2000, Holdings(size, 0, 0, 0)),
        "backward": split_by_cause(3000, Holdings(size, size, 0, 0)),
        "optimizer": split_by_cause(4000, Holdings(size, size, size, 0)),
        "zero_grad": split_by_cause(5000, Holdings(size, size, size, 0)),  # cleared only at its end
    }
    loop.step((6000, 2900, 4000, 5000))
    held = loop.reader.by_part()
    assert held["forward"] == split_by_cause(6000, Holdings(size, 0, size, 0))  # the optimizer has states by now
    assert held["backward"] == split_by_cause(3000, Holdings(size, size, 0, 0))


def test_memory_outside_of_steps_is_in_no_part(loop: Loop) -> None:
    loop.part(OTHER, 1000)
    loop.reader(OUTSIDE)
    loop.peak.now = 9000
    loop.reader(OTHER)
    loop.peak.now = 1000
    loop.reader(OTHER)
    loop.reader.step_ended()
    loop.peak.now = 9000
    loop.reader(FORWARD)
    assert loop.reader.by_part() == {"other": split_by_cause(1000, Holdings(200 * FLOAT, 0, 0, 0))}


@pytest.mark.parametrize(
    "peaks, arrived",
    [
        ((3000, 3000, 3000), 1),  # it was highest at the start, when the last layer's gradient had come
        ((2000, 3000, 3000), 2),
        ((2000, 2500, 3000), 2),  # it rose once more after the last one
    ],
)
def test_gradients_count_as_far_as_they_had_come_at_the_peak(loop: Loop, peaks: tuple[int, int, int], arrived: int):
    later = iter(peaks)
    # These hooks run before the reader's own: they move the allocator's peak as a backward would.
    for layer in loop.module:
        layer.weight.register_post_accumulate_grad_hook(lambda _: setattr(loop.peak, "now", next(later)))
    loop.reader.start()
    loss = loop.module(torch.ones(2, 10)).sum()
    loop.part(BACKWARD, 1000)
    loss.backward()
    loop.peak.now = next(later)
    loop.reader(OTHER)
    assert loop.reader.by_part()["backward"] == split_by_cause(3000, Holdings(200 * FLOAT, arrived * 100 * FLOAT, 0, 0))


def test_accumulated_gradients_are_counted_at_once(loop: Loop) -> None:
    loop.reader.start()
    for peak in (1000, 3000):
        loss = loop.module(torch.ones(2, 10)).sum()
        loop.part(BACKWARD, peak)
        loss.backward()
        loop.reader(OTHER)
    assert loop.reader.by_part()["backward"].gradients == 200 * FLOAT


def test_after_stop_no_hook_is_left(loop: Loop) -> None:
    loop.reader.start()
    loop.reader.stop()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in loop.module.parameters())


def test_tensors_within_functions_of_torch_func_have_no_memory_of_their_own() -> None:
    pieces: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        pieces.extend(plain_tensors_of(x))
        return x.square().sum()

    torch.func.grad(loss)(torch.ones(3))
    assert pieces == []

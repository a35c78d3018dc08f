"""Activations that leave the GPU are not held there, and come back for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.offload import imitate_offload, refuse_host_optimizers
from lm_profiler.measure.fake.world import FakeWorld

ROWS, WIDTH, LAYERS = 512, 256, 6
ACTIVATION = 4 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def imitated() -> Iterator[None]:
    kept = graph.save_on_cpu.__init__, graph.saved_tensors_hooks.__init__, Tensor.cpu, Tensor.to
    imitate_offload()
    yield
    graph.save_on_cpu.__init__, graph.saved_tensors_hooks.__init__, Tensor.cpu, Tensor.to = kept


def peaks(context: Any) -> tuple[int, int]:
    """Bytes after forward and at the peak of backward, beyond weights and input."""
    world = FakeWorld((9, 0))
    with world.inside():
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        layers(x).sum().backward()  # makes gradients and cuBLAS's workspaces
        before = world.live.held_bytes
        with context:
            loss = layers(x).sum()
        after_forward = world.live.held_bytes - before
        world.live.reset()
        loss.backward()
        peak, *_ = world.live.peaks()
    return after_forward, peak - before


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}])
def test_tensors_saved_on_the_cpu_come_back_one_by_one(options: Any) -> None:
    plain_forward, plain_peak = peaks(nn.Identity() and saved_tensors_hooks(lambda x: x, lambda x: x))
    forward, peak = peaks(save_on_cpu(**options))
    assert plain_forward >= LAYERS * ACTIVATION
    assert forward < ACTIVATION
    assert peak < plain_peak - (LAYERS - 4) * ACTIVATION
    assert peak >= 2 * ACTIVATION  # what backward reads and writes at one time


@pytest.mark.parametrize("pack", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.to(device=torch.device("cpu"))])
def test_hooks_that_move_tensors_themselves_cannot_be_planned(pack: Any) -> None:
    with pytest.raises(Uncounted, match="only torch's own save_on_cpu"):
        peaks(saved_tensors_hooks(pack, lambda x: x))


class Adam(torch.optim.Optimizer):
    """Keeps one state, which ``make_state`` makes."""

    def __init__(self, parameters: Any, make_state: Any) -> None:
        super().__init__(parameters, {})
        self.make_state = make_state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter]["average"] = self.make_state(parameter)
                self.state[parameter]["steps"] = torch.zeros((), device="cpu")


def held_by_step(optimizer_of: Any) -> int:
    """Bytes that a step of an optimizer of one weight leaves held."""
    world = FakeWorld((9, 0))
    with world.inside():
        weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        weight.grad = torch.empty_like(weight)
        optimizer = optimizer_of([weight])
        before = world.live.held_bytes
        optimizer.step()
        return world.live.held_bytes - before


HOST_STATES = [
    lambda weight: torch.zeros_like(weight, device="cpu"),
    lambda weight: torch.zeros_like(weight).cpu(),
    lambda weight: torch.zeros_like(weight).to("cpu"),
    lambda weight: torch.zeros_like(weight).to(device="cpu"),
]


@pytest.mark.parametrize("make_state", HOST_STATES)
def test_states_on_the_host_cannot_be_planned(make_state: Any) -> None:
    with pytest.raises(Uncounted, match="Adam keeps tensors on the host"):
        held_by_step(lambda weights: Adam(weights, make_state))


def test_optimizer_states_have_their_bytes() -> None:
    """As torchao and bitsandbytes make them: the device of a fake weight is the host by name alone."""
    held = held_by_step(lambda weights: Adam(weights, lambda weight: torch.zeros_like(weight).to(weight.device)))
    assert held == 4 * WIDTH * WIDTH + 512  # and the count of steps, in the allocator's smallest block


def test_states_of_eight_bits_hold_one_byte() -> None:
    assert held_by_step(lambda weights: Adam(weights, quantized)) == BYTES_OF_STATE + 512
    # What the program moves by itself is no state.
    with FakeWorld((9, 0)).inside():
        torch.empty(WIDTH, WIDTH).cpu()


class DeepSpeedCPUAdam(torch.optim.SGD):
    """The name of DeepSpeed's."""


class PagedAdamW8bit(torch.optim.SGD):
    """Attributes of bitsandbytes' paged optimizers."""

    is_paged = True


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, PagedAdamW8bit])
def test_optimizers_that_are_known_to_offload_cannot_be_planned(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    refuse_host_optimizers([torch.optim.SGD([weight])])
    with pytest.raises(Uncounted, match=kind.__name__):
        refuse_host_optimizers([kind([weight])])


class Quantized(Tensor):
    """A state that looks like float32 and holds bytes, as in torchao 0.19 (``OptimState8bit``)."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def quantized(weight: Tensor) -> Tensor:
    codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
    return Quantized(codes, torch.zeros(weight.numel() // 256, device=weight.device))


BYTES_OF_STATE = WIDTH * WIDTH + 4 * WIDTH * WIDTH // 256

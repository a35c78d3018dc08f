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
from lm_profiler.measure.fake.offload import imitate_offload
from lm_profiler.measure.fake.world import FakeWorld

ROWS, WIDTH, LAYERS = 512, 256, 6
ACTIVATION = 4 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def imitated() -> Iterator[None]:
    kept = graph.save_on_cpu.__init__, graph.saved_tensors_hooks.__init__, Tensor.cpu, Tensor.to
    imitate_offload()
    yield
    graph.save_on_cpu.__init__, graph.saved_tensors_hooks.__init__, Tensor.cpu, Tensor.to = kept  # type: ignore[method-assign]


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
    assert peak is not None
    return after_forward, peak - before


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}])
def test_what_is_saved_on_the_cpu_is_not_held_and_comes_back_one_by_one(options: Any) -> None:
    plain_forward, plain_peak = peaks(nn.Identity() and saved_tensors_hooks(lambda x: x, lambda x: x))
    forward, peak = peaks(save_on_cpu(**options))
    assert plain_forward >= LAYERS * ACTIVATION
    assert forward < ACTIVATION
    assert peak < plain_peak - (LAYERS - 4) * ACTIVATION
    assert peak >= 2 * ACTIVATION  # what backward reads and writes at one time


@pytest.mark.parametrize("pack", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.to(device=torch.device("cpu"))])
def test_hooks_that_move_tensors_themselves_cannot_be_planned(pack: Any) -> None:
    with pytest.raises(Uncounted, match="only save_on_cpu"):
        peaks(saved_tensors_hooks(pack, lambda x: x))

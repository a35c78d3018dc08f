"""The bytes that each phase has to move at least, against bytes counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from lm_profiler.measure.clocks.tape import BACKWARD, CLIP, DATA, END, FORWARD, LEAVE, OPTIMIZER, ZERO_GRAD
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic, TrafficReader
from lm_profiler.measure.memory.causes import HoldingsReader
from lm_profiler.models.config import PRESETS
from lm_profiler.models.transformer import Transformer

CPU = torch.device("cpu")
ROWS = torch.ones(3, 8)
F32 = 4


class Loop:
    """A training loop with the marks that the real one has."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        device: torch.device = CPU,
        counting: bool = True,
        set_to_none: bool = True,
    ) -> None:
        self.module, self.optimizer, self.set_to_none = module, optimizer, set_to_none
        self.timeline, traffic = Timeline(), ForwardTraffic()
        optimizers = [] if optimizer is None else [optimizer]
        self.levels = HoldingsReader(module, optimizers, lambda: None, device, lambda: None)
        self.reader = TrafficReader(module, optimizers, device, self.timeline, self.levels.saved_tensors, traffic)
        self.flops = StepFlops(self.timeline, traffic)
        self.timeline.observers = (self.levels, self.reader, *[self.flops] * counting)

    def part(self, code: int, work: Callable[[], Any]) -> Any:
        self.timeline.mark(code)
        result = work()
        self.timeline.mark(LEAVE)
        return result

    def step(self, *batches: Any, loss: Callable[[nn.Module, Any], Tensor] = lambda m, b: m(b).sum()) -> Loop:
        """One step; under accumulation of several batches."""
        self.part(DATA, lambda: None)
        for at, batch in enumerate(batches):
            value = self.part(FORWARD, lambda batch=batch: loss(self.module, batch))
            if self.optimizer is not None and at == 0:
                self.part(ZERO_GRAD, lambda: self.optimizer.zero_grad(self.set_to_none))
            if value.requires_grad:
                self.part(BACKWARD, value.backward)
        if self.optimizer is not None:
            self.part(CLIP, lambda: nn.utils.clip_grad_norm_(self.module.parameters(), 1.0))
            self.part(OPTIMIZER, self.optimizer.step)
        return self.end()

    def end(self) -> Loop:
        """Of the step, and of all hooks in torch."""
        self.timeline.mark(END)
        self.reader.step_ended()
        self.levels.step_ended()
        self.flops.stop()
        return self

    @property
    def bytes(self) -> dict[str, int]:
        traffic = self.reader.traffic
        return {**traffic.by_phase, "forward": traffic.by_phase["forward"] + traffic.forward_read}


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).to(dtype)


SECOND_WEIGHT = 8 * 4  # elements that backward reads; the first weight is not needed: the input has no gradient
WEIGHTS = 8 * 8 + SECOND_WEIGHT
ACTIVATION = 3 * 8  # elements of the ReLU's output, which it and the second layer save


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forward_and_backward_of_two_layers(dtype: torch.dtype) -> None:
    found = Loop(two_layers(dtype)).step(ROWS.to(dtype)).bytes
    assert found["forward"] == (WEIGHTS + ROWS.numel() + ACTIVATION) * dtype.itemsize
    saved = ROWS.numel() + ACTIVATION + SECOND_WEIGHT
    gradients = WEIGHTS
    assert found["backward"] == (saved + gradients) * dtype.itemsize


def test_autocasts_copies_are_not_written() -> None:
    model = two_layers()
    with torch.autocast("cpu", torch.bfloat16):
        found = Loop(model).step(ROWS).bytes
    assert found["forward"] == (WEIGHTS + ROWS.numel()) * 4 + ACTIVATION * 2
    saved = (ROWS.numel() + ACTIVATION + SECOND_WEIGHT) * 2  # input and second weight as copies in bfloat16
    assert found["backward"] == saved + WEIGHTS * 4


def test_traffic_of_a_sparse_gradient_is_unknown() -> None:
    """Nobody knows which rows it moves."""
    table = nn.Embedding(100, 4, sparse=True)
    loop = Loop(table, SGD(table.parameters(), 0.1))
    loop.part(FORWARD, lambda: None)
    loop.part(BACKWARD, table(torch.tensor([1, 2])).sum().backward)
    loop.part(OPTIMIZER, loop.optimizer.step)
    loop.end()
    assert loop.reader.traffic.by_phase["optimizer"] is None


@pytest.mark.parametrize(
    "make, states",
    [
        (lambda p: SGD(p, 0.1), 0),
        (lambda p: SGD(p, 0.1, momentum=0.9), 1),
        (lambda p: AdamW(p, 0.1), 2),
        (lambda p: AdamW(p, 0.1, fused=True), 2),
        (lambda p: AdamW(p, 0.1, amsgrad=True), 3),
    ],
)
def test_traffic_of_an_optimizer(make: Callable[[Any], Optimizer], states: int):
    model = two_layers()
    optimizer = make(model.parameters())
    found = Loop(model, optimizer).step(ROWS).bytes
    counters = 2 * 2 * F32 if states > 1 else 0  # Adam counts its steps in a tensor for each parameter
    assert found["optimizer"] == (2 + 1 + 2 * states) * WEIGHTS * F32 + counters
    assert (found["clip"], found["zero_grad"]) == (WEIGHTS * F32, 0)


def test_kept_gradients_are_read_and_written() -> None:
    model = two_layers()
    loop = Loop(model, SGD(model.parameters(), 0.1), set_to_none=False).step(ROWS)
    assert loop.bytes["zero_grad"] == 0  # there were none
    first = loop.bytes["backward"]
    loop.step(ROWS)
    assert loop.bytes["zero_grad"] == WEIGHTS * F32
    assert loop.bytes["backward"] == first + WEIGHTS * F32


def test_accumulation_reads_weights_with_each_batch() -> None:
    model = two_layers()
    loop = Loop(model, SGD(model.parameters(), 0.1)).step(ROWS)
    bytes_of_one_batch = loop.bytes
    loop.step(ROWS, ROWS.clone(), ROWS.clone())
    assert loop.bytes["forward"] == 3 * bytes_of_one_batch["forward"]
    assert loop.bytes["backward"] == 3 * bytes_of_one_batch["backward"] + 2 * WEIGHTS * F32
    for part in ("clip", "optimizer"):
        assert loop.bytes[part] == bytes_of_one_batch[part]


def test_frozen_parameters_have_no_gradient() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    found = Loop(model, AdamW(model.parameters(), 0.1, fused=True)).step(ROWS).bytes
    last = 8 * 4
    assert found["forward"] == (WEIGHTS + ROWS.numel() + ACTIVATION) * F32
    assert found["backward"] == (ACTIVATION + last) * F32  # no weight is needed: nothing before it learns
    assert found["optimizer"] == 7 * last * F32 + 2 * F32

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens))

    model, tokens = Tied(), torch.arange(3)
    found = Loop(model, SGD(model.parameters(), 0.1)).step(tokens).bytes
    weight, looked_up = 10 * 8 * F32, 3 * 8 * F32
    assert found["forward"] == weight + tokens.nbytes + looked_up  # the rows found are saved for the head
    assert found["backward"] == tokens.nbytes + looked_up + weight + weight
    assert found["optimizer"] == 3 * weight


def test_activations_that_are_not_saved_are_not_written() -> None:
    model = two_layers()
    plain = Loop(model).step(ROWS).bytes
    again = Loop(model).step(ROWS, loss=lambda m, b: checkpoint(m, b, use_reentrant=False).sum()).bytes
    assert again["forward"] == plain["forward"] - ACTIVATION * F32


def test_without_a_backward_pass_nothing_is_written() -> None:
    with torch.no_grad():
        found = Loop(two_layers()).step(ROWS).bytes
    assert found == {"forward": (WEIGHTS + ROWS.numel()) * F32}


def test_reads_of_a_compiled_step_are_unknown() -> None:
    """The saved input cannot be distinguished from an activation."""
    model = two_layers()
    traffic = Loop(model, counting=False).step(ROWS).reader.traffic
    assert traffic.forward_read is None
    assert traffic.by_phase["forward"] == (ACTIVATION + ROWS.numel()) * F32


@pytest.mark.parametrize("size", ["cs336-2026/small", "llama-2/7B"])
def test_adamw_moves_28_bytes_per_parameter(size: str) -> None:
    """Float32: 4 of the gradient, twice 4 of parameter and of each of two moments. On shapes alone."""
    config, meta = replace(PRESETS[size], num_layers=2), torch.device("meta")
    with meta:
        model, tokens = Transformer(config), torch.zeros(1, 8, dtype=torch.int64)
    optimizer = AdamW(model.parameters(), 0.1, foreach=False)
    loop = Loop(model, optimizer, meta)
    loop.part = lambda code, work: nullcontext() if code == CLIP else Loop.part(loop, code, work)
    found = loop.step(tokens, loss=lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten())).bytes
    counters = 2 * 4 * len(list(model.parameters()))
    parameters = config.num_parameters()
    assert found["optimizer"] == pytest.approx(28 * parameters, abs=counters)
    # What is read to compute gradients: at least every weight but the embedding's, and the gradients written.
    assert found["backward"] >= 4 * (config.num_parameters(embedding=False) + parameters)

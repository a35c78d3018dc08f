"""Ranges around forward passes: nested, closed whatever happens, gone afterwards, and never a recompilation."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lm_profiler.callbacks.instruments.tracer import ModuleRanges


class Block(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.fails = nn.Linear(4, 8), nn.Linear(8, 4), fails

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x))
        if self.fails:
            raise KeyError("wrong")
        return x


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def traced(model: nn.Module, backward: bool = False) -> list[tuple[str, float, float]]:
    """Name, begin and end of the ranges of one pass."""
    ranges = ModuleRanges()
    ranges.attach(model)
    try:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            try:
                y = model(torch.ones(2, 4))
            except KeyError:
                y = torch.ones(())
            if backward:
                y.sum().backward()
            torch.ones(1).mul(2)
    finally:
        ranges.detach()
    events = profiled.events() or []
    return [
        (e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.name.startswith(("lm_profiler module: ", "aten::mul"))
    ]


def range_counts(ranges: list[tuple[str, float, float]]) -> Counter[str]:
    return Counter(name for name, *_ in ranges if name.startswith("lm_profiler module"))


def parts(number: int, times: int = 1) -> dict[str, int]:
    block = f"lm_profiler module: blocks.{number}"
    return {f"{block} (Block)": times, f"{block}.up (Linear)": times, f"{block}.down (Linear)": times}


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_that_is_called_has_a_range_inside_its_parents(fails: bool) -> None:
    """An exception closes the ranges that it leaves."""
    model = Model(Block(), Block(fails))
    ranges = traced(model)
    assert range_counts(ranges) == parts(0) | parts(1)
    spans = {name: (begin, end) for name, begin, end in ranges}
    for number in (0, 1):
        outer = spans[f"lm_profiler module: blocks.{number} (Block)"]
        up, down = (spans[f"lm_profiler module: blocks.{number}.{part} (Linear)"] for part in ("up", "down"))
        assert outer[0] <= up[0] <= up[1] <= down[0] <= down[1] <= outer[1] <= spans["aten::mul"][0]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_recomputed_operators_are_in_the_range_of_their_module() -> None:
    model = Model(Block(), Block())
    model.recompute = True
    assert range_counts(traced(model, backward=True)) == parts(0, 2) | parts(1, 2)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_modules_are_left_alone(how: str) -> None:
    torch.compiler.reset()
    counters.clear()
    inner = Block()
    if how == "in place":
        inner.compile(backend="eager")
    model = Model(torch.compile(inner, backend="eager") if how == "wrapped" else inner, Block())
    model(torch.ones(2, 4))
    frames = counters["frames"]["total"]
    assert frames > 0
    assert range_counts(traced(model)) == parts(1)
    assert counters["frames"]["total"] == frames

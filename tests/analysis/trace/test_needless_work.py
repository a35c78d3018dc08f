"""Work that may be needless is found in real traces of small programs, against their graphs in autograd."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from lm_profiler.analysis.trace.needless_work import needless_work
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.analysis.trace.range_names import phase_range_name
from lm_profiler.analysis.trace.trace_file import trace_events
from lm_profiler.analysis.why.traced import broken_down
from lm_profiler.callbacks.instruments.tracer import ModuleRanges
from lm_profiler.record.findings import NeedlessWork

STEPS = 2


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def nodes_of(result: Tensor) -> int:
    """The numbered nodes of the graph behind ``result``: all but those that add up gradients."""
    found, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and "AccumulateGrad" not in node.name():
            found.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    return len(found)


def needless_in(step: Callable[[nn.Module, Tensor], None], folder: Path) -> list[NeedlessWork]:
    """What a trace of ``step`` shows as needless; the first half of a step is in the forward phase."""
    model, x = Trunk(), torch.ones(2, 4, requires_grad=True)
    ranges = ModuleRanges()
    ranges.attach(model)
    try:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as session:
            for index in range(STEPS):
                with record_function(f"ProfilerStep#{index}"):
                    step(model, x)
                ranges.end_step()
    finally:
        ranges.detach()
    path = folder / "t.json"
    session.export_chrome_trace(str(path))
    work = traced_work(PackedTrace(trace_events(path)))
    return needless_work(work, broken_down(work).pieces)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with record_function(phase_range_name("forward")):
        result: Tensor = model(x)
    return result


def backward(loss: Tensor, retain_graph: bool = False) -> None:
    with record_function(phase_range_name("backward")):
        loss.backward(retain_graph=retain_graph)


def test_work_done_once_is_not_repeated(tmp_path: Path) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        backward(forward(model, x).sum())

    assert needless_in(step, tmp_path) == []


def test_a_gradient_penalty_repeats_nothing(tmp_path: Path) -> None:
    """The result of tanh is part of its derivative, so its node must run again."""

    def step(model: nn.Module, x: Tensor) -> None:
        result = forward(model, x)
        with record_function(phase_range_name("backward")):
            (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        backward(result.sum() + gradient.square().sum())

    assert needless_in(step, tmp_path) == []


def test_passes_on_other_inputs_or_for_a_checkpoint_are_not_repeated(tmp_path: Path) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        with record_function(phase_range_name("forward")):
            result = checkpoint(model, x, use_reentrant=False) + model(x + 1)
        backward(result.sum())

    assert needless_in(step, tmp_path) == []


def test_a_small_table_of_pairs_is_no_finding(tmp_path: Path) -> None:
    column, row = torch.ones(64, 1), torch.ones(64)

    def step(model: nn.Module, x: Tensor) -> None:
        backward(forward(model, x).sum())
        with record_function(phase_range_name("forward")):
            (column - row).sum()

    assert needless_in(step, tmp_path) == []


def test_the_shared_part_of_two_backward_passes_is_repeated(tmp_path: Path) -> None:
    shared_nodes = []

    def step(model: nn.Module, x: Tensor) -> None:
        shared = forward(model, x)
        shared_nodes.append(nodes_of(shared))
        backward(shared.sum(), retain_graph=True)
        backward(shared.square().sum())

    (repeated,) = needless_in(step, tmp_path)
    assert (repeated.phase, repeated.what, repeated.count) == ("backward", None, sum(shared_nodes) / STEPS)
    assert repeated.seconds > 0


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_second_pass_on_the_same_batch_is_repeated_with_its_own_backward(with_gradient: bool, tmp_path: Path) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        loss = forward(model, x).sum()
        with torch.set_grad_enabled(with_gradient):
            second_loss = forward(model, x).mean()
        backward(loss + second_loss)

    repeated = {work.phase: work for work in needless_in(step, tmp_path)}
    assert [*repeated] == (["forward", "backward"] if with_gradient else ["forward"])
    assert {work.what for work in repeated.values()} == {"Trunk"}
    assert repeated["forward"].count == 1


def test_a_broadcast_to_a_far_larger_tensor_is_found_with_what_is_done_to_it(tmp_path: Path) -> None:
    column, row = torch.ones(640, 1), torch.ones(640)

    def step(model: nn.Module, x: Tensor) -> None:
        backward(forward(model, x).sum())
        with record_function(phase_range_name("forward")):
            (column - row).square().sum()
            (column.square() - column).sum()  # of equal shapes
            torch.mm(column, row[None, :])  # a matrix product, whose factors could be broadcast, too

    works = [work for work in needless_in(step, tmp_path) if work.kind == "broadcast"]
    assert {(work.phase, work.what) for work in works} == {("forward", "aten::sub of 640 × 1 and 640 makes 640 × 640")}

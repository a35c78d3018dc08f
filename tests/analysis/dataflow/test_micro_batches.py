"""Small micro-batches are found, with the overhead that one pass over all samples would save."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lm_profiler.analysis.dataflow.micro_batches import calls_of_micro_batches, line_of_passes
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.record.operator_calls import StepCalls

MICRO_BATCHES = 4

Pass = Callable[[nn.Module, Tensor | None], Tensor]


def recorded(run_pass: Pass, updates_between: bool = False) -> StepCalls:
    """Return the calls of a step of four passes; each gets what the one before it has returned."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(net.parameters())
    operators = StepOperators(lambda: (net, [optimizer]))
    operators.start()
    operators.begin_step()
    with FlopCounter(operators=operators):
        state = None
        for number in range(MICRO_BATCHES):
            operators.phase = "forward"
            state = run_pass(net, state)
            operators.phase = "backward"
            state.mean().backward()
            if updates_between or number == MICRO_BATCHES - 1:
                operators.phase = "optimizer"
                optimizer.step()
    operators.stop()
    calls = operators.take(is_complete=True)
    assert calls is not None
    return calls


def micro_batch(net: nn.Module, state: Tensor | None) -> Tensor:
    return net(torch.rand(4, 16)).square()


def window_of_a_sequence(net: nn.Module, state: Tensor | None) -> Tensor:
    """Truncated backpropagation through time: each window begins with the state after the last one."""
    inputs = torch.rand(4, 16)
    if state is not None:
        inputs = inputs + state.detach()
    return net(inputs)


def other_loss_each_time(net: nn.Module, state: Tensor | None) -> Tensor:
    """Two losses, each with a backward pass of its own."""
    output = net(torch.rand(4, 16))
    if state is None:
        return output.exp().log().square().sqrt()
    return output


def test_one_pass_would_save_the_overhead_of_all_passes_but_one() -> None:
    step = recorded(micro_batch)
    shares = calls_of_micro_batches(step)
    products = [number for number, call in enumerate(step.calls) if call.product is not None]
    # forward has two products in each pass; backward has three, because the batch needs no gradient
    assert len(products) == MICRO_BATCHES * 5
    assert shares.keys() >= set(products)
    # a product of four rows spends its time on reading the weight
    forward_products = [number for number in products if step.calls[number].phase == "forward"]
    assert [shares[number] for number in forward_products] == [pytest.approx(0.75)] * 8
    line = line_of_passes(step, shares)
    assert line is not None
    assert line.function == "micro_batch"


@pytest.mark.parametrize("run_pass", [window_of_a_sequence, other_loss_each_time])
def test_passes_that_depend_on_each_other_or_differ_are_no_micro_batches(run_pass: Pass) -> None:
    assert calls_of_micro_batches(recorded(run_pass)) == {}


def test_passes_with_an_update_between_them_are_no_micro_batches() -> None:
    assert calls_of_micro_batches(recorded(micro_batch, updates_between=True)) == {}

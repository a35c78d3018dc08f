"""Gradients that are filled with zeros are found, and how much of the optimizer's work they cause."""

from itertools import count

import torch
from torch import nn

from lm_profiler.analysis.dataflow.kept_gradients import calls_for_kept_gradients
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.record.operator_calls import StepCalls

WIDTH = 64


def calls_of_step(set_to_none: bool, head: int = 0, foreach: bool = False) -> StepCalls:
    """Train a trunk and one ``head`` of three; return the calls of the second step."""
    torch.manual_seed(0)
    trunk = nn.Linear(WIDTH, WIDTH, bias=False)
    heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
    net = nn.ModuleList([trunk, heads])
    for weight in net.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=foreach)
    operators = StepOperators(lambda: (net, [optimizer]), clock=count(step=1000).__next__)
    operators.start()
    try:
        for _ in range(2):
            operators.begin_step()
            with FlopCounter(operators=operators):
                operators.phase = "forward"
                loss = heads[head](trunk(torch.ones(8, WIDTH))).square().sum()
                operators.phase = "zero_grad"
                optimizer.zero_grad(set_to_none=set_to_none)
                operators.phase = "backward"
                loss.backward()
                operators.phase = "optimizer"
                optimizer.step()
            operators.end_part()
    finally:
        operators.stop()
    step = operators.take(is_complete=True)
    assert step is not None
    return step


def shares_by_phase(step: StepCalls) -> dict[str, set[float]]:
    shares: dict[str, set[float]] = {}
    for number, share in calls_for_kept_gradients(step).items():
        shares.setdefault(step.calls[number].phase, set()).add(share)
    return shares


def test_dropped_gradients_cost_nothing() -> None:
    assert shares_by_phase(calls_of_step(set_to_none=True)) == {}


def test_the_optimizer_updates_the_heads_that_the_step_does_not_use() -> None:
    """Two of four equal weights are of other heads."""
    assert shares_by_phase(calls_of_step(set_to_none=False)) == {"zero_grad": {1.0}, "optimizer": {0.5}}


def test_gradients_that_are_filled_in_one_call_are_found_alone() -> None:
    assert shares_by_phase(calls_of_step(set_to_none=False, foreach=True)) == {"zero_grad": {1.0}}

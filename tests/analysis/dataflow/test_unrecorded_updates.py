"""Code outside of the recorded parts may use gradients: what it needs is neither dead nor repeated."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lm_profiler.analysis.dataflow.micro_batches import calls_of_micro_batches
from lm_profiler.analysis.dataflow.needless_operators import needless_operators
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.record.operator_calls import StepCalls


class Loop:
    """A loop of a program's own; only the passes and the optimizer's step are recorded, as in a real run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        # by this clock each call takes as long as any other
        self.clock = count(step=1000).__next__
        self.operators = StepOperators(lambda: (self.net, [self.optimizer]), clock=self.clock)
        self.batches = torch.rand(4, 64, 64)

    def recorded(self, phase: str, work: Callable[[], Tensor | None]) -> Tensor | None:
        self.operators.begin_part()
        self.operators.phase = phase
        with FlopCounter(operators=self.operators):
            result = work()
        self.operators.end_part()
        return result

    def run_pass(self, batch: Tensor) -> None:
        loss = self.recorded("forward", lambda: self.net(batch).square().mean())
        self.recorded("backward", loss.backward)

    def calls_of_second_step(self, step: Callable[["Loop"], None]) -> StepCalls:
        self.operators.start()
        for _ in range(2):
            self.operators.begin_step()
            step(self)
            self.recorded("optimizer", lambda: self.optimizer.step())
            self.optimizer.zero_grad()
        self.operators.stop()
        return self.operators.take(is_complete=True)


def accumulation(loop: Loop) -> None:
    for batch in loop.batches:
        loop.run_pass(batch)


def sharpness_aware(loop: Loop) -> None:
    """The second pass on the same batch is with other weights, which the first gradients have perturbed."""
    loop.run_pass(loop.batches[0])
    perturbations = [0.05 * weight.grad for weight in loop.net.parameters() if weight.grad is not None]
    with torch.no_grad():
        for weight, perturbation in zip(loop.net.parameters(), perturbations, strict=True):
            weight.add_(perturbation)
    loop.optimizer.zero_grad()
    loop.run_pass(loop.batches[0])
    with torch.no_grad():
        for weight, perturbation in zip(loop.net.parameters(), perturbations, strict=True):
            weight.sub_(perturbation)


def perturbed_data(loop: Loop) -> None:
    """The same through ``.data``, of which torch counts no changes."""
    loop.run_pass(loop.batches[0])
    for weight in loop.net.parameters():
        weight.data.add_(weight.grad, alpha=0.05)
    loop.optimizer.zero_grad()
    loop.run_pass(loop.batches[0])


def perturbed_row(loop: Loop) -> None:
    """As of an embedding in adversarial training: the second gradients are added to those of the usual pass."""
    loop.run_pass(loop.batches[0])
    weight = loop.net[0].weight
    row = weight[3].detach().clone()
    weight.data[3] += 0.05
    loop.run_pass(loop.batches[0])
    weight.data[3] = row


def differential_privacy(loop: Loop) -> None:
    """The gradients of each sample are clipped before they are added up."""
    sums = [torch.zeros_like(weight) for weight in loop.net.parameters()]
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        loop.run_pass(batch)
        nn.utils.clip_grad_norm_(loop.net.parameters(), 1.0)
        for total, weight in zip(sums, loop.net.parameters(), strict=True):
            total += weight.grad
    for total, weight in zip(sums, loop.net.parameters(), strict=True):
        weight.grad = total


def own_updates(loop: Loop) -> None:
    """Reptile: the weights after some updates by hand, minus those before, are the gradient."""
    before = [weight.detach().clone() for weight in loop.net.parameters()]
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        loop.run_pass(batch)
        with torch.no_grad():
            for weight in loop.net.parameters():
                weight -= 0.01 * weight.grad
    with torch.no_grad():
        for weight, earlier in zip(loop.net.parameters(), before, strict=True):
            weight.grad = earlier - weight
            weight.copy_(earlier)


@pytest.mark.parametrize("step", [sharpness_aware, perturbed_data, perturbed_row, differential_privacy, own_updates])
def test_what_other_code_does_with_gradients_is_respected(step: Callable[[Loop], None]) -> None:
    calls = Loop().calls_of_second_step(step)
    assert calls_of_micro_batches(calls) == {}
    reasons = {operators.reason for operators in needless_operators(calls)}
    assert reasons.isdisjoint({"unused", "repeated", "accumulated"})


def closure_called_twice(loop: Loop) -> None:
    """Lightning's closure clears the gradients between forward and backward."""
    for _ in range(2):
        loss = loop.recorded("forward", lambda: loop.net(loop.batches[0]).square().mean())
        loop.optimizer.zero_grad()
        assert loss is not None
        loop.recorded("backward", loss.backward)


def gradients_of_two_tasks(loop: Loop) -> None:
    """Each task's gradients are kept before those of the next one; both need the layer below their heads."""
    for column in range(2):
        loss = loop.recorded("forward", lambda column=column: loop.net(loop.batches[0])[:, column].square().mean())
        assert loss is not None
        loop.recorded("backward", loss.backward)
        loop.gradients = [weight.grad for weight in loop.net.parameters()]
        loop.optimizer.zero_grad()


@pytest.mark.parametrize(
    "step, repeated_phases",
    [(closure_called_twice, {"forward", "backward"}), (gradients_of_two_tasks, {"forward"})],
)
def test_passes_on_the_same_batch_with_the_same_weights_are_repeated(
    step: Callable[[Loop], None], repeated_phases: set[str]
) -> None:
    found = {operators.reason: operators for operators in needless_operators(Loop().calls_of_second_step(step))}
    assert found["repeated"].phase_shares.keys() == repeated_phases


def test_accumulated_gradients_are_no_other_use() -> None:
    assert calls_of_micro_batches(Loop().calls_of_second_step(accumulation))


def adversarial(loop: Loop) -> None:
    """Each pass perturbs the input along the gradient of the pass before it."""
    shift = torch.zeros_like(loop.batches[0]).requires_grad_()
    for _ in range(4):
        shifted = loop.batches[0] + shift
        loss = loop.recorded("forward", lambda shifted=shifted: loop.net(shifted).square().mean())
        loop.recorded("backward", loss.backward)
        assert shift.grad is not None
        shift = (shift + 0.1 * shift.grad.sign()).detach().requires_grad_()


def test_passes_on_perturbed_inputs_are_no_micro_batches() -> None:
    assert calls_of_micro_batches(Loop().calls_of_second_step(adversarial)) == {}


def test_gradients_of_a_critic_that_are_only_cleared_are_unused() -> None:
    """A generator's loss gives the critic gradients, too; the program clears them."""
    loop = Loop()
    generator = nn.Linear(64, 64)
    own_optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
    parties = nn.ModuleList([loop.net, generator]), [loop.optimizer, own_optimizer]
    loop.operators = StepOperators(lambda: parties, clock=loop.clock)

    def step(loop: Loop) -> None:
        loss = loop.recorded("forward", lambda: functional.relu(loop.net(generator(loop.batches[0]))).mean())
        loop.recorded("backward", loss.backward)
        loop.recorded("optimizer", lambda: own_optimizer.step())
        own_optimizer.zero_grad()
        loop.optimizer.zero_grad()
        loop.run_pass(loop.batches[1])

    reasons = {operators.reason for operators in needless_operators(loop.calls_of_second_step(step))}
    assert "unused" in reasons

"""The audit of a precision, against dtypes that are known and errors computed by hand."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from raised import refusal
from stored_texts import assert_stored
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm_profiler.measure.copies.module_copies import UncopyableError, audit
from lm_profiler.record.run_record import NumericsFacts, NumericsKind

CPU = torch.device("cpu")
BF16_ROUNDOFF = 2.0**-8


class Net(nn.Module):
    """``training_step`` is the mean of the squares of ``layers``, which are never called through this module."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).float().square().mean()


def step(module: Any, batch: Any) -> Any:
    return module.training_step(batch)


def autocast_to(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype)


def audit_of(module: nn.Module, batch: Any, precision: Any = None, **options: Any) -> NumericsFacts:
    return audit(module, step, batch, CPU, precision or nullcontext(), **options)


def kinds_by_name(found: NumericsFacts) -> dict[str, NumericsKind]:
    return {kind.kind: kind for kind in found.kinds}


def relative_error(found: Tensor, reference: Tensor) -> float:
    a, b = (x.detach().double().numpy() for x in (found, reference))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_each_kind_has_the_dtypes_that_it_is_known_to_have() -> None:
    audit = audit_of(Net(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 4)), torch.randn(5, 8), autocast_to())
    found = kinds_by_name(audit)
    one, two = ["float32"], ["bfloat16"]
    assert found["Linear"].modules == 2
    assert (found["Linear"].parameters, found["Linear"].outputs, found["Linear"].gradients) == (one, two, one)
    with autocast_to():
        softplus = str(nn.Softplus()(torch.ones(1, dtype=torch.bfloat16)).dtype).removeprefix("torch.")
    assert (found["Softplus"].parameters, found["Softplus"].outputs, found["Softplus"].gradients) == (
        [],
        [softplus],
        [],
    )
    assert found["Softplus"].gradient_error is None
    assert "Net" not in found  # it has no weights of its own, and nobody called it
    # In true 16 bit everything is.
    module = Net(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    found = kinds_by_name(audit_of(module, torch.randn(5, 8).bfloat16()))
    for kind in ("Linear", "LayerNorm"):
        assert found[kind].parameters == found[kind].outputs == found[kind].gradients == ["bfloat16"]


def test_float32_is_its_own_reference() -> None:
    found = audit_of(Net(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(5, 8))
    assert found.loss == found.reference_loss
    assert found.output_error == found.gradient_error == 0.0
    assert {kind.gradient_error for kind in found.kinds} == {0.0, None}
    found = audit_of(Net(nn.Linear(64, 64), nn.Dropout(0.5)).train(), torch.randn(16, 64), autocast_to())
    assert found.output_error < 2 * BF16_ROUNDOFF


def test_values_that_are_not_finite_have_no_error() -> None:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, 300.0)
    found = audit_of(Net(layer).half(), torch.full((2, 4), 300.0).half())
    assert found.loss is None
    assert found.output_error is None
    assert found.gradient_error is None
    assert found.reference_loss == pytest.approx((4 * 300.0**2) ** 2)


def test_errors_are_those_of_the_same_products_by_hand() -> None:
    torch.manual_seed(1)
    layer, x = nn.Linear(64, 32, bias=False), torch.randn(16, 64)
    w = layer.weight.detach()
    found = audit_of(Net(layer), x, autocast_to())

    exact, rounded = x @ w.T, (x.bfloat16() @ w.bfloat16().T).float()
    # d mean(y²) / dW = 2/n · yᵀ x, in bf16 where y is.
    slopes = [2 / exact.numel() * exact, (2 / exact.numel() * rounded).bfloat16()]
    gradient, gradient_16 = slopes[0].T @ x, (slopes[1].T @ x.bfloat16()).float()
    assert found.reference_loss == pytest.approx(exact.square().mean().item(), rel=1e-6)
    assert found.loss == pytest.approx(rounded.square().mean().item(), rel=1e-6)
    assert found.output_error == pytest.approx(relative_error(rounded, exact), rel=1e-3)
    assert found.gradient_error == pytest.approx(relative_error(gradient_16, gradient), rel=1e-2)
    assert kinds_by_name(found)["Linear"].gradient_error == found.gradient_error
    # Both factors and the result are rounded.
    assert 0.1 * BF16_ROUNDOFF < relative_error(rounded, exact) < 2 * BF16_ROUNDOFF


def test_a_loss_scale_is_taken_out_again() -> None:
    """Gradients of 1e-9 are nothing in float16, and exist when the loss is scaled up."""

    class Small(Net):
        def training_step(self, batch: Tensor) -> Tensor:
            return self.layers(batch).float().mean() * 1e-9

    module, x = Small(nn.Linear(8, 8, bias=False)).half(), torch.rand(4, 8).half() + 0.5
    without = audit_of(module, x)
    assert without.gradient_error == 1.0
    scaled = audit_of(module, x, loss_scale=2.0**16)
    assert scaled.gradient_error < 0.05


def test_shared_and_recomputed_layers_count_once() -> None:
    class Tied(Net):
        def training_step(self, batch: Tensor) -> Tensor:
            return checkpoint(super().training_step, batch, use_reentrant=False)

    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    x = torch.randn(3, 8)
    found = audit_of(Tied(first, nn.LayerNorm(8, elementwise_affine=False), second), x, autocast_to())
    both = kinds_by_name(found)["Linear"]
    assert both.modules == 2
    assert both.gradient_error == found.gradient_error != 0.0
    assert found.output_error is not None


def set_older() -> None:
    torch.set_float32_matmul_precision("medium")


def set_newer() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


def float32_precisions() -> list[str]:
    b = torch.backends
    return [o.fp32_precision for o in (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv)]


@pytest.mark.parametrize("set_precision", [set_older, set_newer])
def test_the_reference_is_float32_in_any_setting_of_the_process(set_precision: Callable[[], None]) -> None:
    seen: list[list[str]] = []

    class Asks(Net):
        def training_step(self, batch: Tensor) -> Tensor:
            seen.append(float32_precisions())
            return super().training_step(batch)

    unset = float32_precisions()
    set_precision()
    before = float32_precisions()
    try:
        audit_of(Asks(nn.Linear(4, 4)), torch.randn(2, 4))
        assert seen == [before, ["ieee"] * 5]  # cuDNN's convolutions are in TF32 by default
        assert float32_precisions() == before != unset
    finally:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.conv.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("source", ["torch", "own", "numpy", "own numpy", "python", "own python"])
def test_random_numbers_are_the_same_in_both_copies(source: str) -> None:
    """What float32 draws differently it would be blamed for, and training goes on after the audit."""

    class Noisy(Net):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.own = torch.Generator()
            self.own_numpy, self.own_python = np.random.default_rng(1), random.Random(1)
            self.losses: deque[float] = deque(maxlen=9)

        def draw(self) -> Any:
            return {
                "torch": lambda: torch.rand(()),
                "own": lambda: torch.rand((), generator=self.own),
                "numpy": np.random.rand,
                "own numpy": self.own_numpy.random,
                "python": random.random,
                "own python": self.own_python.random,
            }[source]()

        def training_step(self, batch: Tensor) -> Tensor:
            loss = super().training_step(batch) * self.draw()
            self.losses.append(loss.item())
            return loss

    module, drawn = Noisy(nn.Linear(4, 4)), []
    for looked_at in (False, True):
        for seeded in (torch.manual_seed, module.own.manual_seed, np.random.seed, random.seed, module.own_python.seed):
            seeded(7)
        module.own_numpy = np.random.default_rng(7)
        if looked_at:
            found = audit_of(module, torch.randn(2, 4, generator=torch.Generator()))
            assert found.gradient_error == 0.0
        drawn.append(float(module.draw()))
    assert drawn[0] == drawn[1]
    assert not module.losses


def test_the_audit_leaves_the_module_unchanged() -> None:
    module = Net(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    x = torch.randn(5, 8)
    module.training_step(x).backward()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    numbers = torch.get_rng_state()
    audit_of(module, x, autocast_to())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True))
    assert all(part.training and not part._forward_hooks for part in module.modules())


def test_a_step_without_a_loss_is_refused() -> None:
    def audited_of(result: Any) -> Any:
        return audit(nn.Linear(2, 2), lambda module, batch: result, None, CPU, nullcontext())

    results = (None, 3.0, torch.tensor(1.0))
    messages = {f"{result}": refusal(ValueError, lambda result=result: audited_of(result)) for result in results}
    assert_stored("measure/refused: no loss", messages)
    parallel = type("DistributedDataParallel", (nn.Linear,), {})
    with pytest.raises(UncopyableError, match="DistributedDataParallel cannot be copied"):
        audit_of(Net(parallel(2, 2)), torch.ones(1, 2))

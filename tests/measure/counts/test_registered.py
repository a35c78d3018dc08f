"""FLOPs by formulas that a program registers, and lower bounds where work is not counted."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from on_shapes import steps_of
from torch import Tensor

import lm_profiler
from lm_profiler.measure.counts import registered
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.uncountable import BrokenFormulaError
from lm_profiler.usage_error import UsageError

ROWS, WIDTH = 3, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered, "operator_formulas", registered.operator_formulas)
    yield
    registered.operator_formulas.clear()
    registered.function_formulas.clear()


def write_behind(result: Tensor, values: Tensor) -> None:
    """Write as a kernel does that is launched past torch's dispatcher."""
    np.copyto(result.detach().numpy(), values)


class Kernel(torch.autograd.Function):
    """A product whose forward and backward no operator of torch computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        result = torch.empty(x.shape[0], weight.shape[1])
        write_behind(result, x.detach().numpy() @ weight.detach().numpy())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradients = torch.empty_like(x), torch.empty_like(weight)
        write_behind(gradients[0], gradient.numpy() @ weight.numpy().T)
        write_behind(gradients[1], x.numpy().T @ gradient.numpy())
        return gradients


def inputs() -> tuple[Tensor, Tensor]:
    return torch.rand(ROWS, WIDTH, requires_grad=True), torch.rand(WIDTH, WIDTH, requires_grad=True)


def test_an_unregistered_kernel_makes_a_lower_bound() -> None:
    flops = steps_of(Kernel, *inputs()).flops()
    assert (flops.forward, flops.backward) == (0, 0)
    names = " ".join(flops.uncounted)
    assert "Kernel" in names or "forward" in names
    assert "test_registered.py" in names

    def product(x: Tensor, weight: Tensor) -> int:
        return 2 * x.shape[0] * weight.numel()

    def two_products(ctx: Any, gradient: Tensor) -> int:
        return 2 * product(*ctx.saved_tensors)

    methods = dict(vars(Kernel))
    lm_profiler.register_flops(Kernel, product, backward=two_products)
    steps = steps_of(Kernel, *inputs())
    flops = steps.flops()
    assert (flops.forward, flops.backward, flops.uncounted) == (PRODUCT, 2 * PRODUCT, [])
    assert steps.by_dtype() == {"forward": {"float32": PRODUCT}, "backward": {"float32": 2 * PRODUCT}}
    assert dict(vars(Kernel)) == methods


@torch.library.custom_op("lm_profiler_registered::product", mutates_args=())
def own_product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def test_a_registered_operator_counts() -> None:
    left, right = torch.rand(3, 4), torch.rand(4, 5)

    def counted() -> Any:
        counter = FlopCounter()
        with counter:
            own_product(left @ torch.rand(4, 4), right)
        return counter.flops()

    unknown = counted()
    assert (unknown.forward, unknown.uncounted) == (2 * 3 * 16, ["lm_profiler_registered::product"])
    lm_profiler.register_flops("lm_profiler_registered::product", lambda a, b: 2 * a.numel() * b.shape[1])
    known = counted()
    assert (known.forward, known.uncounted) == (2 * 3 * 16 + 2 * 3 * 4 * 5, [])


def test_a_formula_without_a_number_makes_the_count_unknown() -> None:
    lm_profiler.register_flops(Kernel, lambda x, weight: 1 // 0)
    with pytest.raises(BrokenFormulaError, match=r"formula of Kernel\.forward.*ZeroDivisionError"):
        steps_of(Kernel, *inputs()).flops()
    lm_profiler.register_flops(Kernel, lambda x: 0)  # its forward takes two arguments
    with pytest.raises(BrokenFormulaError, match=r"formula of Kernel\.forward.*TypeError"):
        steps_of(Kernel, *inputs()).flops()
    lm_profiler.register_flops(Kernel, lambda x, weight: None)
    with pytest.raises(BrokenFormulaError, match=r"formula of Kernel\.forward has to return a number.*None"):
        steps_of(Kernel, *inputs()).flops()


@pytest.mark.parametrize(
    "target, formula, backward",
    [
        ("kernel", lambda x: 0, None),
        (torch.nn.Linear, lambda x: 0, None),
        ("my::kernel", 12, None),
        ("my::kernel", lambda x: 0, lambda x: 0),
    ],
)
def test_a_wrong_registration_is_refused_at_once(target: Any, formula: Any, backward: Any) -> None:
    with pytest.raises(UsageError, match=r"^register_flops: .{10,}"):
        lm_profiler.register_flops(target, formula, backward)

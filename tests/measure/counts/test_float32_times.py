"""Operators in half precision are repeated in float32, and nothing in the program changes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trial_clock import clock_of

from lm_profiler.measure.counts.float32_times import float32_share
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

ATEN = torch.ops.aten
LONG_S = 1e-3


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def share_of(trials: OperatorTrials, operator: Any, *args: Any, seconds: float = LONG_S, **kwargs: Any) -> float | None:
    result = operator(*args, **kwargs)
    name = operator.name().partition(".")[0]
    return float32_share(TimedCall(name, operator, args, kwargs, result, seconds), trials)


def test_the_fastest_repetitions_are_compared_once_per_shape() -> None:
    trials = OperatorTrials(clock_of(3e-3, 0.5e-3, 2e-3, 1e-3, 4e-3, 1e-3))
    for _ in range(2):
        assert share_of(trials, ATEN.mm.default, half(4, 8), half(8, 4)) == pytest.approx(0.25)


def test_a_new_shape_is_measured_anew() -> None:
    trials = OperatorTrials(clock_of(*[1e-3] * 6, *[1e-3, 3e-3] * 3))
    assert share_of(trials, ATEN.mm.default, half(4, 8), half(8, 4)) == pytest.approx(1.0)
    assert share_of(trials, ATEN.mm.default, half(4, 8), half(8, 9)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "operator, args",
    [
        (ATEN.mm.default, [torch.ones(4, 8), torch.ones(8, 4)]),  # float32
        (ATEN.mul_.Tensor, [half(4), half(4)]),  # changes an argument
        (ATEN.bernoulli.default, [half(4)]),  # draws random numbers
    ],
)
def test_other_operators_are_not_repeated(operator: Any, args: list[Tensor]) -> None:
    assert share_of(OperatorTrials(clock_of()), operator, *args) is None


@pytest.mark.parametrize("seconds", [1e-6, 10.0], ids=["short", "too long"])
def test_an_operator_that_is_short_or_takes_too_long_is_not_repeated(seconds: float) -> None:
    assert share_of(OperatorTrials(clock_of()), ATEN.mm.default, half(4, 8), half(8, 4), seconds=seconds) is None


@pytest.mark.parametrize(
    "source, dtype, share",
    [
        (half(4), torch.float32, 0.0),
        (torch.ones(4), torch.float16, 0.0),
        (torch.ones(4), torch.float64, None),
        (torch.ones(4, dtype=torch.int64), torch.bfloat16, None),
    ],
)
def test_float32_needs_no_conversions(source: Tensor, dtype: torch.dtype, share: float | None) -> None:
    assert share_of(OperatorTrials(clock_of()), ATEN._to_copy.default, source, dtype=dtype) == share

"""Convolutions on patches that do not overlap are repeated as linear layers, which compute the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from trial_clock import clock_of

from lm_profiler.analysis.dataflow.needless_operators import needless_operators
from lm_profiler.measure.counts.fourier_times import fourier_share
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall, Trial
from lm_profiler.measure.counts.patch_times import linear_share
from lm_profiler.record.operator_calls import OperatorCall, StepCalls

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default


def settings(
    *strides: int, padding: int = 0, dilation: int = 1, transposed: bool = False, groups: int = 1
) -> list[Any]:
    """The arguments of a convolution behind its bias."""
    dimensions = len(strides)
    return [list(strides), [padding] * dimensions, [dilation] * dimensions, transposed, [0] * dimensions, groups]


def call_of_10_ms(operator: Any, args: Sequence[Any]) -> TimedCall:
    return TimedCall(operator.name().partition(".")[0], operator, tuple(args), {}, operator(*args), 10e-3)


class CheckedTrials(OperatorTrials):
    """Instead of timing the operators, compares their results."""

    def repeat(
        self,
        call: TimedCall,
        changed_tensor: Callable[[Tensor], Tensor],
        changed_operator: Callable[..., Any] | None = None,
    ) -> Trial:
        assert changed_operator is not None
        torch.testing.assert_close(changed_operator(*call.args), call.result)
        return Trial(4e-3, 1e-3)


PATCHES = {
    "of a series": ((3, 2, 12), (5, 2, 4), settings(4)),
    "of pictures": ((3, 2, 8, 12), (5, 2, 4, 3), settings(4, 3)),
    "of videos": ((2, 2, 4, 6, 8), (5, 2, 2, 3, 4), settings(2, 3, 4)),
    "that are cut already": ((6, 2, 2, 3, 4), (5, 2, 2, 3, 4), settings(2, 3, 4)),
    "of one place, which needs no stride": ((6, 2, 4, 3), (5, 2, 4, 3), settings(1, 1)),
}


@pytest.mark.parametrize("case", PATCHES)
def test_a_linear_layer_computes_the_same_on_patches(case: str) -> None:
    torch.manual_seed(0)
    image_shape, weight_shape, options = PATCHES[case]
    images, weight, bias = (
        torch.rand(shape, dtype=torch.float64) for shape in (image_shape, weight_shape, weight_shape[:1])
    )
    forward = call_of_10_ms(CONVOLUTION, [images, weight, bias, *options])
    assert linear_share(forward, CheckedTrials()) == pytest.approx(0.7)
    gradient = torch.rand_like(forward.result)
    for are_needed in ([True, True, True], [False, True, False]):
        backward = call_of_10_ms(BACKWARD, [gradient, images, weight, [5], *options, are_needed])
        assert linear_share(backward, CheckedTrials()) == pytest.approx(0.7)


OTHERS = {
    "overlapping patches": ((3, 2, 12), (5, 2, 4), settings(2)),
    "gaps between patches": ((3, 2, 12), (5, 2, 2), settings(4)),
    "a rest that is in no patch": ((3, 2, 13), (5, 2, 4), settings(4)),
    "padding": ((3, 2, 14), (5, 2, 4), settings(4, padding=1)),
    "dilation": ((3, 2, 12), (5, 2, 4), settings(4, dilation=2)),
    "groups": ((3, 2, 12), (6, 1, 4), settings(4, groups=2)),
    "a transposed convolution": ((3, 2, 12), (2, 5, 4), settings(4, transposed=True)),
    "a kernel of one element": ((3, 2, 12), (5, 2, 1), settings(1)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_are_not_repeated(case: str) -> None:
    image_shape, weight_shape, options = OTHERS[case]
    call = call_of_10_ms(CONVOLUTION, [torch.rand(image_shape), torch.rand(weight_shape), None, *options])
    assert linear_share(call, CheckedTrials()) is None


LONG_KERNELS = {
    "in groups, with padding": ((3, 4, 300), (6, 2, 70), settings(1, padding=5, groups=2)),
    "of each channel": ((2, 8, 100), (8, 1, 64), settings(1, groups=8)),
    "on pictures": ((2, 3, 40, 30), (5, 3, 9, 8), settings(1, 1, padding=4)),
    "as long as the signal": ((2, 3, 80), (5, 3, 80), settings(1)),
    "longer than the signal without its padding": ((1, 2, 50), (2, 2, 64), settings(1, padding=40)),
}


@pytest.mark.parametrize("case", LONG_KERNELS)
def test_fft_computes_the_same_as_a_convolution_with_a_long_kernel(case: str) -> None:
    torch.manual_seed(0)
    signal_shape, weight_shape, options = LONG_KERNELS[case]
    signals, weight, bias = (
        torch.rand(shape, dtype=torch.float64) for shape in (signal_shape, weight_shape, weight_shape[:1])
    )
    forward = call_of_10_ms(CONVOLUTION, [signals, weight, bias, *options])
    assert fourier_share(forward, CheckedTrials()) == pytest.approx(0.7)
    gradient = torch.rand_like(forward.result)
    for are_needed in ([True, True, True], [False, True, False]):
        backward = call_of_10_ms(BACKWARD, [gradient, signals, weight, [len(weight)], *options, are_needed])
        assert fourier_share(backward, CheckedTrials()) == pytest.approx(0.7)


@pytest.mark.parametrize(
    "kernel, options",
    [
        (63, settings(1)),
        (64, settings(2)),
        (64, settings(1, dilation=2)),
        (64, settings(1, transposed=True)),
    ],
)
def test_convolutions_that_skip_places_or_have_short_kernels_are_not_repeated_by_fft(
    kernel: int, options: list[Any]
) -> None:
    call = call_of_10_ms(CONVOLUTION, [torch.rand(3, 2, 200), torch.rand(2, 2, kernel), None, *options])
    assert fourier_share(call, CheckedTrials()) is None


def test_kernels_that_would_take_much_memory_are_not_transformed() -> None:
    """300 x 300 kernels of 64 elements over 64 places: 5.8 million elements of 8 bytes."""
    call = call_of_10_ms(CONVOLUTION, [torch.rand(1, 300, 64), torch.rand(300, 300, 64), None, *settings(1)])
    assert fourier_share(call, CheckedTrials()) is None


def test_a_convolution_is_timed_in_both_forms() -> None:
    """The fastest of 4, 5 and 6 ms as it is, and of 3, 2 and 4 ms as a linear layer: that saves 2 of 10 ms."""
    call = call_of_10_ms(CONVOLUTION, [torch.rand(3, 2, 12), torch.rand(5, 2, 4), None, *settings(4)])
    trials = OperatorTrials(clock_of(4e-3, 3e-3, 5e-3, 2e-3, 6e-3, 4e-3))
    assert linear_share(call, trials) == pytest.approx(0.8)


@pytest.mark.parametrize("reason, field", [("patches", "linear_share"), ("fourier", "fourier_share")])
@pytest.mark.parametrize(
    "forward_share, backward_share, saved",
    [(0.2, 0.4, {"forward": 0.8, "backward": 0.6}), (1.3, 0.1, {"forward": -0.3, "backward": 0.9}), (1.2, 0.5, {})],
)
def test_a_layer_is_reported_if_both_of_its_passes_together_gain_a_quarter(
    forward_share: float, backward_share: float, saved: dict[str, float], reason: str, field: str
) -> None:
    layer: dict[str, Any] = {"seconds": 1.0, "reads": (0,), "elements": 8192, "size": 8192, "is_host_read": True}
    calls = [
        OperatorCall(name="aten::convolution", phase="forward", writes=(1,), **{field: forward_share}, **layer),
        OperatorCall(
            name="aten::convolution_backward",
            phase="backward",
            forward=0,
            writes=(2,),
            **{field: backward_share},
            **layer,
        ),
    ]
    found = [entry.phase_shares for entry in needless_operators(StepCalls(calls=calls)) if entry.reason == reason]
    assert found == ([pytest.approx(saved)] if saved else [])

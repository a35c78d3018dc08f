"""Convolutions of images are repeated with channels last."""

import signal
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from trial_clock import clock_of

from lm_profiler.measure.counts.layout_times import channels_last_share
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default
NORMALIZATION = torch.ops.aten.native_batch_norm.default
IMAGES, RESULTS, WEIGHT = torch.ones(2, 3, 8, 8), torch.ones(2, 6, 8, 8), torch.ones(6, 3, 3, 3)
OPTIONS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups
OPTIONS_OF_SEQUENCES = ([1], [1], [1], False, [0], 1)


def channels_last(images: Tensor) -> Tensor:
    return images.to(memory_format=torch.channels_last)


def share_of_10_ms(operator: Any, args: tuple[Any, ...], trials: OperatorTrials) -> float | None:
    """The share of its 10 ms that an operator would take with channels last."""
    name = operator.name().partition(".")[0]
    return channels_last_share(TimedCall(name, operator, args, {}, operator(*args), 10e-3), trials)


@pytest.mark.parametrize(
    "operator, args, repetitions_s, share",
    [
        # the fastest of 4, 5 and 6 ms as it is, and of 3, 2 and 4 ms with the other layout: it saves 2 of 10 ms
        (CONVOLUTION, (IMAGES, WEIGHT, None, *OPTIONS), [4e-3, 3e-3, 5e-3, 2e-3, 6e-3, 4e-3], 0.8),
        (BACKWARD, (RESULTS, IMAGES, WEIGHT, None, *OPTIONS, [True, True, False]), [1e-3, 2e-3] * 3, 1.1),
        # kernels for mixed layouts are slow
        (
            BACKWARD,
            (channels_last(RESULTS), IMAGES, WEIGHT, None, *OPTIONS, [True, True, False]),
            [9e-3, 1e-3] * 3,
            0.2,
        ),
        # images that have the layout, and sequences, which have one alone
        (CONVOLUTION, (channels_last(IMAGES), WEIGHT, None, *OPTIONS), [], None),
        (CONVOLUTION, (torch.ones(2, 3, 8), torch.ones(6, 3, 3), None, *OPTIONS_OF_SEQUENCES), [], None),
    ],
)
def test_a_convolution_is_compared_with_one_of_the_other_layout(
    operator: Any, args: tuple[Any, ...], repetitions_s: list[float], share: float | None
) -> None:
    trials = OperatorTrials(clock_of(*repetitions_s))
    assert share_of_10_ms(operator, args, trials) == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize("room_bytes, share", [(0, None), (1 << 30, 0.8)])
def test_large_images_are_repeated_only_below_the_peak_of_the_process(room_bytes: int, share: float | None) -> None:
    """Copies of 12 MiB of images, and of twice that as the result, take 84 MiB at most."""
    trials = OperatorTrials(clock_of(*[4e-3, 2e-3] * 3), get_free_bytes=lambda: room_bytes)
    args = (torch.ones(1, 3, 1024, 1024), WEIGHT, None, *OPTIONS)
    assert share_of_10_ms(CONVOLUTION, args, trials) == (None if share is None else pytest.approx(share))


def test_repeated_normalization_leaves_the_running_mean_as_it_was() -> None:
    """The operator changes it, although its schema does not say so."""
    mean, variance = torch.zeros(3), torch.ones(3)
    args = (IMAGES, None, None, mean, variance, True, 0.1, 1e-5)
    call = TimedCall("aten::native_batch_norm", NORMALIZATION, args, {}, IMAGES, 10e-3)
    assert channels_last_share(call, OperatorTrials(clock_of(*[1e-3] * 6))) == pytest.approx(1.0)
    assert mean.tolist() == [0.0] * 3
    assert variance.tolist() == [1.0] * 3


def test_what_a_signal_handler_of_the_program_raises_reaches_the_program() -> None:
    def clock() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 0

    def end(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("the job is preempted")

    usual = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(RuntimeError, match="preempted"):
            share_of_10_ms(CONVOLUTION, (IMAGES, WEIGHT, None, *OPTIONS), OperatorTrials(clock))
    finally:
        signal.signal(signal.SIGUSR1, usual)

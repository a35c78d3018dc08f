"""Convolutions of images are repeated with channels last."""

import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch import Tensor

from lm_profiler.measure.counts.layout_times import channels_last_share
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default
CHANNELS_LAST = torch.channels_last
OPTIONS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


LONG_S = 10e-3


def clock_of(*seconds: float) -> Callable[[], int]:
    """Return a clock by which one repetition after another takes so many ``seconds``."""

    def instants_ns() -> Iterator[int]:
        for duration_s in seconds:
            yield 0
            yield round(duration_s * 1e9)

    return instants_ns().__next__


def share_of_convolution(images: Tensor, trials: OperatorTrials) -> float | None:
    args = (images, torch.ones(6, 3, 3, 3), None, *OPTIONS)
    call = TimedCall("aten::convolution", CONVOLUTION, args, {}, CONVOLUTION(*args), LONG_S)
    return channels_last_share(call, trials)


def test_a_convolution_is_compared_with_one_of_the_other_layout() -> None:
    """Of 10 ms, it saves 2; the fastest repetitions count."""
    trials = OperatorTrials(clock_of(4e-3, 3e-3, 5e-3, 2e-3, 6e-3, 4e-3))
    assert share_of_convolution(torch.ones(2, 3, 8, 8), trials) == pytest.approx(0.8)


@pytest.mark.parametrize("room_bytes, share", [(0, None), (1 << 30, 0.8)])
def test_large_images_are_repeated_only_below_the_peak_of_the_process(room_bytes: int, share: float | None) -> None:
    """Copies of 12 MiB of images, and of twice that as the result, take 84 MiB at most."""
    clock = clock_of(*[4e-3, 2e-3] * 3)
    images = torch.ones(1, 3, 1024, 1024)
    found = share_of_convolution(images, OperatorTrials(clock, room=lambda: room_bytes))
    assert found == (None if share is None else pytest.approx(share))


def test_images_with_channels_last_are_not_repeated() -> None:
    images = torch.ones(2, 3, 8, 8).to(memory_format=CHANNELS_LAST)
    assert share_of_convolution(images, OperatorTrials(clock_of())) is None


def test_the_backward_pass_is_compared_too() -> None:
    gradients = torch.ones(2, 6, 8, 8)
    images, weight = torch.ones(2, 3, 8, 8), torch.ones(6, 3, 3, 3)
    args = (gradients, images, weight, None, *OPTIONS, [True, True, False])
    call = TimedCall("aten::convolution_backward", BACKWARD, args, {}, BACKWARD(*args), LONG_S)
    trials = OperatorTrials(clock_of(*[1e-3, 2e-3] * 3))
    assert channels_last_share(call, trials) == pytest.approx(1.1)


def test_a_gradient_that_has_another_layout_than_the_images_is_repeated() -> None:
    """Kernels for mixed layouts are slow."""
    images = torch.ones(2, 3, 8, 8)
    gradients = torch.ones(2, 6, 8, 8).to(memory_format=CHANNELS_LAST)
    args = (gradients, images, torch.ones(6, 3, 3, 3), None, *OPTIONS, [True, True, False])
    call = TimedCall("aten::convolution_backward", BACKWARD, args, {}, BACKWARD(*args), LONG_S)
    assert channels_last_share(call, OperatorTrials(clock_of(*[9e-3, 1e-3] * 3))) == pytest.approx(0.2)


def test_repeated_normalization_leaves_the_running_mean_as_it_was() -> None:
    """The operator changes it, although its schema does not say so."""
    operator = torch.ops.aten.native_batch_norm.default
    mean, variance = torch.zeros(3), torch.ones(3)
    args = (torch.ones(2, 3, 8, 8), None, None, mean, variance, True, 0.1, 1e-5)
    call = TimedCall("aten::native_batch_norm", operator, args, {}, torch.ones(2, 3, 8, 8), LONG_S)
    assert channels_last_share(call, OperatorTrials(clock_of(*[1e-3] * 6))) == pytest.approx(1.0)
    assert mean.tolist() == [0.0] * 3
    assert variance.tolist() == [1.0] * 3


def test_a_convolution_of_sequences_has_one_layout() -> None:
    args = (torch.ones(2, 3, 8), torch.ones(6, 3, 3), None, [1], [1], [1], False, [0], 1)
    call = TimedCall("aten::convolution", CONVOLUTION, args, {}, CONVOLUTION(*args), LONG_S)
    assert channels_last_share(call, OperatorTrials(clock_of())) is None


def test_what_a_signal_handler_of_the_program_raises_reaches_the_program() -> None:
    def clock() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 0

    def end(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("the job is preempted")

    usual = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(RuntimeError, match="preempted"):
            share_of_convolution(torch.ones(2, 3, 8, 8), OperatorTrials(clock))
    finally:
        signal.signal(signal.SIGUSR1, usual)

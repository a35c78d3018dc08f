"""Times convolutions on a CPU, and their backward passes, in another form that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

_FORWARD = "aten::convolution"
_BACKWARD = "aten::convolution_backward"


class ConvolutionForm(NamedTuple):
    """Another form of some convolutions."""

    # whether the form exists; gets the input, the weight, and the arguments of the convolution behind its bias
    exists: Callable[[Tensor, Tensor, Sequence[Any]], bool]
    forward: Callable[..., Any]  # gets the arguments of the convolution
    backward: Callable[..., Any]  # gets those of its backward pass


def share_in_form(
    form: ConvolutionForm, call: TimedCall, trials: OperatorTrials
) -> float | None:
    """Return the time of a convolution, or of its backward pass, in another form, as a share of its time.

    None for other calls and devices, if the form does not exist, and if the time is unknown.
    """
    if call.kwargs:  # torch itself passes all arguments by their positions
        return None
    if call.name == _FORWARD:
        inputs, weight, _, *settings = call.args
        operator = form.forward
    elif call.name == _BACKWARD:
        _, inputs, weight, _, *settings = call.args
        operator = form.backward
    else:
        return None
    if inputs.device.type != "cpu" or not form.exists(inputs, weight, settings):
        return None
    trial = trials.repeat(call, _unchanged, changed_operator=operator)
    return None if trial is None else trial.changed_share(call)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor

"""Finds operators on images on a CPU that would be faster if the channels of images came last in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

_BACKWARD = "_backward"
# the operators whose kernels depend on the layout; elementwise operators take as long in either
_OPERATORS = (
    "aten::convolution",
    "aten::native_batch_norm",
    "aten::native_group_norm",
    "aten::max_pool2d_with_indices",
    "aten::avg_pool2d",
    "aten::_adaptive_avg_pool2d",
    "aten::upsample_nearest2d",
    "aten::upsample_bilinear2d",
)
_IMAGE_DIMENSIONS = 4  # samples, channels, height and width


def channels_last_share(call: TimedCall, trials: OperatorTrials) -> float | None:
    """Return the time of an operator whose images are ``channels_last`` as a share of its time.

    None for operators whose kernel does not depend on the layout, for images that are all ``channels_last`` already,
    and if the time is unknown.
    """
    is_backward = call.name.endswith(_BACKWARD)
    if call.name.removesuffix(_BACKWARD) not in _OPERATORS:
        return None
    # A backward pass gets the gradient of the result, and the input.
    images = call.inputs()[: 2 if is_backward else 1]
    are_on_cpu = all(tensor.device.type == "cpu" for tensor in images)
    has_other_layout = any(map(_has_channels_first, images))
    if not are_on_cpu or not has_other_layout:
        return None
    trial = trials.repeat(call, _with_channels_last)
    return None if trial is None else trial.changed_share(call)


def _has_channels_first(tensor: Tensor) -> bool:
    is_image = tensor.dim() == _IMAGE_DIMENSIONS
    return is_image and not tensor.is_contiguous(memory_format=torch.channels_last)


def _with_channels_last(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy of it with channels last if it has the dimensions of images."""
    if tensor.dim() == _IMAGE_DIMENSIONS:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor

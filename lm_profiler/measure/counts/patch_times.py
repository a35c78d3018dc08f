"""Finds convolutions on a CPU that a linear layer would compute faster, because their patches do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional

from lm_profiler.measure.counts.convolution_trials import (
    ConvolutionForm,
    share_in_form,
)
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall


def linear_share(call: TimedCall, trials: OperatorTrials) -> float | None:
    """Return the time of a linear layer in place of a convolution, or of its backward pass, as a share of its time.

    Cutting the patches and putting them together is included. None for other calls and devices, for patches that
    overlap or have a single element, and if the time is unknown.
    """
    form = ConvolutionForm(_cuts_patches, _linear, _linear_backward)
    return share_in_form(form, call, trials)


def _cuts_patches(images: Tensor, weight: Tensor, settings: Sequence[Any]) -> bool:
    """Return whether a convolution with ``settings`` cuts ``images`` into patches as large as its kernel."""
    strides, padding, dilation, is_transposed, _, groups = settings[:6]
    kernel = weight.shape[2:]
    sizes = images.shape[2:]
    is_plain = not is_transposed and groups == 1 and len(strides) == len(kernel)
    if not is_plain or any(padding) or set(dilation) != {1} or prod(kernel) == 1:
        return False
    for size, length, stride in zip(sizes, kernel, strides, strict=True):
        # the stride does not matter if one patch is as long as the image
        if size != length and (stride != length or size % length != 0):
            return False
    return True


def _linear(images: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """Return the result of the convolution, computed by a linear layer from the patches of ``images``."""
    samples = len(images)
    channels = len(weight)  # of the result
    counts = _patch_counts(images, weight)
    patches = _patches(images, weight)
    results = functional.linear(patches, weight.flatten(1), bias)
    results = results.view(samples, prod(counts), channels)
    return results.transpose(1, 2).reshape(samples, channels, *counts)


def _linear_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, *settings: Any
) -> list[Tensor | None]:
    """Return the gradients of images, weight and bias, as the backward pass of the convolution does."""
    needs_images, needs_weight, needs_bias = settings[-1]
    rows = gradient.flatten(2).transpose(1, 2).flatten(0, 1)
    gradients: list[Tensor | None] = [None, None, None]
    if needs_images:
        gradients[0] = _joined_patches(rows @ weight.flatten(1), images, weight)
    if needs_weight:
        gradients[1] = (rows.t() @ _patches(images, weight)).view_as(weight)
    if needs_bias:
        gradients[2] = rows.sum(0)
    return gradients


def _patch_counts(images: Tensor, weight: Tensor) -> list[int]:
    """Return how many patches there are along each dimension of an image."""
    lengths = zip(images.shape[2:], weight.shape[2:], strict=True)
    return [size // length for size, length in lengths]


def _patches(images: Tensor, weight: Tensor) -> Tensor:
    """Return the patches of ``images`` as rows, ordered by image and place."""
    is_one_patch = images.shape[1:] == weight.shape[1:]
    if is_one_patch:
        return images.flatten(1)
    # samples, channels, and for each dimension of an image: the number of patches, and the length of a patch
    divided_shape = [*images.shape[:2]]
    counts = _patch_counts(images, weight)
    for count, length in zip(counts, weight.shape[2:], strict=True):
        divided_shape.append(count)
        divided_shape.append(length)
    divided = images.reshape(divided_shape)
    dimensions_of_counts = range(2, divided.dim(), 2)
    dimensions_of_lengths = range(3, divided.dim(), 2)
    patches = divided.permute(0, *dimensions_of_counts, 1, *dimensions_of_lengths)
    return patches.reshape(-1, weight[0].numel())


def _joined_patches(patches: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """Undo ``_patches``: return ``patches`` joined to a tensor of the shape of ``images``."""
    is_one_patch = images.shape[1:] == weight.shape[1:]
    if is_one_patch:
        return patches.view(images.shape)
    # samples, the numbers of patches, channels, the lengths of a patch
    counts = _patch_counts(images, weight)
    divided = patches.view(len(images), *counts, *weight.shape[1:])
    channels = 1 + len(counts)
    dimensions_of_counts = range(1, channels)
    dimensions_of_lengths = range(channels + 1, divided.dim())
    order = [0, channels]
    for count, length in zip(dimensions_of_counts, dimensions_of_lengths, strict=True):
        order += [count, length]
    return divided.permute(order).reshape(images.shape)

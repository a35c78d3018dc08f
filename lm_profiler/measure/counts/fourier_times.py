"""Finds convolutions with long kernels on a CPU that would be faster by the fast Fourier transform (FFT)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lm_profiler.measure.counts.convolution_trials import (
    ConvolutionForm,
    share_in_form,
)
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

_LEAST_KERNEL = 64  # elements; shorter kernels gain nothing
_MOST_DIMENSIONS = 2  # of a signal or an image
# The transformed kernels may have this many elements, of 8 or 16 bytes: with many channels they take far more memory
# than the kernels, and the trial runs in the training.
_MOST_TRANSFORMED = 1 << 22
# libraries for FFT are fast for sizes with small prime factors only
_SMALL_PRIMES = (2, 3, 5)


def fourier_share(call: TimedCall, trials: OperatorTrials) -> float | None:
    """Return the time of a convolution, or of its backward pass, by FFT as a share of its time.

    None for other calls and devices, for short kernels, strides and dilation, and if the time is unknown.
    """
    form = ConvolutionForm(_has_long_kernel, _convolution, _convolution_backward)
    return share_in_form(form, call, trials)


def _has_long_kernel(signals: Tensor, weight: Tensor, settings: Sequence[Any]) -> bool:
    """Return whether a convolution with ``settings`` has a long kernel, and visits each place of ``signals``.

    Kernels that take too much memory when they are transformed do not count.
    """
    strides, padding, dilation, is_transposed, _, _ = settings[:6]
    dimensions = weight.dim() - 2
    is_plain = not is_transposed and set(strides) == {1} and set(dilation) == {1}
    # FFT has no kernels for half precision on a CPU
    has_precision = signals.dtype in (torch.float32, torch.float64)
    is_long = prod(weight.shape[2:]) >= _LEAST_KERNEL
    if not is_plain or not has_precision or not is_long:
        return False
    transformed = prod(weight.shape[:2]) * prod(_fast_sizes(signals, padding))
    return dimensions <= _MOST_DIMENSIONS and transformed <= _MOST_TRANSFORMED


def _convolution(
    signals: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
) -> Tensor:
    """Return the result of the convolution, computed by FFT."""
    padding, groups = settings[1], settings[5]
    sizes = _fast_sizes(signals, padding)
    spectrum = _grouped(_spectrum(signals, sizes), groups, dimension=1)
    kernels = _grouped(_spectrum(weight, sizes), groups, dimension=0)
    # samples (b), groups (g), channels of the result (o) and of the signals (i)
    product = torch.einsum("bgi...,goi...->bgo...", spectrum, kernels.conj())
    correlation = _inverse(product.flatten(1, 2), sizes)
    result = _cut(
        correlation,
        starts=[-pad for pad in padding],
        lengths=_result_sizes(signals, weight, padding),
    )
    if bias is None:
        return result
    return result + bias.view(-1, *[1] * (weight.dim() - 2))


def _convolution_backward(
    gradient: Tensor, signals: Tensor, weight: Tensor, *settings: Any
) -> list[Tensor | None]:
    """Return the gradients of signals, weight and bias, as the backward pass of the convolution does."""
    _, _, padding, _, _, _, groups, needed = settings
    needs_signals, needs_weight, needs_bias = needed
    sizes = _fast_sizes(signals, padding)
    of_result = _grouped(_spectrum(gradient, sizes), groups, dimension=1)
    gradients: list[Tensor | None] = [None, None, None]
    if needs_signals:
        kernels = _grouped(_spectrum(weight, sizes), groups, dimension=0)
        product = torch.einsum("bgo...,goi...->bgi...", of_result, kernels)
        whole = _inverse(product.flatten(1, 2), sizes)
        gradients[0] = _cut(whole, starts=padding, lengths=signals.shape[2:])
    if needs_weight:
        spectrum = _grouped(_spectrum(signals, sizes), groups, dimension=1)
        product = torch.einsum("bgo...,bgi...->goi...", of_result.conj(), spectrum)
        whole = _inverse(product.flatten(0, 1), sizes)
        gradients[1] = _cut(
            whole, starts=[-pad for pad in padding], lengths=weight.shape[2:]
        )
    if needs_bias:
        gradients[2] = gradient.transpose(0, 1).flatten(1).sum(1)
    return gradients


def _result_sizes(signals: Tensor, weight: Tensor, padding: Sequence[int]) -> list[int]:
    sizes = zip(signals.shape[2:], weight.shape[2:], padding, strict=True)
    return [size + 2 * pad - length + 1 for size, length, pad in sizes]


def _fast_sizes(signals: Tensor, padding: Sequence[int]) -> list[int]:
    """Return the sizes of the transform: at least those of the padded signals, so that no end reaches the other one."""
    sizes = []
    for size, pad in zip(signals.shape[2:], padding, strict=True):
        fast_size = size + 2 * pad
        while not _has_small_primes(fast_size):
            fast_size += 1
        sizes.append(fast_size)
    return sizes


def _has_small_primes(size: int) -> bool:
    for prime in _SMALL_PRIMES:
        while size % prime == 0:
            size //= prime
    return size == 1


def _spectrum(signals: Tensor, sizes: Sequence[int]) -> Tensor:
    spectrum: Tensor = torch.fft.rfftn(signals, sizes, dim=_last_dimensions(sizes))
    return spectrum


def _inverse(spectrum: Tensor, sizes: Sequence[int]) -> Tensor:
    signals: Tensor = torch.fft.irfftn(spectrum, sizes, dim=_last_dimensions(sizes))
    return signals


def _last_dimensions(sizes: Sequence[int]) -> list[int]:
    return [*range(-len(sizes), 0)]


def _grouped(tensor: Tensor, groups: int, dimension: int) -> Tensor:
    """Return ``tensor`` with its channels in ``dimension`` divided into groups."""
    grouped: Tensor = tensor.unflatten(dimension, (groups, -1))
    return grouped


def _cut(whole: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return ``lengths`` elements of the last dimensions from ``starts`` on; a negative start counts from the end."""
    dimensions = _last_dimensions(lengths)
    part = whole.roll([-start for start in starts], dimensions)
    for dimension, length in zip(dimensions, lengths, strict=True):
        part = part.narrow(dimension, 0, length)
    return part

"""Finds operators of a CPU that compute in half precision although float32 would make them faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lm_profiler.measure.counts.call_tensors import dense_tensors, leaves
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall

_HALF = (torch.bfloat16, torch.float16)
_CONVERSIONS = ("aten::_to_copy", "aten::copy_")


def float32_share(call: TimedCall, trials: OperatorTrials) -> float | None:
    """Return the time of a call in float32 as a share of its time in half precision.

    0 for a conversion from or to half precision, which would not be needed in float32. None if the call does not
    compute in half precision on a CPU, or if its time is unknown.
    """
    inputs = call.inputs()
    results = dense_tensors([*leaves([call.result])])
    if not inputs or not results:
        return None
    if call.name in _CONVERSIONS:
        source = inputs[-1]  # ``copy_`` has its target before it
        return 0.0 if _converts_half(source, results[0]) else None
    if not has_half_input(inputs):
        return None
    trial = trials.repeat(call, _in_float32)
    if trial is None or trial.usual_s <= 0.0:
        return None
    return trial.changed_s / trial.usual_s


def has_half_input(inputs: Sequence[Tensor]) -> bool:
    """Return whether a call with these ``inputs`` computes in half precision on a CPU."""
    return any(_is_half(tensor) for tensor in inputs)


def _is_half(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _HALF


def _converts_half(source: Tensor, target: Tensor) -> bool:
    """Return whether a copy from ``source`` to ``target`` converts floating-point numbers from or to half precision."""
    are_floats = source.is_floating_point() and target.is_floating_point()
    has_half = _is_half(source) or _is_half(target)
    return are_floats and has_half and source.dtype != target.dtype


def _in_float32(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a float32 copy of it if it is in half precision."""
    return tensor.float() if _is_half(tensor) else tensor

"""Times operators of a CPU that compute in half precision in float32, too, to find those that float32 makes faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm_profiler.measure.counts.call_tensors import (
    changed_arguments,
    dense_tensors,
    leaves,
)

_HALF = (torch.bfloat16, torch.float16)
_CONVERSIONS = ("aten::_to_copy", "aten::copy_")
# Shorter calls are mostly call overhead, which no dtype changes.
_SHORT_S = 50e-6
_TRIALS = 2  # of which the fastest counts
# Times of further operators remain unknown. They are repeated while a step is recorded, which takes that much longer.
_BUDGET_S = 1.0
_MOST_ELEMENTS = 1 << 24  # so that copies in float32 take little memory
_RANDOM = torch.Tag.nondeterministic_seeded
# marked as random, but torch does not call it with dropout
_NEVER_RANDOM = ("aten::_scaled_dot_product_flash_attention_for_cpu",)


class Float32Times:
    """Repeats calls of operators in half precision and in float32; each operator once for each shape of its arguments.

    Args:
        clock: returns nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self._seconds_left = _BUDGET_S
        self._shares: dict[Any, float | None] = {}

    def share(
        self,
        name: str,
        operator: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        seconds: float,
    ) -> float | None:
        """Return the time of a call in float32 as a share of its time in half precision.

        0 for a conversion from or to half precision, which float32 does without. None if the call does not compute in
        half precision on a CPU, takes no time, or cannot be repeated without an effect.

        Args:
            name: of the operator, such as ``aten::mm``.
            operator: the operator.
            args: its positional arguments.
            kwargs: its named arguments.
            result: what it has returned.
            seconds: how long it took.
        """
        inputs = dense_tensors([*leaves(args), *leaves(kwargs.values())])
        results = dense_tensors([*leaves([result])])
        if not inputs or not results:
            return None
        if name in _CONVERSIONS:
            return 0.0 if _converts_half(inputs[-1], results[0]) else None
        has_half_input = any(_is_half(tensor) for tensor in inputs)
        is_short = seconds < _SHORT_S
        is_large = sum(map(Tensor.numel, inputs)) > _MOST_ELEMENTS
        if not has_half_input or is_short or is_large:
            return None
        if not _is_repeatable(name, operator, args, kwargs):
            return None
        key = (operator, _shapes(args), _shapes(sorted(kwargs.items())))
        has_time = 2 * _TRIALS * seconds <= self._seconds_left
        if key not in self._shares and has_time:
            self._shares[key] = self._measured_share(operator, args, kwargs)
        return self._shares.get(key)

    def _measured_share(self, operator: Any, args: Any, kwargs: Any) -> float | None:
        """Return the time of a call in float32 as a share of its time; None if the operator refuses float32."""
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                half_ns = self._least_ns(operator, args, kwargs)
                float32_args, float32_kwargs = _in_float32(args), _in_float32(kwargs)
                float32_ns = self._least_ns(operator, float32_args, float32_kwargs)
        except (RuntimeError, TypeError):
            return None
        return float32_ns / max(half_ns, 1)

    def _least_ns(self, operator: Any, args: Any, kwargs: Any) -> int:
        times_ns = []
        for _ in range(_TRIALS):
            began_ns = self._clock()
            operator(*args, **kwargs)
            times_ns.append(self._clock() - began_ns)
        self._seconds_left -= sum(times_ns) * 1e-9
        return min(times_ns)


def _is_half(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _HALF


def _converts_half(source: Tensor, target: Tensor) -> bool:
    """Return whether a copy from ``source`` to ``target`` converts floating-point numbers from or to half precision."""
    are_floats = source.is_floating_point() and target.is_floating_point()
    has_half = _is_half(source) or _is_half(target)
    return are_floats and has_half and source.dtype != target.dtype


def _is_repeatable(name: str, operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether repeated calls of an operator change nothing, not even the state of a random generator."""
    is_random = _RANDOM in operator.tags and name not in _NEVER_RANDOM
    changed = [*changed_arguments(operator, args, kwargs)]
    return operator.namespace == "aten" and not is_random and not changed


def _in_float32(value: Any) -> Any:
    """Return ``value``, an argument or a collection of them, with float32 copies of tensors in half precision."""
    if isinstance(value, Tensor):
        return value.float() if _is_half(value) else value
    if isinstance(value, dict):
        return {name: _in_float32(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_in_float32(item) for item in value)
    if value in _HALF:
        return torch.float32
    return value


def _shapes(value: Any) -> Any:
    """Return ``value``, an argument or a collection of arguments, with the shapes of tensors in their place."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(item) for item in value)
    return str(value)

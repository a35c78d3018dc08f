"""Repeats operators of a recorded step in another form, such as with float32 copies, to find which way is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm_profiler.measure.boundary import comes_from_outside
from lm_profiler.measure.counts.call_tensors import (
    changed_arguments,
    dense_tensors,
    has_sparse,
    is_dense,
    leaves,
    sparse_matrices,
)
from lm_profiler.measure.memory.peaks import bytes_below_peak

# Shorter calls are mostly call overhead, which no argument changes.
_SHORT_S = 50e-6
_TRIALS = 3  # repetitions, of which the fastest counts
# All repetitions together may take this long, because they lengthen the recorded step. Then no more are made.
_BUDGET_S = 1.0
# Larger copies must fit below the peak memory of the process, which is a figure of the run and must not grow by them.
# Smaller ones mostly reuse memory that the C library holds.
_SMALL_BYTES = 32 << 20
_RANDOM = (
    torch.Tag.nondeterministic_seeded
)  # torch's mark of operators that use random numbers
# products that may be repeated with a sparse matrix; it is unknown whether other operators change theirs
SPARSE_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_sparse_addmm")
# marked as random because of its dropout, with which torch never calls it
_NEVER_RANDOM = ("aten::_scaled_dot_product_flash_attention_for_cpu",)


class TimedCall(NamedTuple):
    """A call of an operator that has returned."""

    name: str  # such as ``aten::mm``
    operator: Any
    args: Any
    kwargs: Any
    result: Any
    seconds: float

    def arguments(self) -> list[Any]:
        """Return all arguments, with lists replaced by their elements."""
        return [*leaves(self.args), *leaves(self.kwargs.values())]

    def inputs(self) -> list[Tensor]:
        """Return the dense tensors among the arguments."""
        return dense_tensors(self.arguments())


class Trial(NamedTuple):
    """The seconds of a call in the fastest repetition."""

    usual_s: float
    changed_s: float  # with changed tensors, or by another operator

    def changed_share(self, call: TimedCall) -> float:
        """Return the time that ``call`` itself would take if it was changed, as a share of its time.

        A repetition finds its memory in use. What new memory costs the call stays the same if it is changed.
        """
        saved_s = self.usual_s - self.changed_s
        return 1.0 - saved_s / call.seconds


class OperatorTrials:
    """Repeats calls of operators on the CPU; each operator once for each shape of its arguments and each change.

    Args:
        clock: returns nanoseconds.
        get_free_bytes: returns how many bytes copies may take without raising the peak memory of the process.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.thread_time_ns,
        get_free_bytes: Callable[[], int] = bytes_below_peak,
    ) -> None:
        self._clock = clock
        self._get_free_bytes = get_free_bytes
        self._seconds_left = _BUDGET_S
        self._trials: dict[Any, Trial | None] = {}

    def repeat(
        self,
        call: TimedCall,
        changed_tensor: Callable[[Tensor], Tensor],
        changed_operator: Callable[..., Any] | None = None,
    ) -> Trial | None:
        """Return the seconds of ``call`` as it is and changed; measured once for each shape of its arguments.

        None if the call is short, takes more time or memory than is left, cannot be repeated without an effect, or
        refuses the changed tensors.

        Args:
            call: the call of the program.
            changed_tensor: returns what replaces a tensor among the arguments.
            changed_operator: gets the changed arguments; None: the operator of ``call``.
        """
        if call.seconds < _SHORT_S or not _is_repeatable(call):
            return None
        if _bytes_of_copies(call) > max(_SMALL_BYTES, self._get_free_bytes()):
            return None
        shapes = _shapes(call.args), _shapes(sorted(call.kwargs.items()))
        key = (changed_tensor, changed_operator, call.operator, shapes)
        calls = 2 * _TRIALS  # half of them changed
        has_time = calls * call.seconds <= self._seconds_left
        if key not in self._trials and has_time:
            self._trials[key] = self._measure(
                call, changed_tensor, changed_operator or call.operator
            )
        return self._trials.get(key)

    def _measure(
        self,
        call: TimedCall,
        changed_tensor: Callable[[Tensor], Tensor],
        changed_operator: Callable[..., Any],
    ) -> Trial | None:
        """Return the least seconds of ``_TRIALS`` repetitions; None if the operator refuses the changed tensors."""
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                # Copies, because some operators change arguments although their schema does not say so, such as
                # native_batch_norm its running mean.
                args = _with_changed_tensors(call.args, _copy)
                kwargs = _with_changed_tensors(call.kwargs, _copy)
                changed_args = _with_changed_tensors(args, changed_tensor)
                changed_kwargs = _with_changed_tensors(kwargs, changed_tensor)
                usual_s, changed_s = math.inf, math.inf
                # in turns, since the speed of a machine drifts
                for _ in range(_TRIALS):
                    usual_s = min(usual_s, self._timed_s(call.operator, args, kwargs))
                    seconds = self._timed_s(
                        changed_operator, changed_args, changed_kwargs
                    )
                    changed_s = min(changed_s, seconds)
        except (RuntimeError, TypeError) as error:
            if comes_from_outside(error):
                raise
            return None
        return Trial(usual_s, changed_s)

    def _timed_s(self, operator: Any, args: Any, kwargs: Any) -> float:
        began_ns = self._clock()
        operator(*args, **kwargs)
        seconds = (self._clock() - began_ns) * 1e-9
        self._seconds_left -= seconds
        return seconds


def _is_repeatable(call: TimedCall) -> bool:
    """Return whether calls with copies of the arguments change nothing, such as the state of a random generator."""
    arguments = call.arguments()
    results = [*leaves([call.result])]
    if has_sparse(results):
        return False
    if has_sparse(arguments) and call.name not in SPARSE_PRODUCTS:
        return False
    is_random = _RANDOM in call.operator.tags and call.name not in _NEVER_RANDOM
    changed = [*changed_arguments(call.operator, call.args, call.kwargs)]
    is_of_torch = call.operator.namespace == "aten"
    return is_of_torch and not is_random and not changed


def _bytes_of_copies(call: TimedCall) -> int:
    """Return at most how much memory the repetition of ``call`` takes.

    It takes a copy of each argument, a changed argument, which is twice as large in float32, and the results.
    """
    arguments_bytes = sum(tensor.untyped_storage().nbytes() for tensor in call.inputs())
    for matrix in sparse_matrices(leaves(call.args)):
        # the numbers of an element's row and column take 8 bytes each
        arguments_bytes += _stored_elements(matrix) * (16 + matrix.element_size())
    results = dense_tensors([*leaves([call.result])])
    result_bytes = sum(tensor.untyped_storage().nbytes() for tensor in results)
    return 3 * arguments_bytes + 2 * result_bytes


def _stored_elements(matrix: Tensor) -> int:
    """Return how many elements a sparse ``matrix`` stores."""
    return int(torch.ops.aten._nnz.default(matrix))


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` with the same strides, even if it is expanded, so that its elements share memory.

    A sparse tensor is not copied: the operators that get one do not change it.
    """
    if not is_dense(tensor):
        return tensor
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _with_changed_tensors(
    value: Any, changed_tensor: Callable[[Tensor], Tensor]
) -> Any:
    """Return ``value``, an argument or a collection of arguments, with each tensor replaced by ``changed_tensor``.

    A dtype becomes the dtype of changed tensors: operators may refuse float32 tensors with a dtype of half precision.
    """
    if isinstance(value, Tensor):
        return changed_tensor(value)
    if isinstance(value, dict):
        return {
            name: _with_changed_tensors(item, changed_tensor)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(
            _with_changed_tensors(item, changed_tensor) for item in value
        )
    if isinstance(value, torch.dtype):
        return changed_tensor(torch.empty(0, dtype=value)).dtype
    return value


def _shapes(value: Any) -> Any:
    """Return ``value``, an argument or a collection of arguments, with each tensor replaced by its shape and layout."""
    if isinstance(value, Tensor) and not is_dense(value):
        return value.shape, value.layout, _stored_elements(value), value.dtype
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(item) for item in value)
    return str(value)

"""Finds modules that are called twice in a step with the same inputs, so that they compute the same again."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lm_profiler.torch_names import WEIGHT_VERSION

# types whose values are compared by ``==``
_PLAIN_TYPES = (bool, int, float, str, type(None))

_UNKNOWN = object()  # stands for an input that may have changed since the call

# calls of a module that are remembered per step; a decoder may call one for each token
_MOST_CALLS = 8


class _Inputs:
    """The inputs of one call. It does not keep tensors alive.

    ``arguments`` holds the positional arguments by position, and the others by name.
    """

    def __init__(self, arguments: Mapping[int | str, Any]) -> None:
        self._references = {}
        for name, value in arguments.items():
            self._references[name] = _reference_to(value)

    def are_inputs_of(self, arguments: Mapping[int | str, Any]) -> bool:
        """Return whether ``arguments`` are the same tensors and equal plain values."""
        if arguments.keys() != self._references.keys():
            return False
        return all(
            _refers_to(self._references[name], value)
            for name, value in arguments.items()
        )


class CallsOfStep:
    """The calls of modules in the running step, by their inputs."""

    def __init__(self) -> None:
        # by module, and whether it was in training mode: in evaluation it computes something else
        self._inputs: defaultdict[tuple[nn.Module, bool], list[_Inputs]] = defaultdict(
            list
        )

    def add(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Note a call of ``module``; return whether the step had an earlier call with the same inputs.

        A tensor that was changed in place in between is another input. Changes through ``Tensor.data`` are not seen
        here; the data flow shows them. An input that is neither a tensor nor a plain value, such as a cache of keys,
        may have changed: a call with such an input never counts as the same.
        """
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        has_tensor = any(isinstance(value, Tensor) for value in arguments.values())
        if not has_tensor:
            return False
        earlier_inputs = self._inputs[module, module.training]
        for inputs in earlier_inputs:
            if inputs.are_inputs_of(arguments):
                return True
        if len(earlier_inputs) < _MOST_CALLS:
            earlier_inputs.append(_Inputs(arguments))
        return False

    def forget_trained(self, optimizer: Any) -> None:
        """Forget the calls of modules whose weights ``optimizer`` has just changed: they compute something else now."""
        ids_of_changed = set[int]()
        for group in optimizer.param_groups:
            ids_of_changed.update(map(id, group["params"]))
        for module, is_training in list(self._inputs):
            if any(id(weight) in ids_of_changed for weight in module.parameters()):
                del self._inputs[module, is_training]

    def clear(self) -> None:
        """Forget all calls, because the next step begins."""
        self._inputs.clear()


class _TensorInput(NamedTuple):
    """A tensor as it was when a module was called with it."""

    tensor: weakref.ref[Tensor]
    # how often it had been changed in place; None if torch does not count that
    version: int | None


def _version_of(tensor: Tensor) -> int | None:
    """Return how often ``tensor`` was changed in place; None for inference tensors, of which it is unknown."""
    if tensor.is_inference():
        return None
    version: int | None = WEIGHT_VERSION.get(tensor)
    return version


def _reference_to(value: Any) -> Any:
    """Return a ``_TensorInput`` for a tensor, a plain value itself, and ``_UNKNOWN`` for anything else."""
    if isinstance(value, Tensor):
        return _TensorInput(weakref.ref(value), _version_of(value))
    if isinstance(value, _PLAIN_TYPES):
        return value
    return _UNKNOWN


def _refers_to(reference: Any, value: Any) -> bool:
    """Return whether ``reference``, made by ``_reference_to``, stands for ``value``."""
    if isinstance(value, Tensor):
        if not isinstance(reference, _TensorInput):
            return False
        is_same_tensor = reference.tensor() is value
        return is_same_tensor and reference.version == _version_of(value)
    if isinstance(value, _PLAIN_TYPES):
        has_same_type = type(reference) is type(value)
        return has_same_type and bool(reference == value)
    return False

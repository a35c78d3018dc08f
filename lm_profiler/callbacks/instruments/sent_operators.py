"""Operators of ``torch.ops`` and ``torch.library`` in what is sent to another process.

They cannot be pickled. The other process finds them by name if it can import what defines them. An operator that the
script itself defines has a stand-in there, which makes the FLOPs unknown if the step calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any

import torch
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # public, not in __all__

from lm_profiler.measure.counts.uncountable import UncountableError

_OPERATOR = type(torch.ops.aten.mm)
_OVERLOAD = type(torch.ops.aten.mm.default)

Reduced = tuple[Callable[..., Any], tuple[str, ...]]


class MissingOperator:
    """Stands for an operator that only the script's own process has."""

    def __init__(self, name: str) -> None:
        self._operator_name = name

    def __getattr__(self, name: str) -> MissingOperator:
        if name.startswith("__"):  # protocols that it lacks
            raise AttributeError(name)
        return self  # an overload of it

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UncountableError(
            f"the step is compiled, and the script itself defines {self._operator_name}: "
            "define it in a module that can be imported"
        )


def reduce_operator(value: Any) -> Reduced | None:
    """Return a function and its arguments that rebuild the operator ``value``; None if it is no operator."""
    if isinstance(value, (_OPERATOR, _OVERLOAD)):
        return _operator_of_torch, (str(value),)
    if not isinstance(value, CustomOpDef):
        return None
    place = _place_in_module(value)
    if place is not None:
        return _custom_operator, place
    name = repr(value).removeprefix("<CustomOpDef(").removesuffix(")>")
    return MissingOperator, (name,)


def _place_in_module(operator: CustomOpDef) -> tuple[str, str] | None:
    """Return the module that defines ``operator`` and its name there; None if no module can be imported that does."""
    for module_name, module in list(sys.modules.items()):
        if getattr(module, "__name__", None) == "__main__":  # by this name or another
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is operator:
                return module_name, name
    return None


def _custom_operator(module_name: str, name: str) -> Any:
    return getattr(import_module(module_name), name)


def _operator_of_torch(path: str) -> Any:
    """Return the operator of ``torch.ops`` at ``path``, such as ``aten.mm.default``."""
    try:
        return reduce(getattr, path.split("."), torch.ops)
    except AttributeError:
        return MissingOperator(path)

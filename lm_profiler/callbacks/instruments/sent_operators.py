"""Pickles operators of ``torch.ops`` and ``torch.library`` for another process.

They cannot be pickled themselves. The other process finds them by name if it can import the module that defines them.
An operator that the script itself defines is replaced by a stand-in, which makes the FLOPs unknown if the step calls
it.
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
    """Stands in for an operator that exists only in the process of the script."""

    def __init__(self, name: str) -> None:
        self._operator_name = name

    def __getattr__(self, name: str) -> MissingOperator:
        is_special_method = name.startswith("__")
        if is_special_method:
            raise AttributeError(name)
        return self  # as an overload of the operator

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise UncountableError: the script that defines the operator cannot be imported here."""
        raise UncountableError(
            f"the step is compiled, and the script itself defines {self._operator_name}: "
            "define it in a module that can be imported"
        )


def reduce_operator(value: Any) -> Reduced | None:
    """Return a function and its arguments that make the operator ``value`` again; None if it is no operator."""
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
    """Return the name of the module that defines ``operator``, and its name there.

    None if it is only in the script, which cannot be imported.
    """
    for module_name, module in list(sys.modules.items()):
        # The script may be in ``sys.modules`` under another name too.
        if getattr(module, "__name__", None) == "__main__":
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

"""Finds the methods by which a program calls its model, if it does not call it as ``model(batch)``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import unwrap
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

from torch import nn


class ModelMethod(NamedTuple):
    """A method of a model's class, or of a base class."""

    kind: type  # the class that defines it
    name: str


def forward_method(module: nn.Module) -> ModelMethod | None:
    """Return the ``forward`` of ``module``; None if it is torch's own, which the model shares with other modules."""
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            return None if _is_of_torch(kind) else ModelMethod(kind, "forward")
    return None


def running_methods(modules: Sequence[nn.Module]) -> list[ModelMethod]:
    """Return the methods of ``modules`` that run now, the innermost first."""
    methods: list[ModelMethod] = []
    for frame, _ in walk_stack(sys._getframe(1)):
        method = _method_of(frame, modules)
        if method is not None:
            methods.append(method)
    return methods


def _method_of(frame: FrameType, modules: Sequence[nn.Module]) -> ModelMethod | None:
    """Return the method that ``frame`` runs, if it is a method of one of ``modules``; None for other functions."""
    code = frame.f_code
    if code.co_argcount == 0:
        return None
    first_argument = frame.f_locals.get(code.co_varnames[0])
    if not any(module is first_argument for module in modules):
        return None
    for kind in type(first_argument).__mro__:
        function = vars(kind).get(code.co_name)
        # A decorated method runs the code of the function that its wrapper calls.
        if callable(function) and getattr(unwrap(function), "__code__", None) is code:
            return None if _is_of_torch(kind) else ModelMethod(kind, code.co_name)
    return None


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"

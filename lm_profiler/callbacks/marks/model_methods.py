"""Finds and marks the methods by which a program calls its model, if it does not call it as ``model(batch)``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from traceback import walk_stack
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.compiler import is_compiling

from lm_profiler.callbacks.marks.torch_hooks import Function
from lm_profiler.measure.boundary import Hook


class ModelMethod(NamedTuple):
    """A method of a model's class, or of a base class."""

    owner: type  # the class that defines it
    name: str


def methods_of(module: nn.Module) -> dict[CodeType, ModelMethod]:
    """Return the methods of ``module`` that can be marked, by the code that they run.

    These are plain functions. What a decorator returns may be called in another way, or have attributes of its own.
    Methods of torch are left out, because the model shares them with other modules.
    """
    methods: dict[CodeType, ModelMethod] = {}
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        for name, function in vars(kind).items():
            if _is_plain_method(name, function):
                methods.setdefault(function.__code__, ModelMethod(kind, name))
    return methods


def _is_plain_method(name: str, function: object) -> bool:
    """Return whether ``function``, the attribute ``name`` of a class, is a method without a decorator."""
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return False
    is_special = name.startswith("__")
    # The code has the name of the decorator's inner function if that does not set ``__wrapped__``.
    return function.__code__.co_name == name and not is_special


def running_methods(
    methods: Mapping[CodeType, ModelMethod],
) -> tuple[ModelMethod, ...]:
    """Return those of ``methods`` that run now, the innermost first.

    A method is recognized by the code of its frame. The frame's local variables are not read: before Python 3.13, that
    would keep them alive until the method returns.
    """
    running: list[ModelMethod] = []
    for frame, _ in walk_stack(sys._getframe(1)):
        method = methods.get(frame.f_code)
        if method is not None:
            running.append(method)
    return tuple(running)


def marked_method(method: Function, begins: Hook, ends: Hook) -> Function:
    """Return ``method`` with ``begins`` called before each call, and ``ends`` after it if ``begins`` returned True.

    It refers to nothing else of ours: cloudpickle copies it with a class of ``__main__``, and copied hooks do nothing.
    """

    def marked(*args: Any, **kwargs: Any) -> Any:
        # Without a positional argument it was called by its class, such as ``Net.loss(self=net)``: that is not marked.
        if is_compiling() or not args or not begins(args[0], args[1:], kwargs):
            return method(*args, **kwargs)
        module, *inputs = args
        try:
            output = method(*args, **kwargs)
        except BaseException:
            ends(module, inputs, None)
            raise
        ends(module, inputs, output)
        return output

    # ``inspect.getfullargspec`` does not follow ``__wrapped__``.
    marked.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return marked

"""A number that nobody knows: what a fake tensor without a value answers when it is asked for it.

It may be kept, added, averaged, logged and printed. Whoever wants to decide by it, or to make something of that size,
is told that he cannot.
"""

from __future__ import annotations

import os
import sys
from numbers import Number
from typing import Any

import torch

from lm_profiler.torch_names import tree_leaves, tree_map

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


class DependsOnValues(Exception):
    """Somebody has asked for what cannot be known without running it."""


TAKEN_FOR_ONE: dict[str, None] = {}
"""Lines that asked ``float`` of a number that nobody knows, in the order in which they did."""

_OURS = (os.path.dirname(__file__), os.path.dirname(torch.__file__))  # noqa: PTH120


class Unknown:
    """One such number, or truth value."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __format__(self, how: str) -> str:
        return "unknown"

    def __repr__(self) -> str:
        return "unknown"

    def _itself(self, *_: Any) -> Unknown:
        return self

    __neg__ = __pos__ = __abs__ = __round__ = __invert__ = item = _itself

    def _asked(self) -> Any:
        raise DependsOnValues

    def __float__(self) -> float:
        """Python takes no other object for one: it is one, and where that was asked is kept."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        TAKEN_FOR_ONE[f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"] = None  # noqa: PTH119
        return 1.0

    __bool__ = __int__ = __index__ = __complex__ = _asked
    __trunc__ = __floor__ = __ceil__ = _asked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operator makes of it takes as many bytes, whatever it is; its value is as unknown."""
        args, kwargs = tree_map(lambda leaf: 1.0 if isinstance(leaf, Unknown) else leaf, (args, kwargs or {}))
        try:
            made = func(*args, **kwargs)
        except TypeError:  # it wants whole numbers, for a size
            raise DependsOnValues from None
        for leaf in tree_leaves(made):
            mode = getattr(leaf, "fake_mode", None)
            if mode is not None:
                mode.forget(leaf)
        return made


def _operator(self: Unknown, other: Any, *_: Any) -> Any:
    return self if isinstance(other, (Number, Unknown)) else NotImplemented


for _name in _ARITHMETIC:
    setattr(Unknown, f"__{_name}__", _operator)
    setattr(Unknown, f"__r{_name}__", _operator)
for _name in _COMPARED:
    setattr(Unknown, f"__{_name}__", _operator)

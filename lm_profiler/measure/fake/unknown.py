"""An unknown number: the answer of a fake tensor without a value that is asked for it.

It can be kept, added, averaged, logged and printed. A branch on it, or a size made from it, raises ``DependsOnValues``.
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
    """Raised where a step asks for a value that cannot be known without running it."""


# lines that called ``float`` on an unknown number, in the order of their calls; the values are not used
TAKEN_FOR_ONE: dict[str, None] = {}

# Frames of these folders are skipped when the line that asked is looked for.
_OURS = (os.path.dirname(__file__), os.path.dirname(torch.__file__))  # noqa: PTH120


class Unknown:
    """An unknown number or truth value."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __format__(self, how: str) -> str:
        return "unknown"

    def __repr__(self) -> str:
        return "unknown"

    def _itself(self, *_: Any) -> Unknown:
        return self

    __neg__ = __pos__ = __abs__ = __round__ = __invert__ = item = _itself

    def _refuse(self) -> Any:
        raise DependsOnValues

    def __float__(self) -> float:
        """Return 1.0, since Python accepts nothing but a float here, and note the line that asked."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        TAKEN_FOR_ONE[f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"] = None  # noqa: PTH119
        return 1.0

    __bool__ = __int__ = __index__ = __complex__ = _refuse
    __trunc__ = __floor__ = __ceil__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` with 1.0 in place of unknowns: the result has the same size, and its value is forgotten."""
        args, kwargs = tree_map(lambda leaf: 1.0 if isinstance(leaf, Unknown) else leaf, (args, kwargs or {}))
        try:
            made = func(*args, **kwargs)
        except TypeError:  # it takes whole numbers, for a size
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

"""Parts of a module's own code that the program marks, such as its loss: a row of their own in the trace's tables.

Imports no torch, so that ``lm_profiler.part`` costs nothing where nothing is profiled. Outside of traced steps a part
does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

PART_TYPE = "part"  # stands where the range of a module has its class

Opener = Callable[[str], AbstractContextManager[Any]]


class _Listener:
    """Opens the ranges of parts while steps are traced."""

    opener: Opener | None = None


_listener = _Listener()


def listen(opener: Opener | None) -> None:
    """Have ``opener`` open the range of each part from now on; None ends it."""
    _listener.opener = opener


class part:
    """Mark code as a part of its own: ``with lm_profiler.part("loss"):``.

    In the tables of a traced step, its work, and that of its backward pass, stands in a row of this name, as that of a
    module does. Without a trace it does nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open_range: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if _listener.opener is None:
            return
        self._open_range = _listener.opener(self.name)
        self._open_range.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._open_range is not None:
            self._open_range.__exit__(*error)
            self._open_range = None

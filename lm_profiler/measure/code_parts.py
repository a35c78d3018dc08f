"""Parts of a module's own code that the program marks, such as its loss: rows of their own in the tables.

Imports no torch, so that ``lm_profiler.part`` costs nothing where nothing is profiled. Outside of steps that are timed
or traced a part does nothing. Code that torch.compile compiles has no parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

PART_TYPE = "part"  # stands where the range of a module has its class

Opener = Callable[[str], AbstractContextManager[Any]]


class Timer(Protocol):
    """Takes the beginnings and ends of parts."""

    @property
    def begin(self) -> Callable[[], Any]:
        """A function that returns the instant at which a part begins."""

    @property
    def end(self) -> Callable[[str, Any], Any]:
        """A function that gets the name of a part that ends, and the instant at which it began."""


class _Listener:
    """What is called when a part begins and ends: a timer in measured steps, an opener of ranges in traced ones."""

    def __init__(self) -> None:
        self.opener: Opener | None = None
        self.timer: Timer | None = None
        # torch.compile traces only the call of this function and reads nothing else of this object, so a new timer or
        # opener causes no recompilation. ``ask_compiler`` replaces it by torch's.
        self.is_compiling: Callable[[], bool] = lambda: False


_listener = _Listener()


def open_ranges_with(opener: Opener | None) -> None:
    """Have ``opener`` open the range of each part from now on; None ends it."""
    _listener.opener = opener


def time_parts(timer: Timer | None) -> None:
    """Have ``timer`` note each part from now on; None ends it."""
    _listener.timer = timer


def ask_compiler(is_compiling: Callable[[], bool]) -> None:
    """Have parts ask ``is_compiling``, torch's, whether torch.compile traces them, in which they do nothing."""
    _listener.is_compiling = is_compiling


class part:
    """Mark code as a part of its own: ``with lm_profiler.part("loss"):``.

    The table of phases has a row for its time in a measured step. In the tables of a traced step its work, and that of
    its backward pass, stands in a row of this name, as that of a module does. In other steps it does nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open_range: AbstractContextManager[Any] | None = None
        self._timer: Timer | None = None
        self._begun: Any = None

    def __enter__(self) -> None:
        if _listener.is_compiling():
            return
        if _listener.opener is not None:
            self._open_range = _listener.opener(self.name)
            self._open_range.__enter__()
        if _listener.timer is not None:
            self._timer = _listener.timer
            self._begun = self._timer.begin()

    def __exit__(self, *error: Any) -> None:
        if self._timer is not None:
            self._timer.end(self.name, self._begun)
            self._timer = None
        if self._open_range is not None:
            self._open_range.__exit__(*error)
            self._open_range = None

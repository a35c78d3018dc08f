"""Lets a program mark parts of its own code, such as its loss, which then have rows of their own in the tables.

This module does not import torch, so that ``lm_profiler.part`` costs nothing if nothing is profiled. A part does
nothing outside of timed and traced steps, and in code that torch.compile compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

PART_TYPE = "part"  # takes the place of a module's class in the name of a part's range

Opener = Callable[[str], AbstractContextManager[Any]]


class Timer(Protocol):
    """Times parts."""

    @property
    def begin(self) -> Callable[[], Any]:
        """A function that returns the instant at which a part begins."""

    @property
    def end(self) -> Callable[[str, Any], Any]:
        """A function that takes the name of a part that ends, and the instant at which it began."""


class _Listener:
    """What parts call when they begin and end: a timer in measured steps, an opener of ranges in traced steps."""

    def __init__(self) -> None:
        self.opener: Opener | None = None
        self.timer: Timer | None = None
        # ``ask_compiler`` replaces it by torch's function. torch.compile only traces the call of this function, and
        # reads nothing else of this object. So a new timer or opener causes no recompilation.
        self.is_compiling: Callable[[], bool] = lambda: False


_listener = _Listener()


def open_ranges_with(opener: Opener | None) -> None:
    """Make ``opener`` open the range of each part from now on; with None, open no ranges any more."""
    _listener.opener = opener


def time_parts(timer: Timer | None) -> None:
    """Make ``timer`` note each part from now on; with None, time no parts any more."""
    _listener.timer = timer


def ask_compiler(is_compiling: Callable[[], bool]) -> None:
    """Make parts do nothing while ``is_compiling`` returns True, because torch.compile traces them."""
    _listener.is_compiling = is_compiling


class part:
    """Mark code as a part of its own: ``with lm_profiler.part("loss"):``.

    The table of phases has a row for its time in a measured step. The tables of a traced step have a row of this name
    for its work and that of its backward pass, as for a module. In other steps it does nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open_range: AbstractContextManager[Any] | None = None
        self._timer: Timer | None = None
        self._begun: Any = None

    def __enter__(self) -> None:
        """Begin the part: open its range in a traced step, note the instant in a measured step."""
        if _listener.is_compiling():
            return
        if _listener.opener is not None:
            self._open_range = _listener.opener(self.name)
            self._open_range.__enter__()
        if _listener.timer is not None:
            self._timer = _listener.timer
            self._begun = self._timer.begin()

    def __exit__(self, *error: Any) -> None:
        """End what ``__enter__`` began, even if the step is no longer measured or traced."""
        if self._timer is not None:
            self._timer.end(self.name, self._begun)
            self._timer = None
        if self._open_range is not None:
            self._open_range.__exit__(*error)
            self._open_range = None

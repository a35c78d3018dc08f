"""Adds our marks to the profiler of the Trainer, which stays the same object.

The program may use ``trainer.profiler`` too: its class, ``summary()``, ``describe()``, its attributes, or another
reference to it. So the object is not replaced. While marks are taken, its class is a subclass of its own class with the
same name, in which ``profile``, ``start`` and ``stop`` are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

_METHODS = ("profile", "start", "stop")

# sets the class of an object even if its own class has a ``__setattr__``
_set_attribute = object.__setattr__


@dataclass(eq=False)
class ProfilerMethods:
    """The methods of a profiler that Lightning calls for its actions."""

    profile: Callable[[str], AbstractContextManager[Any]]
    start: Callable[[str], object]
    stop: Callable[[str], object]


class ProfilerMarks:
    """Gives ``profiler`` our methods between ``install`` and ``remove``.

    ``users_methods`` are its own methods, which copies and pickles of the profiler have too.
    """

    def __init__(self, profiler: Any) -> None:
        self.users_methods = ProfilerMethods(
            profiler.profile, profiler.start, profiler.stop
        )
        self._profiler = profiler
        self._plain_class = type(profiler)
        self._marked_class: type | None = None
        # attributes of the object with the names of methods; they would hide the methods of its class
        self._displaced: dict[str, Any] = {}
        self.are_installed = False  # whether the profiler has our methods

    def prepare(self, methods: ProfilerMethods) -> None:
        """Make the class with our ``methods``."""
        self._marked_class = _subclass(
            self._plain_class, {**vars(methods), "__reduce_ex__": self._reduce_plain()}
        )

    def install(self) -> None:
        """Give the profiler our methods, if it does not have them."""
        if self.are_installed:
            return
        attributes = vars(self._profiler)
        for name in _METHODS:
            if name in attributes:
                self._displaced[name] = attributes.pop(name)
        _set_attribute(self._profiler, "__class__", self._marked_class)
        self.are_installed = True

    def remove(self) -> None:
        """Give the profiler its own methods back."""
        if not self.are_installed:
            return
        _set_attribute(self._profiler, "__class__", self._plain_class)
        self.are_installed = False
        vars(self._profiler).update(self._displaced)
        self._displaced.clear()

    def _reduce_plain(self) -> Callable[[Any, Any], Any]:
        """Return a ``__reduce_ex__`` that copies and pickles the profiler with its own methods."""

        def reduce_plain(profiler: Any, protocol: Any) -> Any:
            self.remove()
            try:
                return profiler.__reduce_ex__(protocol)
            finally:
                self.install()

        return reduce_plain


def _subclass(plain_class: type, methods: dict[str, Any]) -> type:
    """Return a subclass of ``plain_class`` with the same name and layout that overrides some methods."""
    metaclass = type(plain_class)
    described = {
        "__module__": plain_class.__module__,
        "__qualname__": plain_class.__qualname__,
        "__doc__": plain_class.__doc__,
        "__slots__": (),
    }
    return metaclass(plain_class.__name__, (plain_class,), {**described, **methods})

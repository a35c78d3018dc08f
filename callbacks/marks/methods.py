"""Puts a context around a method of one object, and takes it away again."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import update_wrapper
from typing import Any

from lm_profiler.measure.boundary import Guard


def bracket(owner: Any, name: str, context: AbstractContextManager[None], part: Guard, undo: ExitStack) -> None:
    """Have each call of ``owner.name`` run inside ``context``, guarded by ``part``, until ``undo`` is closed.

    Raises:
        AttributeError: ``owner`` has no such method, or does not let it be replaced.
    """
    own = getattr(owner, "__dict__", {})
    replaced = own.get(name)
    setattr(owner, name, _Bracketed(owner, name, context, part))
    if replaced is not None:
        undo.callback(setattr, owner, name, replaced)
    else:  # not by delattr where it can be avoided: a Mock would have no such method any more
        undo.callback(own.pop, name, None) if name in own else undo.callback(delattr, owner, name)


class _Bracketed:
    """A method of ``owner`` inside a context. A copy of the owner, or its pickle, has the plain method there."""

    def __init__(self, owner: Any, name: str, context: AbstractContextManager[None], part: Guard) -> None:
        self._owner, self._name, self._context, self._part = owner, name, context, part
        self._method = getattr(owner, name)
        update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part, context = self._part, self._context
        part.run(context.__enter__)
        try:
            result = self._method(*args, **kwargs)
        except BaseException as error:
            part.run(context.__exit__, type(error), error, error.__traceback__)
            raise
        part.run(context.__exit__, None, None, None)
        return result

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)

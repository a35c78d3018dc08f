"""The boundary between training and what observes it: the instruments may fail, training may not.

All that training calls of ours (hooks, profiler actions, observers of marks, wrapped methods) belongs to a ``Guard``.
Whatever is raised there takes that part out, is said once with its cause, and training goes on as without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import CO_VARARGS
from io import TextIOWrapper
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any, TextIO, TypeVar, overload

from lm_profiler.record.text import printable, well_formed
from lm_profiler.torch_names import NameMissing

Result = TypeVar("Result")

_FAILED = "failed and was taken out"

_LINE = 300
"""Characters of a message that are told."""


def _nothing() -> None:
    """Nothing has to be undone."""


@dataclass(eq=False)
class Guard:
    """One instrument, as training sees it.

    Args:
        name: what the message calls it.
        tell: is told, once, that it failed and why.
        leave: undoes what it did to training's objects.
        outcome: what the message says of it.

    ``out`` is whether it failed. Where a call needs no frame of its own, it is written
    ``try: ... except BaseException as error: part.failed(error)``, which costs nothing while all goes well.
    """

    name: str
    tell: Callable[[str], object]
    leave: Callable[[], object] = _nothing
    outcome: str = _FAILED
    out: bool = field(default=False, init=False)
    error: BaseException | None = field(default=None, init=False)

    def failed(self, error: BaseException) -> None:
        """Take the part out, unless ``error`` is not its own but came from outside: Ctrl-C or a signal's handler.

        Raises:
            BaseException: ``error``, where it came from outside.
        """
        if comes_from_outside(error):
            raise error
        if self.out:
            return
        self.out, self.error = True, error
        missing = isinstance(error, NameMissing) and self.outcome == _FAILED
        outcome = "left out" if missing else self.outcome
        text = f"{self.name} {outcome}: {said(error)}"
        # Twice: it may be undoing what failed, and would leave a part of it behind.
        if self.undo() is not None and (another := self.undo()) is not None:
            text += f"; taking it out failed: {said(another)}"
        self.tell(text)

    def undo(self) -> BaseException | None:
        """Undo what was done to training's objects, as far as that is left; returns what went wrong."""
        try:
            self.leave()
        except BaseException as error:
            if comes_from_outside(error):
                raise
            return error
        return None

    def leave_out(self, why: str) -> None:
        """Do without the part, which would harm what it observes."""
        self.out = True
        self.tell(f"{self.name} left out: {why}")

    @overload
    def run(self, call: Callable[..., Result], *args: Any, otherwise: Result) -> Result: ...
    @overload
    def run(self, call: Callable[..., Result], *args: Any) -> Result | None: ...
    def run(self, call: Callable[..., Result], *args: Any, otherwise: Result | None = None) -> Result | None:
        """What ``call`` returns; ``otherwise`` where it fails, and from then on."""
        if self.out:
            return otherwise
        try:
            return call(*args)
        except BaseException as error:
            self.failed(error)
            return otherwise

    def guard(self, call: Callable[..., Any]) -> Hook:
        """``call`` as training may have it: None once the part is out."""
        return Hook(self, call)


def try_or_note(what: str, look: Callable[[], Result], notes: list[str]) -> Result | None:
    """What ``look`` returns; None, and a note that ``what`` is unknown and why, where it raises.

    Any error counts: a user's module, loader or logger runs in there, or a driver, and the run itself went well.
    """
    return Guard(what, notes.append, outcome="unknown").run(look)


@dataclass(eq=False, slots=True)
class Hook:
    """A callable of ours inside an object of training's. A copy of that object, or its pickle, has one that does
    nothing and knows nothing of us."""

    part: Guard
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.part.run(self.call, *args)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes anything and returns None


class _Unguarded(Guard):
    """For instruments on their own, outside of any training."""

    def failed(self, error: BaseException) -> None:
        raise error


UNGUARDED = _Unguarded("", str)


def comes_from_outside(error: BaseException) -> bool:
    """Whether ``error`` is Ctrl-C, or came from a handler of signals, which runs wherever the program is."""
    return isinstance(error, KeyboardInterrupt) or any(
        _handles_a_signal(frame) for frame, _ in walk_tb(error.__traceback__)
    )


def _handles_a_signal(frame: FrameType) -> bool:
    """Python gives a handler of signals a number and the frame that it interrupts, which is its caller's. A tracer is
    given that frame too, but no number before it.

    To ask ``signal.getsignal`` would not do: a handler may be an object, or within another's, or have gone.
    """
    code = frame.f_code
    count = code.co_argcount + bool(code.co_flags & CO_VARARGS) + code.co_kwonlyargcount
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    flat = [each for arg in given for each in (arg if type(arg) is tuple else (arg,))]
    return frame.f_back is not None and any(
        isinstance(number, int) and each is frame.f_back for number, each in pairwise(flat)
    )


def message_of(error: BaseException) -> str:
    """The exception's message as text that any file takes, also where somebody's own class cannot say it."""
    try:
        return well_formed(str(error))
    except BaseException as another:
        if comes_from_outside(another):
            raise
        return f"its message cannot be read: {type(another).__name__}"


def first_line(error: BaseException) -> str:
    """The exception's message, shortened to one line; empty where it has none."""
    line = next(iter(message_of(error).strip().splitlines()), "")
    return line if len(line) <= _LINE else f"{line[:_LINE].rpartition(' ')[0] or line[: _LINE - 1]}…"


def said(error: BaseException) -> str:
    """Type and message, in one line."""
    message = first_line(error)
    if isinstance(error, NameMissing):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def say(text: str) -> None:
    """One short message on stderr, if that can be written to; nothing in it is an order to a terminal."""
    try:
        put(sys.stderr, f"lm_profiler: {printable(text)}\n")
    except BaseException as error:
        if comes_from_outside(error):
            raise


def put(stream: TextIO | None, text: str) -> None:
    """Write ``text`` at once, in what signs ``stream`` has; None takes nothing.

    Nothing stays in the stream's buffer: what cannot be written must not fail again when the program ends.

    Raises:
        OSError: it cannot be written to.
        ValueError: it is closed.
    """
    if stream is None:
        return
    signs = text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
    stream.flush()
    if type(stream) is not TextIOWrapper:  # a notebook's, or somebody's own
        stream.write(signs.decode(getattr(stream, "encoding", None) or "utf-8"))
        stream.flush()
        return
    while signs:
        signs = signs[os.write(stream.fileno(), signs) :]

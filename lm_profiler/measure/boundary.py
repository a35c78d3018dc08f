"""The boundary between training and its instruments: an instrument may fail, training must not.

All code of ours that training calls (hooks, profiler actions, observers of marks, wrapped methods) belongs to a
``Guard``. An error there takes that instrument out and is reported once; training continues as without it.
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

from lm_profiler.record.secrets import mask_text
from lm_profiler.record.text import printable, well_formed
from lm_profiler.torch_names import NameMissing

Result = TypeVar("Result")

_FAILED = "failed and was taken out"
_LINE = 300  # the most characters of an error's message that are shown


@dataclass(eq=False)
class Guard:
    """Runs the code of one instrument for training, and takes it out when it fails.

    On the hot path, where each frame counts, write ``try: ... except BaseException as error: part.failed(error)`` in
    place of ``run``.
    """

    name: str  # the instrument's name in the message
    tell: Callable[[str], object]  # gets the message that it failed and why, once
    leave: Callable[[], object] = lambda: None  # undoes what the instrument did to training's objects
    outcome: str = _FAILED  # what the message says happened
    out: bool = field(default=False, init=False)  # whether it failed
    error: BaseException | None = field(default=None, init=False)

    def failed(self, error: BaseException) -> None:
        """Take the instrument out; raise ``error`` if it came from outside: Ctrl-C or a signal handler."""
        if comes_from_outside(error):
            raise error
        if self.out:
            return
        self.out, self.error = True, error
        missing = isinstance(error, NameMissing) and self.outcome == _FAILED
        text = f"{self.name} {'left out' if missing else self.outcome}: {said(error)}"
        if (another := self.undo()) is not None:
            text += f"; taking it out failed: {said(another)}"
        self.tell(text)

    def undo(self) -> BaseException | None:
        try:
            self.leave()
        except BaseException as error:
            if comes_from_outside(error):
                raise
            return error
        return None

    def leave_out(self, why: str) -> None:
        """Leave the instrument out, since it would harm what it observes."""
        self.out = True
        self.tell(f"{self.name} left out: {why}")

    @overload
    def run(self, call: Callable[..., Result], *args: Any, otherwise: Result) -> Result: ...
    @overload
    def run(self, call: Callable[..., Result], *args: Any) -> Result | None: ...
    def run(self, call: Callable[..., Result], *args: Any, otherwise: Result | None = None) -> Result | None:
        """Return what ``call`` returns; ``otherwise`` where it fails, and from then on."""
        if self.out:
            return otherwise
        try:
            return call(*args)
        except BaseException as error:
            self.failed(error)
            return otherwise

    def guard(self, call: Callable[..., Any]) -> Hook:
        """Wrap ``call`` for training's objects; the wrapper returns None once the instrument is out."""
        return Hook(self, call)


def try_or_note(what: str, look: Callable[[], Result], notes: list[str]) -> Result | None:
    """Return what ``look`` returns; where it raises, return None and note that ``what`` is unknown and why.

    Any error counts: user code (module, loader, logger) or a driver runs in there, and the run itself succeeded.
    """
    return Guard(what, notes.append, outcome="unknown").run(look)


@dataclass(eq=False, slots=True)
class Hook:
    """A guarded callable that is stored in an object of training's.

    Copies and pickles of that object get a callable that does nothing, and can be loaded without this package.
    """

    part: Guard
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.part.run(self.call, *args)

    def __reduce__(self) -> Any:
        # A bound method of the standard library that takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


class _Unguarded(Guard):
    """Raises every error; for instruments that are used outside training."""

    def failed(self, error: BaseException) -> None:
        raise error


UNGUARDED = _Unguarded("", str)


def comes_from_outside(error: BaseException) -> bool:
    """Return whether ``error`` is Ctrl-C, or was raised in a signal handler, which may run at any line."""
    return isinstance(error, KeyboardInterrupt) or any(
        _handles_a_signal(frame) for frame, _ in walk_tb(error.__traceback__)
    )


def _handles_a_signal(frame: FrameType) -> bool:
    """Return whether ``frame`` is the call of a signal handler.

    Python calls a handler with a number and the interrupted frame, which is the handler's caller. A tracer gets that
    frame too, but no number before it. ``signal.getsignal`` cannot tell: a handler may be an object, be called by
    another handler, or have been replaced.
    """
    code = frame.f_code
    count = code.co_argcount + bool(code.co_flags & CO_VARARGS) + code.co_kwonlyargcount
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    flat = [each for arg in given for each in (arg if type(arg) is tuple else (arg,))]
    return frame.f_back is not None and any(
        isinstance(number, int) and each is frame.f_back for number, each in pairwise(flat)
    )


def message_of(error: BaseException) -> str:
    """Return the exception's message as valid text, also where its ``__str__`` raises."""
    try:
        return well_formed(str(error))
    except BaseException as another:
        if comes_from_outside(another):
            raise
        return f"its message cannot be read: {type(another).__name__}"


def first_line(error: BaseException) -> str:
    line = next(iter(mask_text(message_of(error)).strip().splitlines()), "")
    return line if len(line) <= _LINE else f"{line[:_LINE].rpartition(' ')[0] or line[: _LINE - 1]}…"


def said(error: BaseException) -> str:
    """Return the error's type and message in one line."""
    message = first_line(error)
    if isinstance(error, NameMissing):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def say(text: str) -> None:
    """Write a message to stderr if possible, without control characters."""
    try:
        put(sys.stderr, f"lm_profiler: {printable(text)}\n")
    except BaseException as error:
        if comes_from_outside(error):
            raise


def put(stream: TextIO | None, text: str) -> None:
    """Write ``text`` at once, escaping what the encoding lacks; raises OSError, or ValueError where it is closed.

    Nothing stays in the stream's buffer, where it would fail once more when the program ends.
    """
    if stream is None:
        return
    signs = text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
    stream.flush()
    if type(stream) is not TextIOWrapper:  # a notebook's stream, or a user's own class
        stream.write(signs.decode(getattr(stream, "encoding", None) or "utf-8"))
        stream.flush()
        return
    # Written without the buffer; a pipe may take only a part at a time.
    while signs:
        signs = signs[os.write(stream.fileno(), signs) :]

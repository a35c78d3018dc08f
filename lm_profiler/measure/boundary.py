"""The boundary between training and its instruments: an instrument may fail, but training must not.

All code of ours that training calls (hooks, profiler actions, observers of marks, wrapped methods) runs in a ``Guard``.
If an instrument raises, it is disabled and the error is reported once. Training is not affected.
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
from typing import Any, Protocol, TextIO, TypeVar, overload

from lm_profiler.record.secrets import mask_text
from lm_profiler.record.text import printable, well_formed
from lm_profiler.torch_names import NameMissing

Result = TypeVar("Result")

# the end of most messages: an instrument has failed, and the profile continues without it
_TAKEN_OUT = "failed and was disabled"
_MOST_CHARACTERS = 300  # the most characters of an error's message that are shown


@dataclass(eq=False)
class Guard:
    """Runs the code of one instrument for training, and disables it when it fails.

    On the hot path, where each frame counts, ``try: ... except BaseException as error: guard.handle(error)`` is written
    out instead of ``run``.
    """

    name: str  # the instrument's name in the message
    report: Callable[[str], object]  # receives one message if the instrument fails
    # undoes what the instrument did to training's objects
    leave: Callable[[], object] = lambda: None
    # what happened to the instrument, in the words of the message
    outcome: str = _TAKEN_OUT
    # whether the instrument failed, or was left out
    is_disabled: bool = field(default=False, init=False)
    error: BaseException | None = field(default=None, init=False)

    def handle(self, error: BaseException) -> None:
        """Disable the instrument and report the ``error``; later errors are not reported.

        An error from outside (Ctrl-C, or raised in a signal handler) is raised again instead.
        """
        if comes_from_outside(error):
            raise error
        if self.is_disabled:
            return
        self.is_disabled = True
        self.error = error
        outcome = self.outcome
        if outcome == _TAKEN_OUT and isinstance(error, NameMissing):
            outcome = "left out"
        message = f"{self.name} {outcome}: {error_text(error)}"
        undo_error = self.undo()
        if undo_error is not None:
            message += f"; disabling it failed: {error_text(undo_error)}"
        self.report(message)

    def undo(self) -> BaseException | None:
        """Undo what the instrument did to training; return the error if that fails."""
        try:
            self.leave()
        except BaseException as error:
            if comes_from_outside(error):
                raise
            return error
        return None

    def disable(self, reason: str) -> None:
        """Leave the instrument out for a ``reason`` other than an error: for example, it would disturb others."""
        self.is_disabled = True
        self.report(f"{self.name} left out: {reason}")

    @overload
    def run(
        self, call: Callable[..., Result], *args: Any, otherwise: Result
    ) -> Result: ...
    @overload
    def run(self, call: Callable[..., Result], *args: Any) -> Result | None: ...
    def run(
        self, call: Callable[..., Result], *args: Any, otherwise: Result | None = None
    ) -> Result | None:
        """Return what ``call`` returns, or ``otherwise`` if it fails or the instrument is disabled."""
        if self.is_disabled:
            return otherwise
        try:
            return call(*args)
        except BaseException as error:
            self.handle(error)
            return otherwise

    def end(self, call: Callable[..., object], *args: Any) -> None:
        """Make the last ``call`` of the instrument. If it is disabled, undo the rest of what it did to training.

        Within a backward pass, or within an optimizer's step, not everything could be undone.
        """
        if self.is_disabled:
            self.undo()
        else:
            self.run(call, *args)

    def wrap(self, call: Callable[..., Any]) -> Hook:
        """Wrap ``call`` for training's objects; the wrapper returns None once the instrument is disabled."""
        return Hook(self, call)


def try_or_note(
    subject: str, find: Callable[[], Result], notes: list[str]
) -> Result | None:
    """Return what ``find`` returns; if it raises, return None, and note that the ``subject`` is unknown and why.

    Every error is caught: ``find`` runs user code (module, loader, logger) or a driver, and the run itself succeeded.
    """
    return Guard(subject, notes.append, outcome="unknown").run(find)


@dataclass(eq=False, slots=True)
class Hook:
    """A guarded callable that is stored in an object of training.

    Copies and pickles of that object have a callable that does nothing, and can be loaded without this package.
    """

    guard: Guard
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.guard.run(self.call, *args)

    def __reduce__(self) -> Any:
        # the copy is a bound method of the standard library that takes any arguments and returns None
        return getattr, (nullcontext(), "__exit__")


class _Unguarded(Guard):
    """Raises every error; for instruments that are used outside training."""

    def handle(self, error: BaseException) -> None:
        raise error


UNGUARDED = _Unguarded("", str)


def comes_from_outside(error: BaseException) -> bool:
    """Return whether ``error`` is Ctrl-C, or was raised in a signal handler, which may run at any line."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return any(_handles_a_signal(frame) for frame, _ in walk_tb(error.__traceback__))


def _handles_a_signal(frame: FrameType) -> bool:
    """Return whether ``frame`` is the call of a signal handler.

    Python calls a handler with a number and the interrupted frame, which is also the handler's caller. A trace function
    gets that frame too, but no number before it. ``signal.getsignal`` does not help: a handler may be an object, may be
    called by another handler, or may have been replaced since.
    """
    caller = frame.f_back
    if caller is None:
        return False
    for argument, next_argument in pairwise(_arguments_of(frame)):
        if isinstance(argument, int) and next_argument is caller:
            return True
    return False


def _arguments_of(frame: FrameType) -> list[object]:
    """Return the arguments of the call that ``frame`` runs; those of ``*args`` one by one."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & CO_VARARGS:
        count += 1
    arguments: list[object] = []
    for name in code.co_varnames[:count]:
        argument = frame.f_locals.get(name)
        if type(argument) is tuple:
            arguments.extend(argument)
        else:
            arguments.append(argument)
    return arguments


def message_of(error: BaseException) -> str:
    """Return the exception's message as valid text, even if its ``__str__`` raises."""
    try:
        return well_formed(str(error))
    except BaseException as text_error:
        if comes_from_outside(text_error):
            raise
        return f"its message cannot be read: {type(text_error).__name__}"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message without secrets; if it is too long, it is cut between words."""
    lines = mask_text(message_of(error)).strip().splitlines()
    if not lines:
        return ""
    line = lines[0]
    if len(line) <= _MOST_CHARACTERS:
        return line
    whole_words = line[:_MOST_CHARACTERS].rpartition(" ")[0]
    shortened = whole_words or line[: _MOST_CHARACTERS - 1]
    return f"{shortened}…"


def error_text(error: BaseException) -> str:
    """Return the error's type and message in one line."""
    message = first_line(error)
    if isinstance(error, NameMissing):
        return message
    if not message:
        return type(error).__name__
    return f"{type(error).__name__}: {message}"


class Report(Protocol):
    """Adds a note to the record."""

    def __call__(self, text: str, *, prints: bool = True) -> object:
        """Add ``text``, and also print it now if ``prints``, because there may be no record that would show it."""


def print_message(text: str) -> None:
    """Write a message to stderr if possible, without control characters."""
    try:
        write_text(sys.stderr, f"lm_profiler: {printable(text)}\n")
    except BaseException as error:
        if comes_from_outside(error):
            raise


def write_text(stream: TextIO | None, text: str) -> None:
    """Write ``text`` at once; characters that the encoding lacks are escaped.

    Nothing stays in the stream's buffer, where a failed write would be repeated when the program ends.

    Raises:
        OSError: the stream cannot be written to.
        ValueError: the stream is closed.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    content = text.encode(encoding, "backslashreplace")
    stream.flush()
    if type(stream) is not TextIOWrapper:  # a notebook's stream, or a user's own class
        stream.write(content.decode(encoding))
        stream.flush()
        return
    # Written without the buffer; a pipe may take only a part at a time.
    while content:
        written_bytes = os.write(stream.fileno(), content)
        content = content[written_bytes:]

"""What is found out beside the measured times may fail, and must not take them with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lm_profiler.callbacks.failures import first_line

Found = TypeVar("Found")


def found(what: str, look: Callable[[], Found], notes: list[str]) -> Found | None:
    """What ``look`` finds; None, and a note that ``what`` is unknown and why, where it raises.

    Any error counts: a user's module, loader or logger runs in there, or a driver, and the run itself went well.
    """
    try:
        return look()
    except Exception as error:
        notes.append(f"{what} unknown: {said(error)}")
        return None


def said(error: Exception) -> str:
    """Type and message, in one line."""
    message = first_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__

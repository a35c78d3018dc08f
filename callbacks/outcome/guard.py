"""What is found out beside the measured times may fail, and must not take them with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lm_profiler.measure.boundary import Part

Found = TypeVar("Found")


def found(what: str, look: Callable[[], Found], notes: list[str]) -> Found | None:
    """What ``look`` finds; None, and a note that ``what`` is unknown and why, where it raises.

    Any error counts: a user's module, loader or logger runs in there, or a driver, and the run itself went well.
    """
    return Part(what, notes.append, outcome="unknown").run(look)

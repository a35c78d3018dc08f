"""Prints which stage runs, between steps, so that no measured step includes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from lm_profiler.measure.boundary import put
from lm_profiler.record.parts import STAGE_NAMES
from lm_profiler.record.quantities import counted

_REDRAW_S = 0.5  # least seconds between two drawings on a terminal


class Progress:
    """Draws ``measuring 7/20`` over itself on a terminal; elsewhere prints one line for each stage.

    ``until_sure`` says that measuring may end before all planned steps are done.
    """

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic, until_sure: bool = False
    ) -> None:
        self._measured = "at most " if until_sure else ""
        self._out: TextIO | None = out if out is not None else sys.stderr
        self._clock = clock
        self._live = self._out is not None and self._out.isatty()
        self._drawn_at = float("-inf")
        self._stage: str | None = None

    def draw(self, stage: str, done: int, planned: int) -> None:
        """Show that ``done`` of ``planned`` steps of ``stage`` are finished."""
        new = stage != self._stage
        if self._live:
            now = self._clock()
            if not new and now - self._drawn_at < _REDRAW_S:
                return
            self._drawn_at = now
            # To the beginning of the line, and erase it.
            put(self._out, f"\r\x1b[K{STAGE_NAMES[stage]} {min(done + 1, planned)}/{planned}")
        elif new:
            limit = self._measured if stage == "measure" else ""
            put(self._out, f"{STAGE_NAMES[stage]}: {limit}{counted(planned, 'step')}\n")
        self._stage = stage

    def clear(self) -> None:
        """Clear the terminal's line."""
        if self._live and self._stage is not None:
            put(self._out, "\r\x1b[K")
        self._stage = None

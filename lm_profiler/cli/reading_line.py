"""A line on the terminal that shows how much of a large file has been read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from lm_profiler.measure.boundary import write_text

_REDRAW_S = 2.0  # least seconds between two updates, and before the first one
_LINE_START = "\r\x1b[K"  # erases the line


class ReadingLine:
    """Shows and updates ``reading trace.json: 43%`` on a terminal; without a terminal it shows nothing."""

    def __init__(
        self,
        path: Path,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream is not None and self._stream.isatty()
        self._drawn_at_s = clock()
        self._is_drawn = False

    def draw(self, bytes_read: int) -> None:
        """Update the line if ``_REDRAW_S`` have passed since the last update; ``bytes_read`` of the file were read."""
        if not self._is_terminal:
            return
        now_s = self._clock()
        if now_s - self._drawn_at_s < _REDRAW_S:
            return
        self._drawn_at_s = now_s
        self._is_drawn = True
        share = bytes_read / max(self._path.stat().st_size, 1)
        write_text(self._stream, f"{_LINE_START}reading {self._path.name}: {share:.0%}")

    def erase(self) -> None:
        """Erase the line, so that the answer begins there."""
        if self._is_drawn:
            write_text(self._stream, _LINE_START)

"""Writes the files of a watched run: events, windows, the last steps and the status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm_profiler.measure.boundary import error_text
from lm_profiler.record import watch_files as files
from lm_profiler.record.files import Part
from lm_profiler.record.parts import TIMED
from lm_profiler.record.watch_files import (
    EVENTS,
    WINDOWS,
    WatchEvent,
    WatchStatus,
    WatchWindow,
)

_STEPS_OF_WINDOW = 1000  # the fewest steps of a window
# the size of the file with the last steps, which has 160,000 to 320,000 of them
_LAST_STEPS_BYTES = 16 * 2**20
_MOST_LINES = 10_000  # lines of each file that wait in memory while the disk is full


@dataclass(eq=False)
class _OpenWindow:
    """The steps of a window that is not complete."""

    first_step: int
    began_s: float  # the time at which the window began, in seconds since 1970
    # (n, TIMED) of each call of ``add_to_window``
    seconds: list[NDArray[np.float64]] = field(default_factory=list)
    # the memory that was held between steps, and the peaks, as far as they are known
    held_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(len(seconds) for seconds in self.seconds)

    def summary(self) -> WatchWindow:
        """Return the window with a sketch of each part that took time."""
        seconds = np.concatenate(self.seconds)
        sketches = {}
        for index, part in enumerate(TIMED):
            if seconds[:, index].any():
                sketches[part] = files.Sketch.from_seconds(seconds[:, index])
        return WatchWindow(
            first_step=self.first_step,
            steps=len(seconds),
            began_s=self.began_s,
            seconds=sketches,
            held_bytes=min(self.held_bytes, default=None),
            peak_bytes=max(self.peak_bytes, default=None),
        )


@dataclass(eq=False)
class WatchOutput:
    """Writes the files of one rank. Lines wait in memory while they cannot be written."""

    folder: Path  # the folder of the run
    rank: int
    report: Callable[[str], object]  # gets a note of a problem
    timed_steps: int = 0
    # the sums of all timed steps, one element per part of ``TIMED``
    seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(TIMED)))
    # lines to be written, by the name of their file
    _lines: dict[str, list[Part]] = field(
        default_factory=lambda: {EVENTS: [], WINDOWS: []}
    )
    # steps since the last complete window; their sketches are computed only when they are written
    _open_window: _OpenWindow | None = None
    _was_reported: bool = False  # whether a failed write was reported

    def add_events(self, events: Sequence[WatchEvent]) -> None:
        self._lines[EVENTS] += events

    def add_steps(
        self, first_step: int, begin_ns: NDArray[np.int64], seconds: NDArray[np.float64]
    ) -> None:
        """Write steps as rows, and add them to the sums."""
        count = len(begin_ns)
        rows = np.empty(count, files.STEP_ROW)
        rows["step"] = np.arange(first_step, first_step + count)
        rows["begin_ns"] = begin_ns
        rows["seconds"] = seconds
        self.timed_steps += count
        self.seconds += np.nan_to_num(seconds).sum(axis=0)
        path = self._file_path(files.LAST_STEPS)
        self.try_to_write(
            partial(files.append_last_steps, path, rows, _LAST_STEPS_BYTES)
        )

    def add_to_window(
        self,
        first_step: int,
        began_s: float,
        seconds: NDArray[np.float64],
        held_bytes: int | None,
        peak_bytes: int | None,
    ) -> WatchWindow | None:
        """Add steps with (n, TIMED) ``seconds`` to the current window; return the window if it is complete.

        Args:
            first_step: the number of the first of the steps.
            began_s: when it began, in seconds since 1970.
            seconds: the seconds of the parts, and last of the whole step.
            held_bytes: the memory that is held after them.
            peak_bytes: the peak of memory at their end.
        """
        if self._open_window is None:
            self._open_window = _OpenWindow(first_step, began_s)
        window = self._open_window
        window.seconds.append(seconds)
        if held_bytes is not None:
            window.held_bytes.append(held_bytes)
        if peak_bytes is not None:
            window.peak_bytes.append(peak_bytes)
        if window.steps < _STEPS_OF_WINDOW:
            return None
        return self.end_window()

    @property
    def window(self) -> WatchWindow | None:
        """The steps since the last complete window; None if there are none."""
        if self._open_window is None:
            return None
        return self._open_window.summary()

    def end_window(self) -> WatchWindow | None:
        """End the current window and return it, so that ``write_lines`` writes it; None if it has no steps."""
        window = self.window
        self._open_window = None
        if window is not None:
            self._lines[WINDOWS].append(window)
        return window

    def write_lines(self) -> None:
        """Write the lines that wait; keep the newest if they cannot be written."""
        for name, lines in self._lines.items():
            if not lines:
                continue
            write = partial(files.append_lines, self._file_path(name), lines)
            if self.try_to_write(write):
                lines.clear()
            del lines[:-_MOST_LINES]

    def write_status(self, status: WatchStatus) -> None:
        self.try_to_write(lambda: status.write(self._file_path(files.STATUS)))

    def try_to_write(self, write: Callable[[], object]) -> bool:
        """Call ``write``; return whether it succeeded.

        Only the first failure is reported: a full disk may have space again later.
        """
        try:
            write()
        except OSError as error:
            if not self._was_reported:
                self._was_reported = True
                kept = "their contents are kept in memory, up to a limit"
                self.report(
                    f"watch files cannot be written; {kept}: {error_text(error)}"
                )
            return False
        return True

    def _file_path(self, name: str) -> Path:
        return self.folder / files.rank_file_name(name, self.rank)

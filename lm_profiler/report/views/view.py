"""The type of a view of a run, and limits on what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import RecordError
from lm_profiler.report.views.blocks import Json, line


@dataclass(frozen=True)
class Limits:
    """Limits on what a view shows of one run; they are lower in an HTML page of many runs, so that it stays small."""

    steps: int = 4000  # more bars could not be distinguished or drawn
    points: int = 2000  # places of a memory timeline
    watch_points: int = 500
    kernel_rows: int | None = None  # None stands for all rows that the file holds


@dataclass(frozen=True)
class View:
    """A view of one run.

    ``blocks`` returns what it shows, ``missing`` returns why it has nothing to show, or None if it has something.
    """

    name: str
    title: str
    blocks: Callable[[Entry, Limits], list[Json]]
    missing: Callable[[Entry], str | None]
    # whether the view may change although the run's record does not
    is_live: bool = False

    def answer(self, entry: Entry, limits: Limits | None = None) -> list[Json]:
        """Return the blocks for ``entry``, or the reason why there are none; for a damaged file, an error message."""
        reason = self.missing(entry)
        if reason is not None:
            return [line(reason, "quiet")]
        try:
            return self.blocks(entry, limits or Limits())
        except RecordError as error:
            return [line(str(error), "error")]

    def described(self) -> dict[str, Any]:
        """Return what the tab needs to list this view."""
        return {
            "name": self.name,
            "title": self.title,
            "of_run": True,
            "is_live": self.is_live,
        }


def left_no_run(entry: Entry) -> str:
    """Return why a cell without a record has nothing to show."""
    reason = f": {entry.reason}" if entry.reason else ""
    return f"This cell of the sweep has no results: {entry.status}{reason}"

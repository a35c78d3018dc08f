"""What a person sees of a search: a living table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lm_profiler.record.improve import ImproveRecord, Tried
from lm_profiler.record.quantities import counted, duration_text
from lm_profiler.record.sweep import Cell, CellOutcome
from lm_profiler.record.text import printable
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.report.tables.terminal import lines
from lm_profiler.sweep.display import duration, stage_of
from lm_profiler.sweep.outcome import OUTPUT_FILE
from lm_profiler.sweep.schedule import Watcher


class ImproveDisplay(Watcher):
    """Tells how a search goes on.

    Args:
        folder: The improvement's, where running cells say what they do.
        budget_s: Seconds for all runs.
    """

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._budget_s, self._clock = folder, budget_s, clock
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._record: ImproveRecord | None = None
        self._running: tuple[Cell, float] | None = None
        self._told = 0

    def shown(self) -> AbstractContextManager[object]:
        """The table is on the terminal, if there is one, for as long as this is open."""
        return self._live if self._console.is_terminal else nullcontext()

    def tell(self, record: ImproveRecord) -> None:
        """How the search stands now."""
        self._record = record
        done = [tried for tried in record.tried if tried.verdict is not None and tried.verdict != "REFUSED"]
        if not self._console.is_terminal:
            for tried in done[self._told :]:
                self._say(f"[{duration(record.elapsed_s)} of {duration(self._budget_s)}] {tried_text(tried)}")
        self._told = len(done)
        self.tick()

    def began(self, cell: Cell, device: str | None) -> None:
        self._running = cell, self._clock()
        self.tick()

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        self._running = None
        if outcome.status != "ok" and not self._console.is_terminal:
            self._say(f"{outcome.status:<8} {cell.id}" + (f"  {outcome.reason}" if outcome.reason else ""))
        self.tick()

    def tick(self) -> None:
        if self._console.is_terminal:
            self._live.update(self._picture(), refresh=True)

    def _say(self, line: str) -> None:
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        tried = [] if self._record is None else [one for one in self._record.tried if one.verdict != "REFUSED"]
        rows = [[one.name, _most(one), _saved(one), str(one.pairs), _word(one)] for one in tried]
        table = text_table(["change", "at most", "saved", "pairs", "verdict"], rows, below=self._below())
        whole = Table(table.headings, table.rows, below=table.below)
        coloured = self._console.color_system is not None
        return Group(
            *(Text.from_ansi(line, no_wrap=True, overflow="ellipsis") for line in lines(whole, coloured=coloured))
        )

    def _below(self) -> list[str]:
        told = []
        spent_s = 0.0 if self._record is None else self._record.elapsed_s
        if self._running is not None:
            cell, since = self._running
            spent_s += self._clock() - since
            told.append(
                f"{stage_of(self._folder / cell.id / OUTPUT_FILE)}: {cell.id}, {duration(self._clock() - since)}"
            )
        if self._record is not None and self._record.left:
            names = ", ".join(self._record.left[:3]) + (", …" if len(self._record.left) > 3 else "")
            told.append(f"left: {counted(len(self._record.left), 'change')}: {names}")
        return [*told, f"{duration(spent_s)} of {duration(self._budget_s)}"]


def tried_text(tried: Tried) -> str:
    """One change in a line: what it brought, and whether it stays."""
    parts = [f"{tried.name}: {_word(tried)}"]
    if tried.saved_s is not None and tried.a_s is not None:
        parts.append(f"saved {_saved(tried)} of {duration_text(tried.a_s)} in {counted(tried.pairs, 'pair')}")
    if tried.why:
        parts.append(tried.why)
    return "; ".join(parts)


def _word(tried: Tried) -> str:
    return "…" if tried.verdict is None else tried.verdict + (", taken" if tried.accepted else "")


def _most(tried: Tried) -> str:
    return "" if tried.ceiling_s is None else duration_text(tried.ceiling_s)


def _saved(tried: Tried) -> str:
    if tried.saved_s is None:
        return ""
    ends = [f"{x * 1e3:.3g}" for x in (tried.saved_s, tried.low_s, tried.high_s) if x is not None]
    return f"{ends[0]} ms [{', '.join(ends[1:])}]"

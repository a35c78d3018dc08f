"""Show how a sweep goes on: a live table on a terminal, a line for each cell elsewhere."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lm_profiler.record.parts import STAGE_NAMES
from lm_profiler.record.quantities import duration_text
from lm_profiler.record.sweep import Cell, CellOutcome
from lm_profiler.record.text import printable
from lm_profiler.report.tables.formats import lines
from lm_profiler.report.tables.table import STATUS_STYLES, Heading, Table, TableCell
from lm_profiler.sweep.outcome import OUTPUT_FILE, last_lines
from lm_profiler.sweep.schedule import Watcher

_RECENT = 8  # the number of ended cells that the table shows

_HEADINGS = (Heading("status", "status"), Heading("time", "time", figures=True), Heading("cell", "cell"))


class LiveDisplay(Watcher):
    """A watcher that redraws a table on a terminal; elsewhere its subclasses print lines."""

    def __init__(self, console: Console | None, clock: Callable[[], float]) -> None:
        self._console, self._clock = console or Console(), clock
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def shown(self) -> AbstractContextManager[object]:
        """Show the table within the context, if there is a terminal."""
        return self._live if self._console.is_terminal else nullcontext()

    def tick(self) -> None:
        if self._console.is_terminal:
            self._live.update(self._picture(), refresh=True)

    def _table(self) -> Table:
        """Return the table as of now."""
        raise NotImplementedError

    def _picture(self) -> RenderableType:
        coloured = self._console.color_system is not None
        shown = (
            Text.from_ansi(line, no_wrap=True, overflow="ellipsis") for line in lines(self._table(), coloured=coloured)
        )
        return Group(*shown)

    def _say(self, line: str) -> None:
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class Display(LiveDisplay):
    """Shows how a sweep goes on.

    Args:
        cells: All cells of the sweep.
        done: How many of them have an outcome already.
        slots: How many run side by side; None where that is unknown.
        folder: The sweep's folder, which holds the output of running cells.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        done: int,
        slots: int | None,
        folder: Path,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, clock)
        self._cells, self._slots, self._folder = len(cells), slots, folder
        self._running: dict[str, tuple[Cell, str | None, float]] = {}
        self._recent: deque[tuple[Cell, CellOutcome]] = deque(maxlen=_RECENT)
        self._words: Counter[str] = Counter()
        self._done, self._ran_s, self._began = done, list[float](), clock()

    def began(self, cell: Cell, device: str | None) -> None:
        self._running[cell.id] = (cell, device, self._clock())
        self.tick()

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        self._running.pop(cell.id, None)
        self._words[outcome.status] += 1
        self._done += 1
        if outcome.status != "refused":  # a refusal takes no time, so it does not predict other cells
            self._ran_s.append(outcome.duration_s)
        self._recent.append((cell, outcome))
        if not self._console.is_terminal:
            line = f"[{self._done}/{self._cells}] {outcome.status:<8} {cell.id}  {duration_text(outcome.duration_s)}"
            self._say(line + (f"  {outcome.reason}" if outcome.reason else ""))
        self.tick()

    def _table(self) -> Table:
        rows = [self._row(outcome.status, outcome.duration_s, cell) for cell, outcome in self._recent]
        for cell, device, since in self._running.values():
            stage = stage_of(self._folder / cell.id / OUTPUT_FILE)
            status = stage if device is None else f"{stage} on {device}"
            rows.append(self._row(status, self._clock() - since, cell))
        said = [f"{cell.id}: {outcome.reason}" for cell, outcome in self._recent if outcome.reason]
        return Table(_HEADINGS, rows, below=[*said, self.progress()])

    @staticmethod
    def _row(status: str, seconds: float, cell: Cell) -> list[TableCell]:
        texts = (status, duration_text(seconds), cell.id)
        return [TableCell(text, text, style=STATUS_STYLES.get(text, "")) for text in texts]

    def progress(self) -> str:
        """Return how many cells have ended, their statuses, and the elapsed and the remaining time."""
        parts = [f"{self._done} of {self._cells} cells"]
        parts += [f"{count} {word}" for word, count in self._words.items()]
        parts.append(f"{duration_text(self._clock() - self._began)} elapsed")
        left_s = self._left_s()
        if left_s is not None:
            parts.append(f"about {duration_text(left_s)} left")
        return ", ".join(parts)

    def _left_s(self) -> float | None:
        """Estimate the remaining seconds from the mean of the cells that ran.

        None before the first cell has ended, and once the running ones take longer than estimated.
        """
        if not self._ran_s or self._slots is None:
            return None
        mean_s = sum(self._ran_s) / len(self._ran_s)
        spent_s = sum(min(self._clock() - since, mean_s) for _, _, since in self._running.values())
        left_s = (self._cells - self._done) * mean_s - spent_s
        return left_s / self._slots if left_s > 0.0 else None


def stage_of(output: Path) -> str:
    """Return the stage of a running cell, from the last line of its output that names one."""
    stages = (
        stage
        for line in reversed(last_lines(output))
        for stage in STAGE_NAMES.values()
        if line.startswith(f"{stage}: ")
    )
    return next(stages, "starting")

"""Show the progress of a sweep: a line for each cell that has ended, and on a terminal a line about running cells."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lm_profiler.record.parts import STAGE_NAMES
from lm_profiler.record.quantities import duration_text
from lm_profiler.record.sweep_files import Cell, CellOutcome
from lm_profiler.record.text import printable
from lm_profiler.sweep.schedule import OUTPUT_FILE, Watcher, last_lines


class LineDisplay(Watcher):
    """A watcher that prints lines, and on a terminal updates a last line about the cells that run in ``folder``."""

    def __init__(
        self, folder: Path, console: Console | None, clock: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._console = console or Console()
        self._clock = clock
        # id of a running cell → its device, and when it began
        self._running: dict[str, tuple[str | None, float]] = {}
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def live_line(self) -> AbstractContextManager[object]:
        """Show the last line within the context, if there is a terminal."""
        if self._console.is_terminal:
            return self._live
        return nullcontext()

    def cell_begins(self, cell: Cell, device: str | None) -> None:
        self._running[cell.id] = device, self._clock()
        self.tick()

    def cell_ends(self, cell: Cell, outcome: CellOutcome) -> None:
        self._running.pop(cell.id, None)
        self.tick()

    def tick(self) -> None:
        """Redraw the line about running cells, if there is a terminal."""
        if not self._console.is_terminal:
            return
        parts = [self.progress()]
        for cell_id, (device, begin_s) in self._running.items():
            state = stage_of(self._folder / cell_id / OUTPUT_FILE)
            if device is not None:
                state += f" on {device}"
            parts.append(
                f"{state}: {cell_id}, {duration_text(self._clock() - begin_s)}"
            )
        line = Text(printable("; ".join(parts)), no_wrap=True, overflow="ellipsis")
        # ``Live`` would wrap a Text that is not in a Group
        self._live.update(Group(line), refresh=True)

    def progress(self) -> str:
        """Return the progress as text."""
        raise NotImplementedError

    def print_line(self, line: str) -> None:
        self._console.print(
            printable(line), highlight=False, markup=False, soft_wrap=True
        )


class Display(LineDisplay):
    """Shows the progress of a sweep of ``cells`` in ``folder``.

    ``ended_cells`` is the number of cells that already have an outcome, ``slots`` the number that run at the same time.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        ended_cells: int,
        slots: int,
        folder: Path,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(folder, console, clock)
        self._cell_count = len(cells)
        self._slots = slots
        self._ended_cells = ended_cells
        # how the cells that this process has run ended, and how long they took
        self._status_counts: Counter[str] = Counter()
        self._durations_s: list[float] = []
        self._begin_s = clock()

    def cell_ends(self, cell: Cell, outcome: CellOutcome) -> None:
        """Count the cell, and print a line about how it ended."""
        self._status_counts[outcome.status] += 1
        self._ended_cells += 1
        if outcome.status != "refused":
            # A refusal takes hardly any time, so it says nothing about the time of other cells.
            self._durations_s.append(outcome.duration_s)
        duration = duration_text(outcome.duration_s)
        line = f"[{self._ended_cells}/{self._cell_count}] {outcome.status:<8} {cell.id}  {duration}"
        if outcome.reason:
            line += f"  {outcome.reason}"
        self.print_line(line)
        super().cell_ends(cell, outcome)

    def progress(self) -> str:
        """Return how many cells have ended, their statuses, and the elapsed and the remaining time."""
        parts = [f"{self._ended_cells} of {self._cell_count} cells"]
        for status, count in self._status_counts.items():
            parts.append(f"{count} {status}")
        parts.append(f"{duration_text(self._clock() - self._begin_s)} elapsed")
        remaining_s = self._remaining_s()
        if remaining_s is not None and remaining_s > 0.0:
            parts.append(f"about {duration_text(remaining_s)} left")
        return ", ".join(parts)

    def _remaining_s(self) -> float | None:
        """Return the time until all cells have ended, if each takes as long as the mean cell; None if none has run."""
        if not self._durations_s:
            return None
        mean_s = sum(self._durations_s) / len(self._durations_s)
        spent_s = 0.0  # on cells that are running
        for _, begin_s in self._running.values():
            spent_s += min(self._clock() - begin_s, mean_s)
        missing_cells = self._cell_count - self._ended_cells
        return (missing_cells * mean_s - spent_s) / self._slots


def stage_of(output: Path) -> str:
    """Return the stage of a running cell, from the last line of its output that names one."""
    for line in reversed(last_lines(output)):
        stage, colon, _ = line.partition(": ")
        if colon and stage in STAGE_NAMES.values():
            return stage
    return "starting"

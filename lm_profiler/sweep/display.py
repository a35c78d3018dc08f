"""Show the progress of a sweep: a line for each cell that has ended, and on a terminal a line on running cells."""

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
    """A watcher that prints lines, and on a terminal updates a last line on what runs in ``folder``."""

    def __init__(self, folder: Path, console: Console | None, clock: Callable[[], float]) -> None:
        self._folder, self._console, self._clock = folder, console or Console(), clock
        self._running: dict[str, tuple[str | None, float]] = {}
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def shown(self) -> AbstractContextManager[object]:
        """Show the last line within the context, if there is a terminal."""
        return self._live if self._console.is_terminal else nullcontext()

    def began(self, cell: Cell, device: str | None) -> None:
        self._running[cell.id] = device, self._clock()
        self.tick()

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        self._running.pop(cell.id, None)
        self.tick()

    def tick(self) -> None:
        if self._console.is_terminal:
            parts = [self.progress()]
            for cell, (device, since) in self._running.items():
                stage = stage_of(self._folder / cell / OUTPUT_FILE)
                on = "" if device is None else f" on {device}"
                parts.append(f"{stage}{on}: {cell}, {duration_text(self._clock() - since)}")
            line = Text(printable("; ".join(parts)), no_wrap=True, overflow="ellipsis")
            self._live.update(Group(line), refresh=True)  # a Text alone would be wrapped

    def progress(self) -> str:
        """Return the progress as text."""
        raise NotImplementedError

    def _say(self, line: str) -> None:
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class Display(LineDisplay):
    """Shows the progress of a sweep of ``cells`` in ``folder``; ``done`` of them already have an outcome.

    ``slots`` is the number that run at the same time.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        done: int,
        slots: int,
        folder: Path,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(folder, console, clock)
        self._cells, self._slots, self._done = len(cells), slots, done
        self._words: Counter[str] = Counter()
        self._ran_s, self._began_s = list[float](), clock()

    def ended(self, cell: Cell, outcome: CellOutcome) -> None:
        self._words[outcome.status] += 1
        self._done += 1
        if outcome.status != "refused":  # a refusal takes no time, so it does not predict other cells
            self._ran_s.append(outcome.duration_s)
        line = f"[{self._done}/{self._cells}] {outcome.status:<8} {cell.id}  {duration_text(outcome.duration_s)}"
        self._say(line + (f"  {outcome.reason}" if outcome.reason else ""))
        super().ended(cell, outcome)

    def progress(self) -> str:
        """Return how many cells have ended, their statuses, and the elapsed and the remaining time."""
        parts = [f"{self._done} of {self._cells} cells"]
        parts += [f"{count} {word}" for word, count in self._words.items()]
        parts.append(f"{duration_text(self._clock() - self._began_s)} elapsed")
        if self._ran_s:
            mean_s = sum(self._ran_s) / len(self._ran_s)
            spent_s = sum(min(self._clock() - since, mean_s) for _, since in self._running.values())
            left_s = ((self._cells - self._done) * mean_s - spent_s) / self._slots
            parts += [f"about {duration_text(left_s)} left"] * (left_s > 0.0)
        return ", ".join(parts)


def stage_of(output: Path) -> str:
    """Return the stage of a running cell, from the last line of its output that names one."""
    told = (line.partition(": ") for line in reversed(last_lines(output)))
    return next((stage for stage, colon, _ in told if colon and stage in STAGE_NAMES.values()), "starting")

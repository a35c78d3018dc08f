"""Who a sweep tells what becomes of its cells."""

from lm_profiler.record.sweep_files import Cell, CellOutcome


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def cell_begins(self, cell: Cell, device: str | None) -> None:
        self.heard.append(f"+{cell.id}")

    def cell_ends(self, cell: Cell, outcome: CellOutcome) -> None:
        self.heard.append(f"-{cell.id} {outcome.status}")

    def tick(self) -> None: ...

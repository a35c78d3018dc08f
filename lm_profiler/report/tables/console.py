"""The console that reports are printed to: nothing in a record is an order to the terminal, and no digit is cut off."""

from __future__ import annotations

from copy import copy
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lm_profiler.record.text import printable
from lm_profiler.report.tables.grid import pieces


class PlainConsole(Console):
    """Shows every text that it is given, cells of tables too, with control characters spelled out and no markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


def print_table(console: Console, table: Table) -> None:
    """Print ``table``; one that is wider than the console in pieces, each behind the first column.

    Columns to the right are figures and never shortened; others may take half of the width and are folded.
    """
    widths = [_width_of(console, table, at) for at in range(len(table.columns))]
    for shown in pieces(widths, console.width):
        console.print(_part(table, shown))


def _width_of(console: Console, table: Table, at: int) -> int:
    """As wide as the column would like to be, within what it may."""
    column = table.columns[at]
    alone = Measurement.get(console, console.options.update(width=100_000), _part(table, [at])).maximum
    wanted = min(alone, column.max_width or alone)
    return wanted if column.justify == "right" else min(wanted, console.width // 2)


def _part(table: Table, columns: list[int]) -> Table:
    part = copy(table)
    part.columns = [table.columns[at] for at in columns]
    return part

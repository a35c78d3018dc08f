"""A table for a terminal, line by line: a million rows take seconds, and no text in them can control the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TextIO

from rich.cells import cell_len, chop_cells

from lm_profiler.record.text import printable
from lm_profiler.report.tables.table import Table, TableCell

_GAP = 2
_LEAST = 16  # the least width of a column of text that is narrowed to keep a table in one piece
_BREAKS = dict.fromkeys(map(ord, "\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def plain(text: str) -> str:
    """Return ``text`` on one line, without anything that a terminal would obey."""
    return text if text.isprintable() else printable(text.translate(_BREAKS), keep="")


def terminal(table: Table, file: TextIO | None = None) -> str:
    """Return the table as the terminal behind ``file`` shows it; without a terminal, as wide as it needs to be."""
    screen = file is not None and file.isatty()
    most = shutil.get_terminal_size().columns if screen else sys.maxsize
    coloured = screen and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return "".join(f"{line}\n" for line in lines(table, most, coloured))


def lines(table: Table, most: int = sys.maxsize, coloured: bool = False) -> Iterator[str]:
    """Yield the lines of ``table``, no wider than ``most`` if its figures allow it; figures are never shortened."""
    if table.title:
        yield _styled(plain(table.title), "bold", coloured)
    yield from (plain(line).rstrip() for line in table.above)
    titles = [TableCell(text=title, style="bold") for title in table.titles]
    rows = [*([titles] if titles else []), *table.rows]
    texts = [[plain(cell.text) for cell in row] for row in rows]
    right = [heading.figures for heading in table.headings]
    widths = _narrowed([max(map(cell_len, column)) for column in zip(*texts, strict=True)], right, most)
    for shown in _pieces(widths, most):
        for row, text in zip(rows, texts, strict=True):
            parts = [(widths[at], right[at], row[at].style) for at in shown]
            folded = [_fold(text[at], widths[at]) for at in shown]
            yield from (_line(pieces, parts, coloured) for pieces in zip_longest(*folded, fillvalue=""))
    yield from (plain(line).rstrip() for line in table.below)


def _narrowed(widths: list[int], right: Sequence[bool], most: int) -> list[int]:
    narrower, text = list(widths), [at for at, figures in enumerate(right) if not figures]
    excess = sum(widths) + _GAP * (len(widths) - 1) - most
    while excess > 0 and any(narrower[at] > _LEAST for at in text):
        narrower[max(text, key=narrower.__getitem__)] -= 1
        excess -= 1
    if excess <= 0:
        return narrower
    return [width if figures else min(width, most // 2) for width, figures in zip(widths, right, strict=True)]


def _pieces(widths: Sequence[int], most: int) -> Iterator[list[int]]:
    shown = [0] if widths else []
    for at in range(1, len(widths)):
        if len(shown) > 1 and sum(widths[s] + _GAP for s in shown) + widths[at] > most:
            yield shown
            shown = [0]
        shown.append(at)
    if shown:
        yield shown


def _fold(text: str, width: int) -> list[str]:
    if cell_len(text) <= width:
        return [text]
    # textwrap counts characters, not cells: text with wide letters is cut anywhere instead of at spaces.
    return textwrap.wrap(text, width) if cell_len(text) == len(text) else chop_cells(text, width)


def _line(texts: Sequence[str], parts: Sequence[tuple[int, bool, str]], coloured: bool) -> str:
    padded = []
    for text, (width, right, style) in zip(texts, parts, strict=True):
        blank, shown = " " * (width - cell_len(text)), _styled(text, style, coloured)
        padded.append(blank + shown if right else shown + blank)
    return (" " * _GAP).join(padded).rstrip()


def _styled(text: str, style: str, coloured: bool) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if coloured and style and text else text

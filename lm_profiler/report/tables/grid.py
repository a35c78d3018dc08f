"""A table in fixed columns of text, written line by line: a million rows cost seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, chop_cells

_GAP = 2


def grid(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], most: int | None
) -> Iterator[str]:
    """The lines of a table, its titles first; no wider than ``most`` where that is given, if figures allow it.

    One that is wider comes in pieces, each behind the first column. Columns to the ``right`` are figures and never
    shortened; others may take half of the width and are folded. Each piece begins with its line of titles.
    """
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    if most is not None and sum(widths) + _GAP * (len(widths) - 1) > most:
        widths = [width if figures else min(width, most // 2) for width, figures in zip(widths, right, strict=True)]
    for shown in pieces(widths, most):
        for row in (titles, *rows):
            yield from _lines([(row[at], widths[at], right[at]) for at in shown])


def pieces(widths: Sequence[int], most: int | None) -> Iterator[list[int]]:
    """Which columns of such ``widths`` stand beside each other within ``most``, always behind the first."""
    shown = [0] if widths else []
    for at in range(1, len(widths)):
        if most is not None and len(shown) > 1 and sum(widths[s] + _GAP for s in shown) + widths[at] > most:
            yield shown
            shown = [0]
        shown.append(at)
    if shown:
        yield shown


def _lines(cells: Sequence[tuple[str, int, bool]]) -> Iterator[str]:
    """A row: one line, unless a cell has to be folded."""
    if all(cell_len(text) <= width for text, width, _ in cells):
        yield _line(cells)
        return
    folded = [[text] if cell_len(text) <= width else chop_cells(text, width) for text, width, _ in cells]
    for at in range(max(map(len, folded))):
        parts = [part[at] if at < len(part) else "" for part in folded]
        yield _line([(part, width, right) for part, (_, width, right) in zip(parts, cells, strict=True)])


def _line(cells: Sequence[tuple[str, int, bool]]) -> str:
    padded = []
    for text, width, right in cells:
        blank = " " * (width - cell_len(text))
        padded.append(blank + text if right else text + blank)
    return (" " * _GAP).join(padded).rstrip()

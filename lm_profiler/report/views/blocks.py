"""The blocks that views consist of, as JSON. The browser draws a kind of block in the same way in each view.

A table block has the ``Table`` that the terminal prints. A chart has the ``data`` and ``layout`` of plotly's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.report.pictures.drawing import PART_COLOURS
from lm_profiler.report.tables.table import Table

Json = dict[str, Any]

CHART_PX = 360  # the usual height of a chart
_CHART_FRAME_PX = 100  # the height of a chart's axis and legend
_FACT_COLUMNS = 3  # the columns of a table of facts: name, figure, meaning
# the styles of single cells; a row that begins with "bold" is bold as a whole
_STYLES = ("green", "yellow", "red")
_ROW_PX = 28  # the height of a row in a chart of rows


def _filled(block: Json) -> Json:
    """Return ``block`` without empty values, which a page of many runs would contain thousands of times."""
    return {key: value for key, value in block.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [])  # 0 is a figure


def card(title: str, *blocks: Json, words: Sequence[str] = ()) -> Json:
    """Return a framed part of a view; ``words`` such as "noisy" stand beside its title."""
    block = {
        "kind": "card",
        "title": title,
        "words": list(words),
        "blocks": list(blocks),
    }
    return _filled(block)


def fold(title: str, *blocks: Json) -> Json:
    """Return a card that shows only its title until a user opens it."""
    return {"kind": "fold", "title": title, "blocks": list(blocks)}


def side_by_side(*blocks: Json) -> Json:
    """Return blocks that stand side by side where the window is wide enough."""
    return {"kind": "beside", "blocks": list(blocks)}


def line(text: str, look: str = "") -> Json:
    """Return a paragraph; ``look`` is "headline", "quiet", "note", "error", or empty for plain text."""
    return _filled({"kind": "line", "text": text, "look": look})


def section(title: str, *blocks: Json) -> Json:
    """Return a part of a card, with a small title."""
    return {"kind": "section", "title": title, "blocks": list(blocks)}


def command(text: str) -> Json:
    """Return a command line with a button that copies it."""
    return {"kind": "command", "text": text}


def choice(label: str, choices: Mapping[str, Sequence[Json]]) -> Json:
    """Return groups of blocks of which one is shown at a time: the first, until a user chooses another title."""
    titled = []
    for title, blocks in choices.items():
        titled.append({"title": title, "blocks": list(blocks)})
    return {"kind": "choice", "label": label, "choices": titled}


def table(
    table: Table,
    is_long: bool = False,
    shades: Sequence[Sequence[Json | None]] = (),
    first_sort: str = "",
) -> list[Json]:
    """Return the lines above ``table``, the table, and the lines below it.

    A long table can be sorted and filtered; ``first_sort`` is the title of the column that sorts it, the largest first.
    ``shades`` has the colour and strength of each cell.
    """
    if table.verbatim:
        lines_above = [{"kind": "verbatim", "text": "\n".join(table.above)}]
    else:
        lines_above = [line(text, "quiet") for text in table.above if text]
    lines_below = [line(text, "quiet") for text in table.below]
    if not table.headings:
        return [*lines_above, *lines_below]
    block = table_json(table)
    if is_long:
        values = {}
        for index in _figure_columns(table):
            values[str(index)] = [row[index].value for row in table.rows]
        block |= {"kind": "long table", "values": values, "sorted_by": first_sort}
    if shades:
        block["shades"] = [list(row) for row in shades]
    return [*lines_above, block, *lines_below]


def _figure_columns(table: Table) -> list[int]:
    """Return the indices of the columns of figures."""
    indices = []
    for index, heading in enumerate(table.headings):
        if heading.figures:
            indices.append(index)
    return indices


# The meanings of all figures. Tables refer to them by index, so that a page of a hundred runs has each of them once.
MEANINGS = list(dict.fromkeys(figure.meaning for figure in QUANTITIES.values()))
_MEANING_INDEXES = {meaning: index for index, meaning in enumerate(MEANINGS)}


def table_json(table: Table) -> Json:
    """Return a table block: the titles, the text of each cell, and the style of cells that have one.

    A table of facts has no titles. Its third column becomes the tooltip of the row.
    """
    titles = [heading.title for heading in table.headings]
    rows = []
    for cells in table.rows:
        rows.append([cell.text for cell in cells])
    block: Json = {"kind": "table"}
    is_of_facts = len(titles) == _FACT_COLUMNS and not table.titles
    if is_of_facts:
        # the index of the meaning, or the text itself if it is no figure's meaning
        block["tips"] = [_MEANING_INDEXES.get(row[-1], row[-1]) for row in rows]
        titles = titles[:-1]
        rows = [row[:-1] for row in rows]
    if any(row and row[0] in PART_COLOURS for row in rows):
        # the name of a phase has its colour
        block["colours"] = [PART_COLOURS.get(row[0], "none") for row in rows]
    bold_rows = []
    styles = []
    for index, row in enumerate(table.rows):
        if row and row[0].style == "bold":
            bold_rows.append(index)
        for column, cell in enumerate(row):
            if cell.style in _STYLES:
                styles.append([index, column, cell.style])
    special_looks = {
        "bold_rows": bold_rows,
        "styles": styles,
        "titles": titles if any(titles) else [],
        "figures": _figure_columns(table),
    }
    return block | _filled(special_looks) | {"rows": rows}


def shade(colour: str, strength: float) -> Json | None:
    """Return the background colour of a cell, strongest at a ``strength`` of 1; None for a strength near 0."""
    if strength <= 0.02:
        return None
    return {"colour": colour, "percent": round(70 * min(1.0, strength), 1)}


def chart(data: Sequence[Json], layout: Json, rows: int | None = None) -> Json:
    """Return a chart, as high as its ``rows`` need if it has rows. The script adds fonts and colours of the page."""
    height = CHART_PX if rows is None else _CHART_FRAME_PX + _ROW_PX * rows
    return {"kind": "chart", "data": list(data), "layout": {"height": height, **layout}}


def escaped(text: str) -> str:
    """Return ``text`` escaped for a chart, because plotly interprets markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


# -- bars --------------------------------------------------------------------------------------------------------------


def bars(headings: Sequence[str], rows: Sequence[Json]) -> Json:
    """Return a block of rows, each with a title, a bar and cells; ``headings`` are the headings of these columns."""
    return {"kind": "bars", "headings": list(headings), "rows": list(rows)}


def bar(
    title: str,
    pieces: Sequence[Json],
    cells: Sequence[str],
    *,
    name: str = "",
    tip: str = "",
    inside: Sequence[Json] = (),
    whisker: Json | None = None,
    is_total: bool = False,
) -> Json:
    """Return a row of ``bars``; a row with blocks ``inside`` can be opened."""
    row = {
        "title": title,
        "pieces": list(pieces),
        "cells": list(cells),
        "name": name,
        "tip": tip,
        "inside": list(inside),
        "whisker": whisker,
        "is_total": is_total,
    }
    return _filled(row)


def piece(
    start: float, end: float, colour: str | None, tip: str, is_pale: bool = False
) -> Json:
    """Return a piece of a bar between two shares of the bar's track; a piece without a colour is hatched."""
    begin, end = sorted((start, end))
    block = {
        "left": begin,
        "width": end - begin,
        "colour": colour,
        "tip": tip,
        "is_pale": is_pale,
    }
    return _filled(block)


def whisker(
    low: float | None, high: float | None, scale: float, tip: str
) -> Json | None:
    """Return the line that shows the interval of a bar; None if an end is unknown."""
    if low is None or high is None:
        return None
    return {"left": low * scale, "width": (high - low) * scale, "tip": tip}

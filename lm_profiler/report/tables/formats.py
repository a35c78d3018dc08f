"""Write a table for a terminal, or as Markdown, LaTeX, Typst, CSV, JSON or Parquet.

Control characters and markup in cells are escaped.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TextIO

from rich.cells import cell_len, chop_cells

from lm_profiler.record.text import printable
from lm_profiler.report.tables.table import Heading, Table, TableCell

SUFFIXES = {
    ".txt": "terminal", ".md": "markdown", ".csv": "csv", ".json": "json", ".tex": "latex", ".typ": "typst",
    ".parquet": "parquet", ".html": "html",
}  # fmt: skip
# the formats with SI values and separate columns for the ends of intervals
FOR_PROGRAMS = ("csv", "json", "parquet")


def render(tables: Sequence[Table], kind: str, file: TextIO | None = None) -> str:
    """Return ``tables`` one after the other in the format ``kind``; on a terminal a blank line precedes each title."""
    if kind != "terminal":
        to_text = _TEXT_FUNCTIONS[kind]
        return "\n".join(to_text(table) for table in tables)
    texts: list[str] = []
    for table in tables:
        if table.title and texts:
            texts.append("\n")
        texts.append(terminal(table, file))
    return "".join(texts)


def _escaped_texts(table: Table, escape: Callable[[str], str]) -> list[list[str]]:
    """Return the texts of the headings and of each row, escaped and padded to the width of their columns."""
    texts = [[escape(heading.title) for heading in table.headings]]
    for row in table.rows:
        texts.append([escape(cell.text) for cell in row])
    widths = _column_widths(texts)
    padded_rows = []
    for row_texts in texts:
        padded = []
        for text, heading, width in zip(row_texts, table.headings, widths, strict=True):
            padded.append(text.rjust(width) if heading.figures else text.ljust(width))
        padded_rows.append(padded)
    return padded_rows


def _column_widths(texts: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column: that of its longest text, where a heading, the first text, gets two more."""
    widths = []
    for column in zip(*texts, strict=True):
        title = column[0]
        longest = max(len(text) for text in column)
        widths.append(max(longest, len(title) + 2))
    return widths


# -- Markdown ----------------------------------------------------------------------------------------------------------

_MARKDOWN_SPECIAL = re.compile(r"[\\`*|~]|\](?=\()|(?<!\w)_|_(?!\w)")
# the start of an entity or of a tag
_HTML_START = re.compile(r"&(?=#?\w+;)|<")
_HTML_ENTITIES = {"&": "&amp;", "<": "&lt;"}
# the start of a heading, a quotation or a list, up to the place of an escaping backslash
_LINE_START = re.compile(r"^(\d+(?=[.)])|(?=[#>+-]))")


def markdown(table: Table) -> str:
    """Return Markdown: the title, and a table between the lines above and below it, which become lists."""
    blocks = []
    if table.title:
        blocks.append(f"## {_markdown(table.title)}")
    blocks += fenced(table.above) if table.verbatim else _markdown_list(table.above)
    if table.headings:
        blocks.append(_pipe_table(table))
    blocks += _markdown_list(table.below)
    return "\n\n".join(blocks) + "\n"


def _pipe_table(table: Table) -> str:
    """Return the rows of ``table`` in the syntax of Markdown, figures aligned right."""
    titles, *rows = _escaped_texts(table, _markdown)
    rules = []
    for heading, title in zip(table.headings, titles, strict=True):
        dashes = "-" * (len(title) + 1)
        rules.append(f"{dashes}:" if heading.figures else f":{dashes}")
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(rules)}|"]
    for texts in rows:
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def _markdown(text: str) -> str:
    escaped = _MARKDOWN_SPECIAL.sub(r"\\\g<0>", single_line(text))
    # Angle brackets become entities: not every Markdown takes a backslash before one.
    return _HTML_START.sub(lambda match: _HTML_ENTITIES[match[0]], escaped)


def _markdown_list(lines: Sequence[str]) -> list[str]:
    """Return a block with a list of the lines that are not empty; no block if there are none.

    Lines that begin with a space are nested items.
    """
    items = []
    for line in filter(None, lines):
        indent = " " * 4 if line[0].isspace() else ""
        text = _LINE_START.sub(r"\1\\", _markdown(line.strip()))
        items.append(f"{indent}- {text}")
    if not items:
        return []
    return ["\n".join(items)]


def fenced(lines: Sequence[str]) -> list[str]:
    """Return a fenced block of Markdown with ``lines``, which are shown unchanged except for control characters."""
    text = "\n".join(single_line(line) for line in lines)
    if not text:
        return []
    # The fence has to be longer than any run of backquotes in the text.
    backquote_runs = re.findall("`+", text)
    longest_run = max(map(len, backquote_runs), default=0)
    fence = "`" * max(3, longest_run + 1)
    return [f"{fence}text\n{text}\n{fence}"]


# -- LaTeX and Typst ---------------------------------------------------------------------------------------------------

_LATEX_ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
    "\\": r"\textbackslash{}",
    "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}",
}
_LATEX_TABLE = str.maketrans(_LATEX_ESCAPES)


def latex(table: Table) -> str:
    """Return a ``tabular`` for the booktabs package, for use with ``\\input``; the lines around it are comments."""
    alignments = "".join("r" if heading.figures else "l" for heading in table.headings)
    titles, *rows = [_latex_row(texts) for texts in _escaped_texts(table, _latex)]
    body = [rf"\begin{{tabular}}{{{alignments}}}", r"\toprule", titles, r"\midrule"]
    body += rows
    body += [r"\bottomrule", r"\end{tabular}"]
    return _with_comments("%", table, body)


def _latex_row(texts: Sequence[str]) -> str:
    cells = " & ".join(texts)
    return rf" {cells} \\"


def _latex(text: str) -> str:
    """Return ``text`` with LaTeX's special characters escaped."""
    escaped = single_line(text).translate(_LATEX_TABLE)
    # At the beginning of a row, after two backslashes or a rule, a bracket would open an argument.
    if escaped.startswith("["):
        return f"{{[}}{escaped[1:]}"
    return escaped


def typst(table: Table) -> str:
    """Return a ``table``, for use with ``#include``; the lines around it are comments."""
    titles, *rows = [", ".join(texts) for texts in _escaped_texts(table, _typst)]
    alignments = ", ".join(
        "right" if heading.figures else "left" for heading in table.headings
    )
    body = [
        "#table(",
        f"  columns: {len(table.headings)}, align: ({alignments},), stroke: none,",
        f"  table.hline(), table.header({titles}), table.hline(stroke: 0.5pt),",
    ]
    body += [f"  {row}," for row in rows]
    body += ["  table.hline(),", ")"]
    return _with_comments("//", table, body)


def _typst(text: str) -> str:
    # cells are strings, not markup: only quotation marks and backslashes are special in them
    escaped = single_line(text).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _with_comments(mark: str, table: Table, body: Iterable[str]) -> str:
    """Return ``body`` between the lines above and below the table, which become comments.

    ``body`` is left out if the table has no columns.
    """
    lines = [_comment(mark, line) for line in table.above]
    if table.headings:
        lines += body
    lines += [_comment(mark, line) for line in table.below]
    return "\n".join(lines) + "\n"


def _comment(mark: str, line: str) -> str:
    return f"{mark} {single_line(line)}".rstrip()


# -- files for programs ------------------------------------------------------------------------------------------------

# Text that a spreadsheet would evaluate as a formula: it starts with one of these characters, and is not a number.
_FORMULA = re.compile(r"[=@\t\r]|[+-](?!\d*\.?\d+(?:[eE][+-]?\d+)?$)")
# Characters that JSON does not escape, but that terminals and editors interpret or hide.
_HIDDEN_CHARACTERS = re.compile(
    "[\x7f-\xa0\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def csv_text(table: Table) -> str:
    """Return CSV with a header; an apostrophe precedes text that a spreadsheet would evaluate as a formula."""
    fields = table.fields()
    buffer = io.StringIO()
    # csv quotes only characters of its line terminator: with CRLF, a bare carriage return is quoted too.
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow([_without_formula(name) for name in fields])
    for row in zip(*fields.values(), strict=True):
        writer.writerow([_without_formula(_value_or_json(value)) for value in row])
    return buffer.getvalue().replace("\r\n", "\n")


def _without_formula(value: Any) -> Any:
    # Spreadsheets expect an apostrophe (OWASP, "CSV Injection").
    if isinstance(value, str) and _FORMULA.match(value):
        return f"'{value}"
    return value


def json_text(table: Table) -> str:
    text = json.dumps(table.records(), indent=1, ensure_ascii=False) + "\n"
    return _HIDDEN_CHARACTERS.sub(lambda match: json.dumps(match[0])[1:-1], text)


def parquet(table: Table) -> bytes:
    """Return the table as the content of a Parquet file, with a column for each field."""
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name, values in table.fields().items():
        columns[name] = _with_one_type([_value_or_json(value) for value in values])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _value_or_json(value: Any) -> Any:
    """Return ``value`` itself, or its JSON if it is a list or a mapping."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return json.dumps(value, default=str)


def _with_one_type(values: list[Any]) -> list[Any]:
    """Return the values of a column for Parquet, in which a column has one type: mixed types become text."""
    types = {type(value) for value in values if value is not None}
    has_one_type = len(types) < 2 or types == {int, float}
    if has_one_type:
        return values
    return [None if value is None else str(value) for value in values]


_TEXT_FUNCTIONS = {
    "markdown": markdown,
    "latex": latex,
    "typst": typst,
    "csv": csv_text,
    "json": json_text,
}


# -- the terminal ------------------------------------------------------------------------------------------------------

_GAP = "  "  # the gap between columns
# the width to which a column of text may be narrowed, so that the table stays in one piece
_LEAST_WIDTH = 16
_LINE_BREAKS = "\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SPACES_FOR_BREAKS = str.maketrans(dict.fromkeys(_LINE_BREAKS, " "))
_ANSI_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def single_line(text: str) -> str:
    """Return ``text`` on one line, without a terminal's control characters."""
    if text.isprintable():
        return text
    return printable(text.translate(_SPACES_FOR_BREAKS), keep="")


def terminal(table: Table, file: TextIO | None = None) -> str:
    """Return the table as text that fits the terminal behind ``file``; without a terminal the width is not limited."""
    max_width = sys.maxsize
    is_coloured = False
    if file is not None and file.isatty():
        max_width = shutil.get_terminal_size().columns
        is_coloured = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return "".join(f"{line}\n" for line in lines(table, max_width, is_coloured))


def lines(
    table: Table, max_width: int = sys.maxsize, is_coloured: bool = False
) -> Iterator[str]:
    """Yield the lines of ``table``, at most ``max_width`` wide if possible; figures are never shortened.

    A table that is too wide is cut into pieces, which are printed one below the other. Each piece repeats the first
    column.
    """
    if table.title:
        yield _with_style(single_line(table.title), "bold", is_coloured)
    for line in table.above:
        yield single_line(line).rstrip()

    rows = list(table.rows)
    if table.titles:
        rows.insert(0, [TableCell(text=title, style="bold") for title in table.titles])
    widths = _fitting_widths(_needed_widths(rows), table.headings, max_width)
    for piece in _columns_of_pieces(widths, max_width):
        for row in rows:
            yield from _row_lines(row, piece, widths, table.headings, is_coloured)

    for line in table.below:
        yield single_line(line).rstrip()


def _row_lines(
    row: Sequence[TableCell],
    piece: Sequence[int],
    widths: Sequence[int],
    headings: Sequence[Heading],
    is_coloured: bool,
) -> Iterator[str]:
    """Yield the lines of one row of a piece of the table; long texts take several lines.

    ``piece`` has the indices of the columns of the piece, ``widths`` the width of each column of the table.
    """
    folded_texts = []
    for index in piece:
        folded_texts.append(_folded_text(single_line(row[index].text), widths[index]))
    for texts in zip_longest(*folded_texts, fillvalue=""):
        padded = []
        for index, text in zip(piece, texts, strict=True):
            blank = " " * (widths[index] - cell_len(text))
            styled = _with_style(text, row[index].style, is_coloured)
            is_right_aligned = headings[index].figures
            padded.append(blank + styled if is_right_aligned else styled + blank)
        yield _GAP.join(padded).rstrip()


def _needed_widths(rows: Sequence[Sequence[TableCell]]) -> list[int]:
    """Return for each column the width in terminal cells of its longest text."""
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(cell_len(single_line(cell.text)) for cell in column))
    return widths


def _fitting_widths(
    widths: Sequence[int], headings: Sequence[Heading], max_width: int
) -> list[int]:
    """Return ``widths``, with columns of text narrowed so that the table fits into ``max_width``, the widest first.

    If the table cannot fit, columns of text get at most half of ``max_width``.
    """
    text_columns = [
        index for index, heading in enumerate(headings) if not heading.figures
    ]
    narrowed = list(widths)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - max_width
    while excess > 0:
        widest = max(text_columns, key=narrowed.__getitem__, default=None)
        if widest is None or narrowed[widest] <= _LEAST_WIDTH:
            break
        narrowed[widest] -= 1
        excess -= 1
    if excess <= 0:
        return narrowed
    halved = list(widths)
    for index in text_columns:
        halved[index] = min(widths[index], max_width // 2)
    return halved


def _columns_of_pieces(widths: Sequence[int], max_width: int) -> Iterator[list[int]]:
    """Yield the indices of the columns of each piece: the first column, and as many others as fit."""
    if not widths:
        return
    piece = [0]
    for index in range(1, len(widths)):
        width_so_far = sum(widths[column] + len(_GAP) for column in piece)
        if len(piece) > 1 and width_so_far + widths[index] > max_width:
            yield piece
            piece = [0]
        piece.append(index)
    yield piece


def _folded_text(text: str, width: int) -> list[str]:
    """Return ``text`` as lines that are at most ``width`` wide."""
    if cell_len(text) <= width:
        return [text]
    # textwrap counts characters, not terminal cells, so text with wide letters is cut at any letter instead.
    has_wide_letters = cell_len(text) != len(text)
    if has_wide_letters:
        return chop_cells(text, width)
    return textwrap.wrap(text, width)


def _with_style(text: str, style: str, is_coloured: bool) -> str:
    if not (is_coloured and style and text):
        return text
    return f"\x1b[{_ANSI_CODES[style]}m{text}\x1b[0m"

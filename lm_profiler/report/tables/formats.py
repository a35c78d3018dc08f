"""A table as text, Markdown, LaTeX, CSV, JSON or Parquet; no name or reason in it can break any of them."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from typing import Any, TextIO

from lm_profiler.record.text import printable
from lm_profiler.report.tables.grid import grid
from lm_profiler.report.tables.table import Table

SUFFIXES = {
    ".txt": "terminal",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".tex": "latex",
    ".parquet": "parquet",
    ".html": "html",
}
FOR_PROGRAMS = ("csv", "json", "parquet")
"""These carry SI values, with the ends of intervals in columns of their own."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_BREAKS = dict.fromkeys(map(ord, "\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
_MARKDOWN = re.compile(r"[\\`*|~]|\](?=\()|(?<!\w)_|_(?!\w)")
_HIDDEN = re.compile("[\x7f-\xa0\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What JSON lets through and a terminal or an editor would obey, or not show."""
_ENTITIES = {"&": "&amp;", "<": "&lt;"}
_OPENS = re.compile(r"&(?=#?\w+;)|<")


def plain(text: str) -> str:
    """``text`` on one line, with nothing in it that a terminal would obey."""
    return text if text.isprintable() else printable(text.translate(_BREAKS), keep="")


def terminal(table: Table, file: TextIO | None = None) -> str:
    """The table as the terminal behind ``file`` shows it; without one, as wide as it needs to be."""
    screen = file is not None and file.isatty()
    titles = [plain(heading.title) for heading in table.headings]
    rows = [[plain(cell.text) for cell in row] for row in table.rows]
    most = shutil.get_terminal_size().columns if screen else None
    shown = grid(titles, rows, [heading.figures for heading in table.headings], most)
    return "".join(f"{line.rstrip()}\n" for line in (*map(plain, table.above), *shown, *map(plain, table.below)))


def markdown(table: Table) -> str:
    """A pipe table, with the lines around it as paragraphs."""
    titles = [_markdown(heading.title) for heading in table.headings]
    rows = [[_markdown(cell.text) for cell in row] for row in table.rows]
    right = [heading.figures for heading in table.headings]
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(len(column[0]) + 2, *map(len, column)) for column in columns]
    rule = [f"{'-' * (width + 1)}:" if to else f":{'-' * (width + 1)}" for width, to in zip(widths, right, strict=True)]
    forms = [f" {{:{'>' if to else '<'}{width}}} " for width, to in zip(widths, right, strict=True)]
    form = f"|{'|'.join(forms)}|"
    shown = "\n".join([form.format(*titles), f"|{'|'.join(rule)}|", *(form.format(*row) for row in rows)])
    above = fenced(table.above) if table.verbatim else list(map(_markdown, table.above))
    return "\n\n".join([*above, shown, *map(_markdown, table.below)]) + "\n"


def _markdown(text: str) -> str:
    """A bracket as an entity: not every Markdown takes a backslash before one."""
    return _OPENS.sub(lambda found: _ENTITIES[found[0]], _MARKDOWN.sub(r"\\\g<0>", plain(text)))


def fenced(lines: list[str]) -> list[str]:
    """``lines`` as a block of Markdown that shows them as they are; controls are spelled out."""
    text = "\n".join(map(plain, lines))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}text\n{text}\n{fence}"]


def latex(table: Table) -> str:
    """A ``tabular`` for the booktabs package, to be taken in with ``\\input``; the lines around it are comments."""
    from tabulate import tabulate  # type: ignore[import-untyped]

    grid = tabulate(
        [[plain(cell.text) for cell in row] for row in table.rows],
        [plain(heading.title) for heading in table.headings],
        tablefmt="latex_booktabs",
        disable_numparse=True,
        colalign=["right" if heading.figures else "left" for heading in table.headings],
    )
    grid = re.sub(r"^ \[", " {[}", grid, flags=re.MULTILINE)  # after \\ or \midrule a bracket opens an argument
    comments = [[f"% {plain(line)}".rstrip() for line in lines] for lines in (table.above, table.below)]
    return "\n".join([*comments[0], grid, *comments[1]]) + "\n"


def csv_text(table: Table) -> str:
    """A header and a line a row.

    Text that a spreadsheet would take for a formula, because it begins with ``=``, ``+``, ``-``, ``@``, a tab or a
    carriage return and is no number, has an apostrophe before it, as is usual (OWASP, "CSV Injection").
    """
    fields = _fields(table)
    text = io.StringIO()
    # Only characters of the line's end are quoted within fields, and a bare carriage return would tear a row.
    writer = csv.writer(_Lines(text), lineterminator="\r\n")
    writer.writerow(list(map(_harmless, fields)))
    writer.writerows([_harmless(_scalar(value)) for value in row] for row in zip(*fields.values(), strict=True))
    return text.getvalue()


class _Lines:
    """Takes whole rows that end in CRLF, and ends them with a line feed alone."""

    def __init__(self, to: TextIO) -> None:
        self._to = to

    def write(self, row: str) -> int:
        return self._to.write(row[:-2] + "\n")


def _harmless(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA) and not _is_number(value):
        return f"'{value}"
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def json_text(table: Table) -> str:
    """A list of objects, one a row."""
    fields = _fields(table)
    names = [json.dumps(name, ensure_ascii=False) for name in fields]
    rows = (
        ",\n".join(f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in zip(names, row, strict=True))
        for row in zip(*fields.values(), strict=True)
    )
    text = ",\n".join(f" {{\n{row}\n }}" for row in rows)
    return _HIDDEN.sub(_escaped, f"[\n{text}\n]\n" if text else "[]\n")


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def parquet(table: Table) -> bytes:
    """A Parquet file."""
    import pyarrow
    import pyarrow.parquet

    columns = {name: _one_type([_scalar(value) for value in values]) for name, values in _fields(table).items()}
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), content)
    return content.getvalue()


def _fields(table: Table) -> dict[str, list[Any]]:
    return {_unicode(name): [_unicode(value) for value in values] for name, values in table.fields().items()}


def _unicode(value: Any) -> Any:
    """Text that UTF-8 can hold: the name of a folder may be of bytes that no encoding has."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _scalar(value: Any) -> Any:
    """Lists and mappings, which an option may be, as JSON."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)


def _one_type(values: list[Any]) -> list[Any]:
    """``values`` as text where they are of several types, which a column of Parquet cannot hold."""
    types = {type(value) for value in values if value is not None}
    return values if len(types) < 2 or types == {int, float} else [None if v is None else str(v) for v in values]

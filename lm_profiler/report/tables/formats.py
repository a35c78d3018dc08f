"""A table for a terminal, as Markdown, LaTeX, Typst, CSV, JSON or Parquet; safe against controls and markup."""

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
from lm_profiler.report.tables.table import Table, TableCell

SUFFIXES = {
    ".txt": "terminal", ".md": "markdown", ".csv": "csv", ".json": "json", ".tex": "latex", ".typ": "typst",
    ".parquet": "parquet", ".html": "html",
}  # fmt: skip
# the formats with SI values and separate columns for the ends of intervals
FOR_PROGRAMS = ("csv", "json", "parquet")

# the start of a heading, a quotation or a list, up to the place of an escaping backslash
_LEADS = re.compile(r"^(\d+(?=[.)])|(?=[#>+-]))")
_WORDS = {"~": r"\textasciitilde{}", "^": r"\^{}", "\\": r"\textbackslash{}"}
_LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | _WORDS | {c: rf"\ensuremath{{{c}}}" for c in "<>"})
# text that a spreadsheet takes for a formula: it starts with one of these, and is not a number
_FORMULA = re.compile(r"[=@\t\r]|[+-](?!\d*\.?\d+(?:[eE][+-]?\d+)?$)")
_MARKDOWN = re.compile(r"[\\`*|~]|\](?=\()|(?<!\w)_|_(?!\w)")
# characters that JSON leaves unchanged, and that a terminal or an editor would obey or hide
_HIDDEN = re.compile("[\x7f-\xa0\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_ENTITIES = {"&": "&amp;", "<": "&lt;"}
_OPENS = re.compile(r"&(?=#?\w+;)|<")


def render(tables: Sequence[Table], kind: str, file: TextIO | None = None) -> str:
    """Return ``tables`` one below the other in the format ``kind``, a blank line before each title."""
    if kind == "terminal":
        return "".join("\n" * bool(at and table.title) + terminal(table, file) for at, table in enumerate(tables))
    return "\n".join(_TEXT[kind](table) for table in tables)


def markdown(table: Table) -> str:
    """Return a pipe table below its title, with the lines around it as lists."""
    title = [f"## {_markdown(table.title)}"] if table.title else []
    above = fenced(table.above) if table.verbatim else _listed(table.above)
    return "\n\n".join([*title, *above, *_piped(table), *_listed(table.below)]) + "\n"


def _piped(table: Table) -> list[str]:
    if not table.headings:
        return []
    form = _form(table, _markdown)
    dashes = zip(table.headings, ("-" * (len(title) + 1) for title in form[0]), strict=True)
    rule = [f"{line}:" if heading.figures else f":{line}" for heading, line in dashes]
    titles, *rows = (f"| {' | '.join(cells)} |" for cells in form)
    return ["\n".join([titles, f"|{'|'.join(rule)}|", *rows])]


def _form(table: Table, escape: Callable[[str], str]) -> list[list[str]]:
    texts = [[escape(heading.title) for heading in table.headings]]
    texts += [[escape(cell.text) for cell in row] for row in table.rows]
    widths = [max(len(column[0]) + 2, *map(len, column)) for column in zip(*texts, strict=True)]
    forms = [f"{{:{'>' if of.figures else '<'}{width}}}" for of, width in zip(table.headings, widths, strict=True)]
    return [[form.format(text) for form, text in zip(forms, row, strict=True)] for row in texts]


def _markdown(text: str) -> str:
    # Angle brackets become entities: not every Markdown takes a backslash before one.
    return _OPENS.sub(lambda match: _ENTITIES[match[0]], _MARKDOWN.sub(r"\\\g<0>", plain(text)))


def _listed(lines: Sequence[str]) -> list[str]:
    shown = [
        " " * 4 * line[:1].isspace() + "- " + _LEADS.sub(r"\1\\", _markdown(line.strip())) for line in lines if line
    ]
    return ["\n".join(shown)] if shown else []


def fenced(lines: Sequence[str]) -> list[str]:
    """Return ``lines`` as a block of Markdown that shows them as they are; controls are spelled out."""
    text = "\n".join(map(plain, lines))
    # The fence has to be longer than any run of backquotes in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}text\n{text}\n{fence}"] if text else []


def latex(table: Table) -> str:
    """Return a ``tabular`` for the booktabs package, for use with ``\\input``; the lines around it are comments."""
    sides = "".join("r" if heading.figures else "l" for heading in table.headings)
    head, *shown = [" " + " & ".join(row) + r" \\" for row in _form(table, _latex)]
    top, bottom = [rf"\begin{{tabular}}{{{sides}}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}"]
    return _commented("%", table, [*top, head, r"\midrule", *shown, *bottom])


def _commented(mark: str, table: Table, body: Iterable[str]) -> str:
    above, below = ([f"{mark} {plain(line)}".rstrip() for line in lines] for lines in (table.above, table.below))
    return "\n".join([*above, *(body if table.headings else ()), *below]) + "\n"


def _latex(text: str) -> str:
    text = plain(text).translate(_LATEX)
    # At the beginning of a row, after two backslashes or a rule, a bracket would open an argument.
    return f"{{[}}{text[1:]}" if text.startswith("[") else text


def typst(table: Table) -> str:
    """Return a ``table``, for use with ``#include``; the lines around it are comments."""
    titles, *rows = (f"{', '.join(row)}" for row in _form(table, _typst))
    sides = ", ".join("right" if heading.figures else "left" for heading in table.headings)
    body = [
        "#table(",
        f"  columns: {len(table.headings)}, align: ({sides},), stroke: none,",
        f"  table.hline(), table.header({titles}), table.hline(stroke: 0.5pt),",
        *(f"  {row}," for row in rows),
        "  table.hline(),",
        ")",
    ]
    return _commented("//", table, body)


def _typst(text: str) -> str:
    # cells are strings, not markup: only quotation marks and backslashes are special in them
    escaped = plain(text).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def csv_text(table: Table) -> str:
    """Return a header and a line for each row; text like a formula has an apostrophe before it."""
    # Spreadsheets expect an apostrophe (OWASP, "CSV Injection").
    fields = table.fields()
    text = io.StringIO()
    # csv quotes only characters of its line terminator: with CRLF, a bare carriage return is quoted too.
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(list(map(_harmless, fields)))
    writer.writerows([_harmless(_scalar(value)) for value in row] for row in zip(*fields.values(), strict=True))
    return text.getvalue().replace("\r\n", "\n")


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def json_text(table: Table) -> str:
    text = json.dumps(table.records(), indent=1, ensure_ascii=False) + "\n"
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def parquet(table: Table) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = {name: _one_type([_scalar(value) for value in values]) for name, values in table.fields().items()}
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), content)
    return content.getvalue()


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)


def _one_type(values: list[Any]) -> list[Any]:
    types = {type(value) for value in values if value is not None}
    return values if len(types) < 2 or types == {int, float} else [None if v is None else str(v) for v in values]


_TEXT = {"markdown": markdown, "latex": latex, "typst": typst, "csv": csv_text, "json": json_text}


# -- the terminal ------------------------------------------------------------------------------------------------------

_GAP = 2
_LEAST = 16  # the least width of a column of text that is narrowed to keep a table in one piece
_BREAKS = dict.fromkeys(map(ord, "\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def plain(text: str) -> str:
    """Return ``text`` on one line, without a terminal's control characters."""
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
            for pieces in zip_longest(*(_fold(text[at], widths[at]) for at in shown), fillvalue=""):
                padded = []
                for at, piece in zip(shown, pieces, strict=True):
                    blank = " " * (widths[at] - cell_len(piece))
                    styled = _styled(piece, row[at].style, coloured)
                    padded.append(blank + styled if right[at] else styled + blank)
                yield (" " * _GAP).join(padded).rstrip()
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


def _styled(text: str, style: str, coloured: bool) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if coloured and style and text else text

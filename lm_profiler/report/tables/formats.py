"""A table as text, Markdown, LaTeX, Typst, CSV, JSON or Parquet; no name or reason in it can break any of them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.terminal import plain, terminal

SUFFIXES = {
    ".txt": "terminal",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".tex": "latex",
    ".typ": "typst",
    ".parquet": "parquet",
    ".html": "html",
}
# the formats that carry SI values, with the ends of intervals in columns of their own
FOR_PROGRAMS = ("csv", "json", "parquet")

# the beginning of a heading, a quotation or a list, up to where a backslash makes it plain text
_LEADS = re.compile(r"^(\d+(?=[.)])|(?=[#>+-]))")
_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\^{}",
        "\\": r"\textbackslash{}",
        "<": r"\ensuremath{<}",
        ">": r"\ensuremath{>}",
    }
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN = re.compile(r"[\\`*|~]|\](?=\()|(?<!\w)_|_(?!\w)")
# characters that JSON leaves as they are, and that a terminal or an editor would obey or hide
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
    above, below = ([f"% {plain(line)}".rstrip() for line in lines] for lines in (table.above, table.below))
    sides = "".join("r" if heading.figures else "l" for heading in table.headings)
    shown = [" " + " & ".join(row) + r" \\" for row in _form(table, _latex)]
    top, bottom = [rf"\begin{{tabular}}{{{sides}}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*above, *top, shown[0], r"\midrule", *shown[1:], *bottom, *below]) + "\n"


def _latex(text: str) -> str:
    text = plain(text).translate(_LATEX)
    # At the beginning of a row, after two backslashes or a rule, a bracket would open an argument.
    return f"{{[}}{text[1:]}" if text.startswith("[") else text


def typst(table: Table) -> str:
    """Return a ``table``, for use with ``#include``; the lines around it are comments."""
    above, below = ([f"// {plain(line)}".rstrip() for line in lines] for lines in (table.above, table.below))
    titles, *rows = (f"{', '.join(row)}" for row in _form(table, _typst))
    sides = ", ".join("right" if heading.figures else "left" for heading in table.headings)
    return (
        "\n".join(
            [
                *above,
                "#table(",
                f"  columns: {len(table.headings)}, align: ({sides},), stroke: none,",
                f"  table.hline(), table.header({titles}), table.hline(stroke: 0.5pt),",
                *(f"  {row}," for row in rows),
                "  table.hline(),",
                ")",
                *below,
            ]
        )
        + "\n"
    )


def _typst(text: str) -> str:
    escaped = plain(text).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def csv_text(table: Table) -> str:
    """Return a header and a line for each row."""
    fields = table.fields()
    text = io.StringIO()
    # csv quotes a field for the characters of its line's end only: with CRLF a bare carriage return is quoted as well.
    writer = csv.writer(_Lines(text), lineterminator="\r\n")
    writer.writerow(list(map(_harmless, fields)))
    writer.writerows([_harmless(_scalar(value)) for value in row] for row in zip(*fields.values(), strict=True))
    return text.getvalue()


class _Lines:
    """A file for whole rows that end in CRLF, which writes them with a line feed alone."""

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
    """Return a list of objects, one for each row."""
    text = json.dumps(table.records(), indent=1, ensure_ascii=False) + "\n"
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def parquet(table: Table) -> bytes:
    """Return the content of a Parquet file."""
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

"""Tables as one HTML file that loads nothing and has no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lm_profiler.record.files import write_whole
from lm_profiler.report.tables.formats import single_line
from lm_profiler.report.tables.table import Table

# no script, and nothing from elsewhere
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8884; padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
.figure { text-align: right; white-space: nowrap; }
div { overflow-x: auto; }
p { margin: .2rem 0; }
"""


def write_tables_page(tables: Sequence[Table], title: str, path: Path) -> None:
    """Write ``tables`` to ``path``, one below the other."""
    write_whole(path, "\n".join(_html_pieces(tables, title)))


def _html_pieces(tables: Sequence[Table], title: str) -> Iterator[str]:
    """Yield the HTML document of ``tables``, piece by piece."""
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{_text_html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{_text_html(title)}</h1>"
    for table in tables:
        yield from _section_html(table)
    yield "</body>\n</html>\n"


def _section_html(table: Table) -> Iterator[str]:
    """Yield the HTML of a table: its title, the lines above it, its rows, and the lines below it."""
    if table.title:
        yield f"<h2>{_text_html(table.title)}</h2>"
    yield from _lines_html(table.above)
    if table.headings:
        yield "<div><table>\n<thead><tr>"
        for heading in table.headings:
            yield f"<th{_class_attribute(heading.figures)}>{_text_html(heading.title)}</th>"
        yield "</tr></thead>\n<tbody>"
        for row in table.rows:
            cells = []
            for heading, cell in zip(table.headings, row, strict=True):
                cells.append(
                    f"<td{_class_attribute(heading.figures)}>{_text_html(cell.text)}</td>"
                )
            yield f"<tr>{''.join(cells)}</tr>"
        yield "</tbody></table></div>"
    yield from _lines_html(table.below)


def _lines_html(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if line:
            yield f"<p>{_text_html(line)}</p>"


def _class_attribute(is_figure: bool) -> str:
    return ' class="figure"' if is_figure else ""


def _text_html(text: str) -> str:
    return escape(single_line(text))

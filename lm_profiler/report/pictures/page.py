"""One HTML file with everything in it: the table, charts, and what there is to say of each run. Needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from lm_profiler.record.collection import Collection, Entry
from lm_profiler.record.command import command_line
from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import counted
from lm_profiler.report.pictures.charts import charts
from lm_profiler.report.pictures.page_table import page_table, run_names
from lm_profiler.report.run.terminal import summary_lines
from lm_profiler.report.tables.groups import varying, word
from lm_profiler.report.tables.merged import WORDS, repeats_together
from lm_profiler.report.tables.table import Cell, Heading, Table

# Nothing is loaded from anywhere, and no script runs but the two whose digests stand here.
_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; \
form-action 'none'"


def write_page(collection: Collection, path: Path, table: Table | None = None) -> None:
    """Write the page of ``collection`` to ``path``, with ``table``, or a row for each run and cell.

    Charts are drawn by plotly.js, which stands in the file: some five megabytes.

    Raises:
        OSError: ``path`` cannot be written.
    """
    if table is None:
        table = page_table(repeats_together(collection.entries))
    scripts = [_plotly(), _ours("page.js")]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    write_whole(path, "\n".join(_document(collection, table, scripts, _POLICY.format(scripts=allowed))))


def _document(collection: Collection, table: Table, scripts: list[str], policy: str) -> Iterator[str]:
    data = charts(collection.entries)
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width">\n<title>lm_profiler: runs</title>'
    yield f"<style>\n{_ours('page.css')}</style>\n</head>\n<body>"
    yield f'<h1>lm_profiler</h1>\n<p class="quiet">{_count(collection)}</p>'
    yield from _table(table)
    yield from _folded("What could not be used", collection.problems)
    yield from _charts(data)
    yield from _runs(collection.entries)
    # Inside <script> nothing is unescaped, and only `</script` and `<!--` mean anything: no `<`, neither.
    yield f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
    yield from (f"<script>{script}</script>" for script in scripts)
    yield "</body>\n</html>\n"


def _count(collection: Collection) -> str:
    n = len(collection.entries)
    bad = sum(entry.status != "ok" for entry in collection.entries)
    return counted(n, "run") + (f", {bad} of them without a good end" if bad else "")


def _folded(title: str, lines: list[str]) -> Iterator[str]:
    """``lines`` behind their title: figures come first."""
    if lines:
        yield f"<details><summary>{title} ({len(lines)})</summary>"
        yield from (f'<p class="quiet">{html.escape(line)}</p>' for line in lines)
        yield "</details>"


# -- table -------------------------------------------------------------------------------------------------------


def _table(table: Table) -> Iterator[str]:
    yield '<input id="filter" type="search" placeholder="filter rows and runs" aria-label="filter rows and runs">'
    yield '<div class="scroll"><table><thead><tr>'
    for heading in table.headings:
        yield f'<th scope="col"{_class(heading)}><button type="button">{html.escape(heading.title)}</button></th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield f"<tr>{''.join(map(_cell, table.headings, row))}</tr>"
    yield "</tbody></table></div>"
    if table.verbatim:
        yield f"<pre>{html.escape(chr(10).join(table.above))}</pre>"
    yield from _folded("About this table", [*([] if table.verbatim else table.above), *table.below])


def _cell(heading: Heading, cell: Cell) -> str:
    """With its value, to be sorted by, where that is a number."""
    number = isinstance(cell.value, (int, float)) and not isinstance(cell.value, bool)
    value = f' data-value="{cell.value!r}"' if number else ""
    word = (heading.name == "status" and cell.value != "ok") or (cell.word is not None and cell.value is None)
    return f"<td{_class(heading, word)}{value}>{html.escape(cell.text)}</td>"


def _class(heading: Heading, word: bool = False) -> str:
    names = ["figure"] * heading.figures + ["word"] * word
    return f' class="{" ".join(names)}"' if names else ""


# -- charts ------------------------------------------------------------------------------------------------------


def _charts(data: dict[str, Any]) -> Iterator[str]:
    """Where the script draws; nothing for a chart that would be empty."""
    yield '<h2>Charts</h2>\n<div class="charts">'
    if data["phases"] is not None:
        yield _chart("phases", "Where a step's time goes", "wide")
    if data["runs"]:
        options = "".join(f"<option>{html.escape(run['name'])}</option>" for run in data["runs"])
        choice = f'<select id="run" aria-label="run">{options}</select>'
        yield _chart("steps", f"Time of each step, warm-up shaded {choice}", "wide")
    if data["memory"] is not None:
        yield _chart("memory", "Peak memory")
    if data["tokens"] is not None:
        yield _chart("tokens", "Tokens a second")
    if data["mfu"] is not None:
        yield _chart("mfu", "MFU: model FLOPs over the device's peak")
    yield "</div>"


def _chart(name: str, caption: str, kind: str = "") -> str:
    return f'<figure class="{kind}"><figcaption>{caption}</figcaption><div class="chart" id="{name}"></div></figure>'


# -- runs --------------------------------------------------------------------------------------------------------


def _runs(entries: list[Entry]) -> Iterator[str]:
    """What there is to say of each run: verdict, advice, why it died, and the command that runs it again."""
    apart = varying(entries)
    yield '<h2>Runs</h2>\n<div class="runs">'
    for entry, name in zip(entries, run_names(entries), strict=True):
        status = "" if entry.status == "ok" else f' <span class="word">{WORDS.get(entry.status, entry.status)}</span>'
        told = ", ".join(word(axis, entry) for axis in apart) if entry.cell is None else entry.name
        yield f"<details><summary>{html.escape(name)}{status} "
        yield f'<span class="quiet">{html.escape(told)}</span></summary>'
        yield from (f"<p>{html.escape(line)}</p>" for line in _said(entry))
        yield f"<pre>{html.escape(_command(entry))}</pre>"
        yield f'<p class="quiet">{html.escape(str(entry.folder))}</p></details>'
    yield "</div>"


def _said(entry: Entry) -> list[str]:
    lines = summary_lines(entry.record) if entry.record is not None else []
    known = entry.record is not None and entry.record.failure is not None
    return lines if known or entry.reason is None else [*lines, f"{entry.status}: {entry.reason}"]


def _command(entry: Entry) -> str:
    if entry.record is not None:
        return entry.record.command
    return command_line(entry.cell.arguments) if entry.cell is not None else ""


# -- scripts -----------------------------------------------------------------------------------------------------


def _plotly() -> str:
    script = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return script.replace("</script", "<\\/script")  # the same text in JavaScript, and no end of the element in HTML


def _ours(name: str) -> str:
    return (files("lm_profiler.report.pictures") / "static" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

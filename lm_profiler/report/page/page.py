"""One HTML file with everything in it: the tab's own modules, and the answers that they would ask for."""

from __future__ import annotations

import html
import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from lm_profiler.record.collection import Collection
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import write_whole
from lm_profiler.record.improve import ImproveRecord
from lm_profiler.report.page import answers
from lm_profiler.report.page.bundle import bundled
from lm_profiler.report.page.improve import searched
from lm_profiler.report.page.ranks import ranks
from lm_profiler.report.page.why import why
from lm_profiler.report.tables.table import Table

STATIC = Path(__file__).parent / "static"

# Nothing is loaded from anywhere, and no script runs but the two whose digests stand here.
_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; \
form-action 'none'"

_ALL_STEPS = 400_000
_KERNEL_RUNS = 100
"""What makes a page large is shared out: its steps among the runs, and kernels are of so many of the runs."""


def write_page(collection: Collection, path: Path, table: Table | None = None) -> None:
    """Write the page of ``collection`` to ``path``, with ``table`` above its runs.

    Charts are drawn by plotly.js, which stands in the file: some five megabytes.

    Raises:
        OSError: ``path`` cannot be written.
    """
    scripts = [_plotly(), bundled(STATIC / "page.js")]
    policy = _POLICY.format(scripts=digests(script.encode() for script in scripts))
    write_whole(path, "\n".join(_document(collection, table, scripts, policy)))


def _document(collection: Collection, table: Table | None, scripts: list[str], policy: str) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width">\n<title>lm_profiler: runs</title>'
    yield f"<style>\n{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>"
    yield "<noscript>This page needs its own scripts to show the runs: allow them.</noscript>"
    runs, searches = _named(collection)
    yield _answer("colours", answers.COLOURS)
    listing = answers.listing(runs, "this page", collection.problems)
    given = answers.table_of(table or Table([], []))
    yield _answer("runs", {**listing, "given": given, "searches": searched(searches)})
    recorded = {name: entry for name, entry in runs.items() if entry.record is not None}
    steps = max(100, min(answers.MOST_STEPS, _ALL_STEPS // max(len(recorded), 1)))
    for number, (name, entry) in enumerate(recorded.items()):
        yield _answer("run", answers.run(name, entry, steps), name)
        yield _answer("why", why(entry), name)
        yield _answer("ranks", ranks(entry), name)
        left_out = {"tables": {}, "why": "Left out to keep this page small: `report RUN --kernels` shows them."}
        yield _answer("kernels", answers.kernels(entry) if number < _KERNEL_RUNS else left_out, name)
    yield from (f"<script>{script}</script>" for script in scripts)
    yield "</body>\n</html>\n"


def _named(collection: Collection) -> tuple[dict[str, Entry], dict[str, ImproveRecord]]:
    """Each by its folder, from one above what all have in common: ``demo/version_0``."""
    named = [*(run.folder for run in collection.entries), *(search.folder for search in collection.searches)]
    folders = [Path(os.path.realpath(folder)) for folder in named]
    above = Path(os.path.commonpath([folder.parent for folder in folders])).parent if folders else Path()
    names = iter([str(folder.relative_to(above)) for folder in folders])
    runs = {next(names): run for run in collection.entries}
    return runs, {next(names): search.record for search in collection.searches}


def _answer(route: str, answer: answers.Json, run: str | None = None) -> str:
    """What the script is answered that asks for ``route`` (of ``run``), read only when it does."""
    # Inside <script> nothing is unescaped, and only `</script` and `<!--` mean anything: no `<`, neither.
    content = json.dumps(answer, default=str, separators=(",", ":")).replace("<", "\\u003c")
    of = "" if run is None else f' data-run="{html.escape(json.dumps(run))}"'
    return f'<script type="application/json" data-route="{route}"{of}>{content}</script>'


def _plotly() -> str:
    script = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return script.replace("</script", "<\\/script")  # the same text in JavaScript, and no end of the element in HTML


def digests(scripts: Iterable[bytes]) -> str:
    """Of ``scripts`` in a page, as its policy names those that may run."""
    return " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in scripts)

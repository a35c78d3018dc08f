"""The page of runs as one HTML file: the script of the tab, and the answers that the tab would fetch."""

from __future__ import annotations

import gzip
import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lm_profiler.record.entry import Collection, Entry
from lm_profiler.record.files import real_path, write_whole
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.report.page.listing import listing, page_views
from lm_profiler.report.tables.table import Table
from lm_profiler.report.views.blocks import Json, card, line, table
from lm_profiler.report.views.registry import VIEWS
from lm_profiler.report.views.view import Limits

STATIC = Path(__file__).parent / "static"

# The parts of the script. Each may use what the ones before it define.
SCRIPTS = (
    "elements.js",
    "source.js",
    "tables.js",
    "charts.js",
    "blocks.js",
    "compare.js",
    "trace.js",
    "shell.js",
)

# The page loads nothing, and runs only the two scripts whose digests are here.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; \
form-action 'none'"
)

# Limits on the size of a page.
_ALL_STEPS = 3_000  # steps of all runs together
_ALL_KERNELS = 5_500  # rows of kernels of all runs together
_ALL_POINTS = 10_000  # points of the curves of all runs together
_MOST_POINTS = 1_000  # points of a curve of one run
_KERNEL_RUNS = 100  # runs whose kernels are shown
_FEWEST_ITEMS = 20  # steps, rows and points that each run may have in any case

_DIGITS = 6  # the significant digits of numbers in a page; no figure is shown with more


def script() -> str:
    """Return the script of the tab and of the page. It is a classic script: a page in a file cannot load modules."""
    parts = [(STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS]
    return '"use strict";\n' + "\n".join(parts)


def write_page(collection: Collection, path: Path, table: Table | None = None) -> None:
    """Write the page of ``collection`` to ``path``, with ``table`` above its runs."""
    write_whole(path, "\n".join(_html_parts(collection, table)))


def _html_parts(collection: Collection, top_table: Table | None) -> Iterator[str]:
    """Yield the parts of the HTML file: head, compressed data (Plotly and the answers to routes), and our script."""
    page_script = f"{script()}\nshowPage();\n"
    plotly = _plotly()
    policy = _POLICY.format(scripts=digests([page_script.encode(), plotly]))
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width">\n<title>lm_profiler: runs</title>'
    yield f"<style>\n{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>"
    yield "<noscript>Please allow JavaScript: this page needs its scripts to show the runs.</noscript>"
    yield _packed_element("plotly", plotly)
    for route, answer in _answers_by_route(collection, top_table).items():
        has_answer_per_run = route in VIEWS
        if has_answer_per_run:
            answer = _grouped_by_block(answer)
        content = json.dumps(
            _with_rounded_numbers(answer), default=str, separators=(",", ":")
        )
        yield _packed_element(route, content.encode())
    yield f"<script>{page_script}</script>"
    yield "</body>\n</html>\n"


def _answers_by_route(
    collection: Collection, top_table: Table | None
) -> dict[str, Any]:
    """Return the answers to the script's requests by route; the answer of a view has the blocks of each run by name."""
    runs, searches = _named_runs_and_searches(collection)
    listed = listing(runs, searches, "this page", page_views(), collection.problems)
    recorded = {name: entry for name, entry in runs.items() if entry.record is not None}
    limits = _limits_for(len(recorded))
    answers: dict[str, Any] = {"runs": listed | {"given": _top_blocks(top_table)}}
    for route, view in VIEWS.items():
        blocks_by_run = {}
        for name, entry in recorded.items():
            blocks_by_run[name] = view.answer(entry, limits)
        answers[route] = blocks_by_run
    note = "The kernels are left out to keep this page small: `lm_profiler report RUN --kernels` shows them."
    for name in list(recorded)[_KERNEL_RUNS:]:
        answers["kernels"][name] = [line(note, "quiet")]
    return answers


def _grouped_by_block(answers: Mapping[str, list[Json]]) -> Json:
    """Return the first block of all runs, then the second of all, and so on; None if a run has no more.

    So similar blocks of two runs are close to each other, and within the 32 KB in which gzip finds repetitions.
    """
    columns = zip_longest(*answers.values(), fillvalue=None)
    return {"names": list(answers), "blocks": [list(column) for column in columns]}


def _limits_for(run_count: int) -> Limits:
    """Return how much a page with ``run_count`` runs shows of each run, so that the file stays small."""
    runs = max(run_count, 1)
    points = max(_FEWEST_ITEMS, min(_MOST_POINTS, _ALL_POINTS // runs))
    steps = max(_FEWEST_ITEMS, min(Limits.steps, _ALL_STEPS // runs))
    return Limits(
        steps,
        points,
        watch_points=points,
        kernel_rows=max(_FEWEST_ITEMS, _ALL_KERNELS // runs),
    )


def _top_blocks(top_table: Table | None) -> list[Json]:
    """Return the blocks above the runs: the table that the options of the call describe; none if it is empty."""
    if top_table is None:
        return []
    has_content = top_table.headings or top_table.above or top_table.below
    if not has_content:
        return []
    default_title = "Table" if top_table.headings else "Notes"
    title = top_table.title or default_title
    return [card(title, *table(replace(top_table, title=""), is_long=True))]


def _named_runs_and_searches(
    collection: Collection,
) -> tuple[dict[str, Entry], dict[str, ImproveRecord]]:
    """Return the runs and the searches of ``collection`` by name: the parts of their paths that differ."""
    run_folders = [real_path(entry.folder) for entry in collection.entries]
    search_folders = [real_path(folder) for folder in collection.searches]
    root = _root_of_names([*run_folders, *search_folders])

    runs = {}
    for folder, entry in zip(run_folders, collection.entries, strict=True):
        runs[str(folder.relative_to(root))] = entry
    searches = {}
    records = collection.searches.values()
    for folder, record in zip(search_folders, records, strict=True):
        searches[str(folder.relative_to(root))] = record
    return runs, searches


def _root_of_names(folders: list[Path]) -> Path:
    """Return the folder to which names are relative: the parent of the folder that contains all ``folders``."""
    if not folders:
        return Path()
    parents = [folder.parent for folder in folders]
    return Path(os.path.commonpath(parents)).parent


def _with_rounded_numbers(value: Any) -> Any:
    """Return a JSON value with all floats rounded to ``_DIGITS`` significant digits."""
    if isinstance(value, dict):
        return {key: _with_rounded_numbers(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_rounded_numbers(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    return value


def _packed_element(route: str, content: bytes) -> str:
    """Return an element with ``content`` as gzip in base64; the script unpacks it with ``DecompressionStream``."""
    text = b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")
    return f'<script type="text/plain" data-route="{route}">{text}</script>'


@cache
def _plotly() -> bytes:
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


def digests(scripts: Iterable[bytes]) -> str:
    """Return the digests of ``scripts`` as a page's Content-Security-Policy lists those that may run."""
    return " ".join(
        f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in scripts
    )

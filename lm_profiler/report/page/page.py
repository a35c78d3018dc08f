"""One HTML file with everything in it: the tab's own modules as one script, and the answers that they would ask for."""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lm_profiler.record.entry import Collection, Entry
from lm_profiler.record.files import write_whole
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.report.page import views
from lm_profiler.report.tables.table import Table

_IMPORT = re.compile(r'^import (?:\{ ([^}]*?),? \}|\* as (\w+)) from "\./(\w+)\.js";$', re.MULTILINE)
# Comment lines and indentation, a sixth of the modules. No module has a text of several lines that this would break.
_COMMENT = re.compile(r"^ *//.*\n|^ +", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def bundled(entry: Path) -> str:
    """Return the module ``entry`` with all that it imports from its folder as one script."""
    scripts: dict[str, str] = {}
    _add(entry, scripts)
    return '"use strict";\n' + "\n".join(scripts.values())


def _add(module: Path, scripts: dict[str, str]) -> None:
    source = _COMMENT.sub("", module.read_text(encoding="utf-8"))
    for _, _, name in _IMPORT.findall(source):
        if name not in scripts:
            _add(module.with_name(f"{name}.js"), scripts)
    names = ", ".join(_EXPORT.findall(source))
    body = _EXPORT.sub("", _IMPORT.sub(_imported, source))
    scripts[module.stem] = f"const of_{module.stem} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();"


def _imported(match: re.Match[str]) -> str:
    names, whole, module = match.groups()
    return f"const {whole or '{ ' + names.replace(' as ', ': ') + ' }'} = of_{module};"


STATIC = Path(__file__).parent / "static"

# The page loads nothing, and runs only the two scripts whose digests are here.
_POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; \
form-action 'none'"

_ALL_STEPS = 3_000
_ALL_KERNELS = 5_500
_KERNEL_RUNS = 100
# limits on the size of a page: the steps and rows of kernels of all runs, the runs that have kernels, and the
# places of a memory timeline, of one run and of all
_PLACES, _ALL_PLACES = 1_000, 10_000

_DIGITS = 6  # the significant digits of numbers in a page; no figure is shown with more


def write_page(collection: Collection, path: Path, table: Table | None = None) -> None:
    """Write the page of ``collection`` to ``path``, with ``table`` above its runs."""
    script, (charts, digest) = bundled(STATIC / "page.js"), _plotly()
    policy = _POLICY.format(scripts=f"{digests([script.encode()])} {digest}")
    write_whole(path, "\n".join(_document(collection, table, policy, charts, script)))


def _document(collection: Collection, table: Table | None, policy: str, *scripts: str) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width">\n<title>lm_profiler: runs</title>'
    yield f"<style>\n{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>"
    yield "<noscript>This page needs its own scripts to show the runs: allow them.</noscript>"
    charts, script = scripts
    yield charts
    for route, answer in _answers(collection, table).items():
        content = json.dumps(_rounded(answer), default=str, separators=(",", ":"))
        yield _held("route", route, content.encode())
    yield f"<script>{script}</script>"
    yield "</body>\n</html>\n"


def _answers(collection: Collection, table: Table | None) -> dict[str, views.Json]:
    """Return the answer to each route that the script asks for; answers about runs are keyed by run name."""
    runs, searches = _named(collection)
    listing = views.listing(runs, "this page", collection.problems)
    recorded = {name: entry for name, entry in runs.items() if entry.record is not None}
    share = max(len(recorded), 1)
    places = max(20, min(_PLACES, _ALL_PLACES // share))
    most = {
        "run": max(20, min(views.MOST_STEPS, _ALL_STEPS // share)),
        "kernels": max(20, _ALL_KERNELS // share),
        **dict.fromkeys(("memory", "watch"), places),
    }
    given = table or Table([], [])
    values = [[cell.value for cell in row] for row in given.rows]  # to sort by
    answers: dict[str, views.Json] = {route: {} for route in views.VIEWS}
    for number, (name, entry) in enumerate(recorded.items()):
        for route, view in views.VIEWS.items():
            if route == "kernels" and number >= _KERNEL_RUNS:
                why = "Left out to keep this page small: `report RUN --kernels` shows them."
                answers[route][name] = {"tables": {}, "why": why}
            else:
                answers[route][name] = view(entry, *([most[route]] if route in most else []))
    listed = {**listing, "given": {**views.table_of(given), "values": values}, "searches": views.searched(searches)}
    return {"colours": views.COLOURS, "runs": listed, **answers}


def _named(collection: Collection) -> tuple[dict[str, Entry], dict[str, ImproveRecord]]:
    named = [*(run.folder for run in collection.entries), *collection.searches]
    folders = [Path(os.path.realpath(folder)) for folder in named]
    above = Path(os.path.commonpath([folder.parent for folder in folders])).parent if folders else Path()
    names = iter([str(folder.relative_to(above)) for folder in folders])
    runs = {next(names): run for run in collection.entries}
    return runs, {next(names): record for record in collection.searches.values()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(of) for of in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _held(kind: str, name: str, content: bytes) -> str:
    return f'<script type="text/plain" data-{kind}="{name}" data-bytes="{len(content)}">{packed(content)}</script>'


def packed(content: bytes) -> str:
    """Return ``content`` compressed as text without markup, seven bits per character."""
    import lzma  # which some builds of Python lack

    coder = {"id": lzma.FILTER_LZMA1, "preset": 6, "dict_size": 1 << 24, "lc": 3, "lp": 0, "pb": 0}
    compressed = lzma.compress(content, format=lzma.FORMAT_RAW, filters=[coder])
    bits = np.unpackbits(np.frombuffer(compressed, np.uint8))
    sevens = np.pad(bits, (0, -bits.size % 7)).reshape(-1, 7)
    text = (np.packbits(sevens, axis=1)[:, 0] >> 1).tobytes().decode("ascii")
    return text.translate({place: place + 256 for place in b"\0\r<"})


@cache
def _plotly() -> tuple[str, str]:
    script = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return _held("script", "plotly", script), digests([script])


def digests(scripts: Iterable[bytes]) -> str:
    """Return the digests of ``scripts`` as a page's Content-Security-Policy lists those that may run."""
    return " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in scripts)

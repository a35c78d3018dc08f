"""What the verbs share: finding runs, the format of a result, printing and writing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import require
from lm_profiler.record.entry import Collection, collect
from lm_profiler.record.files import json_of, write_whole
from lm_profiler.record.text import printable
from lm_profiler.report.run.comparison_table import SUMMARY_BYTES
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.table import Table
from lm_profiler.usage_error import UsageError, expect_one_of

FORMATS = ("terminal", "markdown", "latex", "typst", "json")  # for a verb with one answer
ForWhom = Literal["terminal", "json"]  # for a verb whose answer is not a table

_NEEDS = {"html": "plotly", "parquet": "pyarrow"}  # the formats that need a file, each with the package that writes it


def runs_below(paths: Sequence[Path], label: str) -> Collection:
    """Return the runs at or below ``paths``, at least one, with killed runs concluded."""
    try:
        runs = with_unfinished(collect(paths))
    except FileNotFoundError as error:
        raise UsageError(f"{label}: expected folders, given {error}, which is not a folder") from None
    if not (runs.entries or runs.searches or runs.problems):
        searched = ", ".join(map(str, paths))
        raise UsageError(f"{label}: expected runs, found none at or below {searched}; `lm_profiler fit` makes one")
    return runs


def format_of(given: str | None, output: Path | None) -> str | None:
    """Return the given format, else the one of ``output``'s suffix; None without either."""
    asked = "output" if given is None else "format"
    if given is None and output is not None:
        given = formats.SUFFIXES.get(output.suffix.lower())
        if given is None:
            known = ", ".join(formats.SUFFIXES)
            raise UsageError(f"output: expected a file ending in {known}, given {output.name!r}; or give --format")
    if given in _NEEDS:
        if output is None:
            raise UsageError(f"format: expected --output FILE for {given}, given none")
        require(_NEEDS[given], asked)
    return given


def format_of_answer(given: str | None, output: Path | None) -> str:
    """Return the same for a verb with one answer; ``terminal`` without either."""
    kind = format_of(given, output) or "terminal"
    expect_one_of(FORMATS, "output" if given is None else "format", kind)
    return kind


def show(table: Table) -> None:
    """Print ``table`` for people."""
    sys.stdout.write(formats.terminal(table, sys.stdout))
    sys.stdout.flush()


def write(runs: Collection, tables: Sequence[Table], kind: str, output: Path | None) -> None:
    """Print ``tables``, or write them to ``output``, in the format ``kind``; a page shows ``runs`` as well."""
    if output is None or kind not in _NEEDS:
        write_text(formats.render(tables, kind, sys.stdout if output is None else None), kind, output)
        return
    with writable(output):
        if kind == "html":
            from lm_profiler.report.page.page import write_page

            write_page(runs, output, tables[0])
        else:
            write_whole(output, formats.parquet(tables[0]))


def write_json(answer: Any, output: Path | None = None) -> None:
    """Print or write a record as JSON; ``docs/schemas.py`` makes the schema of its class."""
    write_text(json_of(answer, indent=1) + "\n", "json", output)


def write_text(text: str, kind: str, output: Path | None) -> None:
    """Print ``text``, whose format is ``kind``, or write it to ``output``."""
    if output is None:
        sys.stdout.write(printable(text) if sys.stdout.isatty() and kind != "terminal" else text)
        return
    with writable(output):
        write_whole(output, text)


def tell_github(asked: bool | None, summary: Callable[[], str], outputs: Mapping[str, Any] = {}) -> bool:
    """Append ``summary`` and ``outputs`` to the files that GitHub's variables name, in a GitHub job or if ``asked``.

    Returns whether GitHub was addressed.
    """
    if not (os.environ.get("GITHUB_STEP_SUMMARY") if asked is None else asked):
        return False
    text = summary()
    if len(text.encode()) > SUMMARY_BYTES:
        text = text.encode()[: SUMMARY_BYTES - 99].decode(errors="ignore").rpartition("\n")[0] + "\n\n(cut: too long)\n"
    texts = {"GITHUB_STEP_SUMMARY": text, "GITHUB_OUTPUT": "".join(f"{name}={of}\n" for name, of in outputs.items())}
    for name, text in texts.items():
        try:
            if file := os.environ.get(name):
                with Path(file).open("a", encoding="utf-8") as out:
                    out.write(text)
        except OSError as error:  # the answer is valid even without the summary
            say(f"{error.filename} cannot be written: {error.strerror}")
    return True


@contextmanager
def writable(output: Path) -> Iterator[None]:
    """Turn an OSError while ``output`` is written into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"output: expected a file that can be written, given {output} ({error.strerror})") from None

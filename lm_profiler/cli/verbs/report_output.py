"""Where a report goes, and in which format."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lm_profiler.record.calls import require
from lm_profiler.record.entry import Collection
from lm_profiler.record.files import write_whole
from lm_profiler.record.text import printable
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.table import Table
from lm_profiler.usage_error import UsageError

_NEEDS = {"html": "plotly", "parquet": "pyarrow"}
"""Formats that go into a file, and what they are written with."""


def format_of(given: str | None, output: Path | None) -> str | None:
    """The format that was asked for, or else the one that ``output``'s suffix says; None without either.

    Raises:
        UsageError: no format has that suffix, or the format needs a file and none is given.
        MissingExtra: the format needs what is not installed.
    """
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


def write(runs: Collection, tables: Sequence[Table], kind: str, output: Path | None) -> None:
    """Print ``tables``, or write them to ``output``, in the format ``kind``; a page shows ``runs`` as well.

    Raises:
        UsageError: ``output`` cannot be written.
    """
    if output is None or kind not in _NEEDS:
        write_text(formats.render(tables, kind, sys.stdout if output is None else None), kind, output)
        return
    with writable(output):
        if kind == "html":
            from lm_profiler.report.page.page import write_page

            write_page(runs, output, tables[0])
        else:
            write_whole(output, formats.parquet(tables[0]))


def write_text(text: str, kind: str, output: Path | None) -> None:
    """Print ``text``, which is of the format ``kind``, or write it to ``output``.

    Raises:
        UsageError: ``output`` cannot be written.
    """
    if output is None:
        sys.stdout.write(printable(text) if sys.stdout.isatty() and kind != "terminal" else text)
        return
    with writable(output):
        write_whole(output, text)


@contextmanager
def writable(output: Path) -> Iterator[None]:
    """Turns what the system says against writing ``output`` into a wrong call."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"output: expected a file that can be written, given {output} ({error.strerror})") from None

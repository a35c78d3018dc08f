"""Functions that the verbs share: finding runs, the format of a result, printing and writing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import require
from lm_profiler.record.entry import Collection, collect
from lm_profiler.record.files import json_of, write_whole
from lm_profiler.record.text import printable
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.table import Table
from lm_profiler.usage_error import UsageError, expect_one_of

# the formats of a verb whose answer is a single result, not a table of runs
FORMATS = ("terminal", "markdown", "latex", "typst", "json")
AnswerFormat = Literal["terminal", "json"]  # for a verb whose answer is not a table

# formats that are no text, so that they need a file → the package that writes them
_PACKAGES = {"html": "plotly", "parquet": "pyarrow"}
_TRACE_SUFFIXES = (".json", ".json.gz")
# The longest summary. A comment on GitHub has at most 65,536 characters (its REST API, "Create an issue comment").
_SUMMARY_BYTES = 64_000
_CUT_MARK = "\n\n(cut: too long)\n"
_MARK_BYTES = 99  # reserved for this mark


def runs_below(paths: Sequence[Path], label: str) -> Collection:
    """Return the runs at or below ``paths``; those that were killed are concluded. Raise UsageError without runs."""
    try:
        runs = with_unfinished(collect(paths))
    except FileNotFoundError as error:
        remedy = ""
        if str(error).endswith(_TRACE_SUFFIXES):
            remedy = f"; `lm_profiler why {error}` reads a trace"
        raise UsageError(
            f"{label}: expected folders, given {error}, which is not a folder{remedy}"
        ) from None
    if not (runs.entries or runs.searches or runs.problems):
        folders = ", ".join(map(str, paths))
        raise UsageError(
            f"{label}: expected runs, found none at or below {folders}; `lm_profiler fit` records one"
        )
    return runs


def choose_format(format_option: str | None, output: Path | None) -> str | None:
    """Return the format that the option names, or else the one of ``output``'s suffix; None if neither is given.

    Raises:
        UsageError: the suffix names no format, or the format needs a file and there is none.
        MissingExtra: the package that writes the format is not installed.
    """
    format_name = format_option
    if format_name is None and output is not None:
        format_name = formats.SUFFIXES.get(output.suffix.lower())
        if format_name is None:
            suffixes = ", ".join(formats.SUFFIXES)
            raise UsageError(
                f"output: expected a file ending in {suffixes}, given {output.name!r}; or give --format"
            )
    if format_name not in _PACKAGES:
        return format_name
    if output is None:
        raise UsageError(
            f"format: expected --output FILE for {format_name}, given none"
        )
    require(_PACKAGES[format_name], _deciding_option(format_option))
    return format_name


def choose_answer_format(format_option: str | None, output: Path | None) -> str:
    """Return the format of a verb whose answer is a single result; ``terminal`` if neither is given."""
    format_name = choose_format(format_option, output) or "terminal"
    expect_one_of(FORMATS, _deciding_option(format_option), format_name)
    return format_name


def _deciding_option(format_option: str | None) -> str:
    return "output" if format_option is None else "format"


def show(table: Table) -> None:
    """Print ``table`` for people."""
    sys.stdout.write(formats.terminal(table, sys.stdout))
    sys.stdout.flush()


def write(
    runs: Collection, tables: Sequence[Table], format_name: str, output: Path | None
) -> None:
    """Print ``tables``, or write them to ``output``; the page of the format html also shows ``runs``."""
    is_text = format_name not in _PACKAGES
    if output is None or is_text:
        stream = sys.stdout if output is None else None
        text = formats.render(tables, format_name, stream)
        write_text(text, format_name, output)
        return
    with writable(output):
        if format_name == "html":
            from lm_profiler.report.page.page import write_page

            write_page(runs, output, tables[0])
        else:
            write_whole(output, formats.parquet(tables[0]))


def write_json(answer: Any, output: Path | None = None) -> None:
    """Print or write a record as JSON; ``docs/schemas.py`` makes the schema of its class."""
    write_text(json_of(answer, indent=1) + "\n", "json", output)


def write_text(text: str, format_name: str, output: Path | None) -> None:
    """Print ``text``, which is in the format ``format_name``, or write it to ``output``."""
    if output is not None:
        with writable(output):
            write_whole(output, text)
        return
    if sys.stdout.isatty() and format_name != "terminal":
        text = printable(text)
    sys.stdout.write(text)


def write_for_github(
    github_option: bool | None,
    summary: Callable[[], str],
    outputs: Mapping[str, Any] | None = None,
) -> bool:
    """Append ``summary`` and ``outputs`` to the files that GitHub's variables name; return whether this was done.

    It is done if the option is true, or if the option is not given in a GitHub job.
    """
    is_due = github_option
    if is_due is None:
        is_due = bool(os.environ.get("GITHUB_STEP_SUMMARY"))
    if not is_due:
        return False
    _append_to_variable("GITHUB_STEP_SUMMARY", _cut_summary(summary()))
    lines = [f"{name}={value}\n" for name, value in (outputs or {}).items()]
    _append_to_variable("GITHUB_OUTPUT", "".join(lines))
    return True


def _cut_summary(text: str) -> str:
    """Return as many whole lines of ``text`` as GitHub accepts."""
    content = text.encode()
    if len(content) <= _SUMMARY_BYTES:
        return text
    beginning = content[: _SUMMARY_BYTES - _MARK_BYTES].decode(errors="ignore")
    return beginning.rpartition("\n")[0] + _CUT_MARK


def _append_to_variable(variable: str, text: str) -> None:
    """Append ``text`` to the file that an environment variable names, if the variable is set."""
    file = os.environ.get(variable)
    if not file:
        return
    try:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:  # the answer is valid even without the summary
        print_message(f"{error.filename} cannot be written: {error.strerror}")


@contextmanager
def writable(output: Path) -> Iterator[None]:
    """Turn an OSError while ``output`` is written into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"output: expected a file that can be written, given {output} ({error.strerror})"
        ) from None

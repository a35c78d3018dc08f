"""The options of ``report``, and how its result is printed or written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from lm_profiler.cli.errors import either
from lm_profiler.record.calls import require
from lm_profiler.record.entry import Collection
from lm_profiler.record.files import write_whole
from lm_profiler.record.text import printable
from lm_profiler.report.pictures.plots import KINDS, TIMELINE
from lm_profiler.report.run.comparison_table import CiFormat
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.table import Table
from lm_profiler.usage_error import UsageError, expect

_NEEDS = {"html": "plotly", "parquet": "pyarrow"}  # the formats that need a file, each with the package that writes it


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tables of runs, of folders of runs and of sweeps, in any mix.

    A sweep's repeats share a row; a single run is shown as a page of all its figures, unless an option asks for a
    table. CSV, JSON and Parquet carry SI values and every fact; the others are for people.

    Args:
        config: A YAML file of these options.
        runs: Folders of runs or sweeps, or a folder above them.
        columns: Facts and figures by name, or options such as data.batch_size; `help` lists the names.
        group_by: One row for all runs that have these facts in common; `folder` gives each run its own.
        pivot: Two facts, one down and one across; several with commas between.
        value: What a pivot shows; if not given, step_s.
        layout: A table as published reports have it: blocks, wide, devices, modes or warmups.
        warmup: Leave out this many first steps of each run instead of its own warm-up; several numbers give a row each.
        steps: Use this many steps of each run, and leave out runs with fewer.
        kernels: The kernels that took the device's time, from the trace of each run.
        again: Conclude anew, by this version's rules, from what each run left, and say what differs from its record.
        allocations: The largest allocations at the peak of one step, what is saved for backward, and three moments.
        plot: phases, memory, memory_timeline, attention, tokens, mfu or overlap; with --output FILE.svg, .png, .pdf or
            .html.
        by: What a plot is drawn against.
        format: terminal, markdown, latex, typst, csv, json, parquet or html; if not given, as output's suffix says; for
            CI services bmf (Bencher), github-action-benchmark or junit.
        output: Write to this file.
    """

    WORDS: ClassVar[str] = "runs"

    config: str | None = None
    runs: Sequence[Path] = ()
    columns: Sequence[str] = ()
    group_by: Sequence[str] = ()
    pivot: tuple[str, str] | None = None
    value: str | None = None
    layout: Literal["blocks", "wide", "devices", "modes", "warmups"] | None = None
    warmup: Sequence[int] = ()
    steps: int | None = None
    kernels: bool = False
    allocations: bool = False
    again: bool = False
    plot: str | None = None
    by: str | None = None
    format: str | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        for name, number, least in (("steps", self.steps, 1), ("warmup", min(self.warmup, default=0), 0)):
            expect(number is None or number >= least, name, f"{least} or more", number)
        for name, known in (
            ("format", [*formats.SUFFIXES.values(), *get_args(CiFormat)]),
            ("plot", (*KINDS, TIMELINE)),
        ):
            expect(getattr(self, name) in (None, *known), name, either(known), getattr(self, name))
        if self.plot is None:
            object.__setattr__(self, "format", format_of(self.format, self.output))
        if not self.runs and self.columns != ["help"]:
            raise UsageError("RUNS: expected folders of runs, given none; `report logs`, say")
        self._check_together()

    def _check_together(self) -> None:
        ways = [
            name for name in ("columns", "pivot", "kernels", "allocations", "plot", "layout") if getattr(self, name)
        ]
        if self.kernels or self.allocations or self.plot:
            ways += [name for name in ("warmup", "steps") if getattr(self, name)]
        if len(ways) > 1:
            raise UsageError(f"{ways[1]}: expected one way to show the runs, given --{ways[0]} too; leave one out")
        if self.group_by and ways not in ([], ["columns"]):
            raise UsageError(f"group_by: expected a table of rows, given --{ways[0]} too; leave one out")
        if self.value is not None and not self.pivot:
            raise UsageError("value: expected --pivot ROWS ACROSS, given none")
        if self.by is not None and not self.plot:
            raise UsageError("by: expected --plot KIND, given none")
        if (self.kernels or self.allocations) and self.format in ("html", "latex", "typst"):
            known = ", ".join(("terminal", "markdown", *formats.FOR_PROGRAMS))
            raise UsageError(f"format: expected {known} with --{ways[0]}, given {self.format}")
        if self.plot and self.output is None:
            raise UsageError("plot: expected --output FILE, given none; end it with .svg, .png, .pdf or .html")
        if self.plot and self.format is not None:
            raise UsageError("format: expected none with --plot, whose FILE's suffix says it; leave it out")


def format_of(given: str | None, output: Path | None) -> str | None:
    """Return the given format, else the one of ``output``'s suffix; None without either.

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
    """Print ``text``, whose format is ``kind``, or write it to ``output``.

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
    """Turn an OSError while ``output`` is written into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"output: expected a file that can be written, given {output} ({error.strerror})") from None

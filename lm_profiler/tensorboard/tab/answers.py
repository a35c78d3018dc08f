"""What the tab shows, from the files of the log folder: nothing is computed here that they do not hold.

Every function takes the log folder, and a run by its folder relative to that. All raise NotFoundError where there is
no such run or it lies outside, and RecordError where its files are damaged.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from tensorboard.errors import NotFoundError

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.analysis.steps.unfinished import with_unfinished
from lm_profiler.record.collection import Collection, Entry, collect
from lm_profiler.record.kernels import kernel_files, read_kernels
from lm_profiler.record.quantities import MEMORY, TIMED, Place, Quantity
from lm_profiler.record.run import RecordError
from lm_profiler.report.pictures.colours import KIND_LOOKS, PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.run import comparison as compare_output
from lm_profiler.report.run.facts import facts, held
from lm_profiler.report.run.kernel_answers import kernel_answers
from lm_profiler.report.run.kernels import kernel_rows, kind_rows
from lm_profiler.report.run.terminal import failure_lines, summary_lines, time_table, verdict_lines
from lm_profiler.report.tables.columns import COLUMNS, COMPARED, Column, column
from lm_profiler.tensorboard.tab.files import inside
from lm_profiler.tensorboard.tab.perfetto import has_perfetto

_OF_A_RUN = ("run.json", "steps.csv", "trace")
_MOST_STEPS = 4000
TRACE_SUFFIX = ".pt.trace.json.gz"

Json = dict[str, Any]


def colours() -> Json:
    """One for each part of a step, others for what is no part, a pale one; (colour, hatching) for kinds of kernel."""
    return {"parts": PART_COLOURS, "series": list(SERIES_COLOURS), "pale": PALE, "kinds": KIND_LOOKS}


def listing(logdir: Path) -> Json:
    """All runs and cells with every column's value; the columns; and what could not be read."""
    found = with_unfinished(collect([logdir]))
    columns = [of for of in COLUMNS.values() if of.quantity is None or _is_listed(of.quantity)]
    options = _options(found.entries)
    shown = [*columns, *(option for option in options if option.name not in COLUMNS)]
    root = os.path.realpath(logdir)
    runs = [run for entry in found.entries if (run := _listed(root, entry, shown, found)) is not None]
    return {
        "logdir": str(logdir),
        "columns": [_column(column) for column in shown],
        "options": [option.name for option in options],
        "runs": runs,
        "problems": found.problems,
    }


def _is_listed(quantity: Quantity) -> bool:
    """Whether it is shown of many runs: not each part's spread, which would be most of the answer."""
    return quantity.place <= Place.FILE and quantity.of is None


def _options(entries: list[Entry]) -> list[Column]:
    """The columns of all options that a sweep or a command line gave, and of what people compare runs by."""
    given = {path for entry in entries for path in entry.overrides if "." in path}  # others say where a run goes
    found = [*map(column, sorted(given)), *COMPARED]
    return list({option.name: option for option in found}.values())


def _listed(root: str, entry: Entry, columns: list[Column], found: Collection) -> Json | None:
    """None, with a problem instead, for what a link or a sweep's file put outside the log folder."""
    name = os.path.relpath(os.path.realpath(entry.folder), root)
    if name.split(os.sep, 1)[0] == os.pardir:
        found.problems.append(f"{entry.folder}: lies outside the log folder")
        return None
    known = {column.name: value for column in columns if (value := column.get(entry)) is not None}
    return {
        "run": name,
        "stamp": None if entry.record is None else _stamp(entry.folder),
        "overrides": dict(entry.overrides),
        "point": None if entry.cell is None else f"{entry.sweep}: {entry.cell.overrides}",  # equal for repeats
        "values": known,
        "intervals": {
            column.name: span for column in columns if column.name in known and (span := column.interval(entry))
        },
    }


def _stamp(folder: Path) -> str:
    """Another one as soon as there is something new to be shown of the run."""
    return " ".join(str((folder / name).stat().st_mtime_ns) for name in _OF_A_RUN if (folder / name).exists())


def _column(column: Column) -> Json:
    """How it is called and shown; of a figure also what it means, in which group it is, and how early it is shown."""
    said: Json = {"name": column.name, "title": column.title, "shown": None}
    if (of := column.quantity) is None:
        return said
    shown = {"unit": of.shown_unit, "scale": of.scale, "digits": of.digits}
    return {**said, "shown": shown, "meaning": of.meaning, "group": of.group, "place": of.place}


def run(logdir: Path, name: str) -> Json:
    """The record, its table and lines as the terminal shows them, and the steps by column."""
    entry = _entry(logdir, name)
    if (record := entry.record) is None:
        raise RecordError(f"{name}: not a run but a sweep")
    table = time_table(record)
    verdict, failure = verdict_lines(record), failure_lines(record)
    return {
        "record": record.model_dump(mode="json"),
        "headline": table.title or record.name,
        "words": record.words,
        "verdict": verdict,
        "error": failure[0] if failure else None,
        "lines": [line for line in summary_lines(record) if line not in (*verdict, *failure)],
        "table": table.texts() or None,
        "facts": facts(record),
        "held": held(record),
        "steps": _steps(entry),
    }


def _entry(logdir: Path, name: str) -> Entry:
    """The run in one folder, an unfinished one with the figures of its steps so far."""
    inside(logdir, f"{name}/run.json")
    found = with_unfinished(collect([logdir / name]))
    if not found.entries:
        raise RecordError(found.problems[0] if found.problems else f"{name}: not a run")
    return found.entries[0]


def _steps(entry: Entry) -> Json:
    """Columns of the timed stages, means over the ranks, in SI; ``error`` where the file is missing or damaged.

    Of ``of`` steps ``every``-th one: more than a few thousand bars nobody can tell apart, and a page cannot draw.
    """
    try:
        timed = [row for row in entry.rows if row.stage in ("warmup", "measure")]
    except RecordError as error:
        return {"error": f"steps.csv: {error}"}
    steps = mean_over_ranks(timed)
    every = math.ceil(len(steps) / _MOST_STEPS) or 1
    rows = steps[::every]
    return {
        "of": len(steps),
        "every": every,
        "step": [row.step for row in rows],
        "stage": [row.stage for row in rows],
        "device": {part: [row.seconds and row.time(part) for row in rows] for part in TIMED},
        "host": {part: [row.host_time(part) for row in rows] for part in TIMED},
        "memory": {reading: [row.memory[i] for row in rows] for i, reading in enumerate(MEMORY)},
    }


def kernels(logdir: Path, name: str) -> Json:
    """The run's kernel tables by their file's name, rank 0's first; ``why`` there is none where there is none."""
    files = kernel_files(inside(logdir, name)) if _has_traces(logdir, name) else []
    tables = {file.name: _kernel_table(logdir, f"{name}/trace/{file.name}") for file in files}
    return {"tables": tables, "why": None if tables else _no_kernels(logdir, name)}


def _kernel_table(logdir: Path, name: str) -> Json:
    """Its rows, of one step, as ``report`` has them, and its answers; ``error`` where it is damaged."""
    try:
        table = read_kernels(inside(logdir, name))
    except (NotFoundError, RecordError) as error:
        return {"error": str(error)}
    phases = {
        phase: {"time_s": (found.busy_s + found.idle_s) / table.steps, "overlap_s": found.overlap_s / table.steps}
        for phase, found in table.phases.items()
    }
    return {
        **table.model_dump(include={"source", "steps", "rest", "memory_bound_share", "communication_share"}),
        "step_s": table.window_s / table.steps,
        "phases": phases,
        "kinds": kind_rows(table),
        "rows": kernel_rows(table),
        "answers": kernel_answers(table),
    }


def _no_kernels(logdir: Path, name: str) -> str:
    entry = _entry(logdir, name)
    if traces(logdir, name)["traces"]:
        return "There is a trace, but no table of its kernels beside it: run it again to have one."
    if entry.status != "ok":
        return f"No trace: the run ended before its trace stage ({entry.status}: {entry.reason})."
    return "No trace, hence no kernels: run it again with --trace.steps=2."


def comparison(logdir: Path, a: list[str], b: list[str]) -> Json:
    """B's runs against A's, as ``lm_profiler compare`` has it; ``header``, ``rows`` and ``closing`` as it prints them.

    Raises:
        NotComparable: they are no two sides of a comparison.
    """
    found = compare(*([_entry(logdir, name) for name in side] for side in (a, b)))
    shown = {"header": compare_output.HEADER, "rows": compare_output.rows(found)}
    return {**dataclasses.asdict(found), **shown, "closing": compare_output.closing(found)}


def _has_traces(logdir: Path, name: str) -> bool:
    """Whether the run has a folder of traces. Raises NotFoundError where that is a link out of the log folder."""
    return os.path.lexists(inside(logdir, name) / "trace") and inside(logdir, f"{name}/trace").is_dir()


def traces(logdir: Path, name: str) -> Json:
    """The run's traces, with their sizes in bytes, and whether Perfetto's page is there to show them."""
    files = (inside(logdir, name) / "trace").glob(f"*{TRACE_SUFFIX}") if _has_traces(logdir, name) else ()
    sizes = {file.name: file.lstat().st_size for file in files if not file.name.startswith(".")}
    ordered = sorted(sizes, key=lambda file: (len(file), file))  # rank 2 before rank 10
    return {"traces": [{"file": file, "bytes": sizes[file]} for file in ordered], "perfetto": has_perfetto()}


def trace(logdir: Path, name: str, file: str) -> Path:
    """The path of one of the run's ``traces``."""
    if file not in [known["file"] for known in traces(logdir, name)["traces"]]:
        raise NotFoundError(f"{file!r}: not a trace of {name!r}")
    return inside(logdir, f"{name}/trace/{file}")

"""What the tab shows, from the files of the log folder: nothing is computed here that they do not hold.

Every function takes the log folder, and a run by its folder relative to that. All raise NotFoundError where there is
no such run or it lies outside, and RecordError where its files are damaged.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tensorboard.errors import NotFoundError

from lm_profiler.record.kernels import kernel_files, read_kernels
from lm_profiler.record.quantities import MEMORY, TIMED
from lm_profiler.record.run import RecordError, RunRecord, read_run
from lm_profiler.report import compare_output
from lm_profiler.report.collection import Collection, Entry, collect
from lm_profiler.report.colours import KIND_LOOKS, PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.columns import COLUMNS, Column, column
from lm_profiler.report.compare import compare
from lm_profiler.report.facts import facts, held
from lm_profiler.report.groups import COMPARED
from lm_profiler.report.kernel_answers import kernel_answers
from lm_profiler.report.kernels import kernel_rows, kind_rows
from lm_profiler.report.summary import mean_over_ranks
from lm_profiler.report.terminal import failure_lines, headline, summary_lines, time_table, verdict_lines
from lm_profiler.tb_plugin.files import inside
from lm_profiler.tb_plugin.perfetto import has_perfetto

TRACE_SUFFIX = ".pt.trace.json.gz"

Json = dict[str, Any]


def colours() -> Json:
    """One for each part of a step, others for what is no part, a pale one; (colour, hatching) for kinds of kernel."""
    return {"parts": PART_COLOURS, "series": list(SERIES_COLOURS), "pale": PALE, "kinds": KIND_LOOKS}


def listing(logdir: Path) -> Json:
    """All runs and cells with every column's value; the columns; and what could not be read."""
    found = collect([logdir])
    columns = [column for column in COLUMNS.values() if column.name != "folder"]
    options = _options(found.entries)
    shown = [*columns, *(option for option in options if option.name not in COLUMNS)]
    runs = [run for entry in found.entries if (run := _listed(logdir, entry, shown, found)) is not None]
    return {
        "logdir": str(logdir),
        "columns": [_column(column) for column in shown],
        "options": [option.name for option in options],
        "runs": runs,
        "problems": found.problems,
    }


def _options(entries: list[Entry]) -> list[Column]:
    """The columns of all options that a sweep or a command line gave, and of what people compare runs by."""
    given = {path for entry in entries for path in entry.overrides if "." in path}  # others say where a run goes
    found = [*map(column, sorted(given)), *(COLUMNS[name] for name in COMPARED)]
    return list({option.name: option for option in found}.values())


def _listed(logdir: Path, entry: Entry, columns: list[Column], found: Collection) -> Json | None:
    """None, with a problem instead, for what a link or a sweep's file put outside the log folder."""
    try:
        name = entry.folder.resolve().relative_to(logdir.resolve()).as_posix()
        stamp = None if entry.record is None else inside(logdir, f"{name}/run.json").stat().st_mtime_ns
    except (NotFoundError, ValueError):
        found.problems.append(f"{entry.folder}: lies outside the log folder")
        return None
    return {
        "run": name,
        "stamp": None if stamp is None else str(stamp),
        "overrides": dict(entry.overrides),
        "point": None if entry.cell is None else f"{entry.sweep}: {entry.cell.overrides}",  # equal for repeats
        "values": {column.name: column.get(entry) for column in columns},
        "intervals": {column.name: span for column in columns if (span := column.interval(entry)) is not None},
    }


def _column(column: Column) -> Json:
    shown = None
    if (quantity := column.quantity) is not None:
        shown = {"unit": quantity.shown_unit, "scale": quantity.scale, "digits": quantity.digits}
    return {"name": column.name, "title": column.title, "shown": shown}


def run(logdir: Path, name: str) -> Json:
    """The record, its table and lines as the terminal shows them, and the steps by column."""
    record = _record(logdir, name)
    table = time_table(record) if record.time and record.time["step"].n else None
    verdict, failure = verdict_lines(record), failure_lines(record)
    return {
        "record": record.model_dump(mode="json"),
        "headline": headline(record) if table else record.name,
        "verdict": verdict,
        "error": failure[0] if failure else None,
        "lines": [line for line in summary_lines(record) if line not in (*verdict, *failure)],
        "table": None if table is None else [[str(column.header), *map(str, column.cells)] for column in table.columns],
        "facts": facts(record),
        "held": held(record),
        "steps": _steps(logdir, name, record),
    }


def _record(logdir: Path, name: str) -> RunRecord:
    inside(logdir, f"{name}/run.json")
    return read_run(logdir / name)


def _steps(logdir: Path, name: str, record: RunRecord) -> Json:
    """Columns of the timed stages, means over the ranks, in SI; ``error`` where the file is missing or damaged."""
    try:
        inside(logdir, f"{name}/steps.csv")
        timed = [row for row in Entry(logdir / name, record).rows if row.stage in ("warmup", "measure")]
    except (NotFoundError, RecordError) as error:
        return {"error": f"steps.csv: {error}"}
    rows = mean_over_ranks(timed)
    return {
        "step": [row.step for row in rows],
        "stage": [row.stage for row in rows],
        "device": {part: [row.seconds and row.time(part) for row in rows] for part in TIMED},
        "host": {part: [row.host_time(part) for row in rows] for part in TIMED},
        "memory": {reading: [row.memory[i] for row in rows] for i, reading in enumerate(MEMORY)},
    }


def kernels(logdir: Path, name: str) -> Json:
    """The run's kernel tables by their file's name, rank 0's first; ``why`` there is none where there is none."""
    files = kernel_files(inside(logdir, name))
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
    record = _record(logdir, name)
    if traces(logdir, name)["traces"]:
        return "There is a trace, but no table of its kernels beside it: run it again to have one."
    if record.status != "ok":
        return f"No trace: the run ended before its trace stage ({record.status})."
    return "No trace, hence no kernels: run it again with --trace.steps=2."


def comparison(logdir: Path, a: list[str], b: list[str]) -> Json:
    """B's runs against A's, as ``lm_profiler compare`` has it; ``header``, ``rows`` and ``closing`` as it prints them.

    Raises:
        NotComparable: they are no two sides of a comparison.
    """
    found = compare(*([Entry(logdir / name, _record(logdir, name)) for name in side] for side in (a, b)))
    shown = {"header": compare_output.HEADER, "rows": compare_output.rows(found)}
    return {**dataclasses.asdict(found), **shown, "closing": compare_output.closing(found)}


def traces(logdir: Path, name: str) -> Json:
    """The run's traces, with their sizes in bytes, and whether Perfetto's page is there to show them."""
    there = (inside(logdir, name) / "trace").is_dir()
    files = inside(logdir, f"{name}/trace").glob(f"*{TRACE_SUFFIX}") if there else ()
    sizes = {file.name: file.lstat().st_size for file in files if not file.name.startswith(".")}
    ordered = sorted(sizes, key=lambda file: (len(file), file))  # rank 2 before rank 10
    return {"traces": [{"file": file, "bytes": sizes[file]} for file in ordered], "perfetto": has_perfetto()}


def trace(logdir: Path, name: str, file: str) -> Path:
    """The path of one of the run's ``traces``."""
    if file not in [known["file"] for known in traces(logdir, name)["traces"]]:
        raise NotFoundError(f"{file!r}: not a trace of {name!r}")
    return inside(logdir, f"{name}/trace/{file}")

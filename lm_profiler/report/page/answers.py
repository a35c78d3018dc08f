"""The contents of the pages as plain JSON, from records that were read; nothing new is computed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.record.entry import Entry
from lm_profiler.record.kernels import kernel_files, read_kernels
from lm_profiler.record.quantities import GROUPS, TIMED, TIMES, Place
from lm_profiler.record.run import RecordError, RunRecord
from lm_profiler.record.steps import COLUMNS_FILE, STEPS_FILE, StepRow
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS, KIND_LOOKS, PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.run.kernel_tables import kernel_answers, kernel_rows, kind_rows
from lm_profiler.report.run.run_page import failure_lines, summary_lines, time_table
from lm_profiler.report.run.sections import sections
from lm_profiler.report.run.verdict import odd_text, verdict_lines
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import COLUMNS, COMPARED, FACTS, Column, column, figures

TRACE_SUFFIX = ".pt.trace.json.gz"
MOST_STEPS = 4000  # the most steps that a page gets: more bars could neither be told apart nor drawn

Json = dict[str, Any]


# the colours of the parts of a step, of other series, of shading and of causes of memory; (colour, hatching) for kinds
# of kernel
COLOURS: Json = {
    "parts": PART_COLOURS,
    "series": SERIES_COLOURS,
    "pale": PALE,
    "kinds": KIND_LOOKS,
    "causes": CAUSE_COLOURS,
}


def listing(runs: Mapping[str, Entry], where: str, problems: Sequence[str]) -> Json:
    """Return all runs and cells by name with the value of each column, the columns, and what could not be read."""
    came_of_it = [of for of in FACTS if of.group == COLUMNS["steadiness"].group]
    options = _options(list(runs.values()))
    shown = list({of.name: of for of in (*filter(_is_listed, COLUMNS.values()), *options)}.values())
    return {
        "where": where,
        "columns": [_column(column) for column in shown],
        "options": [option.name for option in options],
        "headline": [of.name for of in figures(Place.HEADLINE)],
        "table": [of.name for of in (*came_of_it, *figures(Place.TABLE)) if of.place is Place.TABLE],
        "parts": {part: TIMES[part].name for part in PART_COLOURS},
        "runs": [_listed(name, entry, shown) for name, entry in runs.items()],
        "problems": list(problems),
    }


def _is_listed(of: Column) -> bool:
    return of.quantity is None or (of.place <= Place.FILE and of.quantity.of is None)


def _options(entries: list[Entry]) -> list[Column]:
    given = {path for entry in entries for path in entry.overrides if "." in path}  # others say where files go
    columns = [*map(column, sorted(given)), *COMPARED]
    return list({option.name: option for option in columns}.values())


def _listed(name: str, entry: Entry, columns: list[Column]) -> Json:
    known = {column.name: value for column in columns if (value := column.get(entry)) is not None}
    spans = {column.name: column.interval(entry) for column in columns if column.name in known}
    return {
        "run": name,
        "stamp": None if entry.record is None else _stamp(entry.folder),
        "point": None if entry.cell is None else f"{entry.sweep}: {entry.cell.overrides}",  # equal for repeats
        "values": known,
        "intervals": {name: span for name, span in spans.items() if span},
    }


def _stamp(folder: Path) -> str:
    shown = (folder / name for name in ("run.json", STEPS_FILE, COLUMNS_FILE, "trace"))
    return " ".join(str(path.stat().st_mtime_ns) for path in shown if path.exists())


def _column(column: Column) -> Json:
    of = column.quantity
    shown = None if of is None else {"unit": of.shown_unit, "scale": of.scale, "digits": of.digits}
    return {name: getattr(column, name) for name in ("name", "title", "meaning", "group")} | {"shown": shown}


def table_of(table: Table) -> Json:
    """Return ``table`` as the pages draw it: the headings, and each cell's text."""
    return {
        "title": table.title,
        "headings": [{"title": heading.title, "figure": heading.figures} for heading in table.headings],
        "rows": [[cell.text for cell in row] for row in table.rows],
        "above": table.above,
        "below": table.below,
        "verbatim": table.verbatim,
    }


def run(name: str, entry: Entry, most_steps: int = MOST_STEPS) -> Json:
    """Return the page of the run ``name``: its table and lines as on the terminal, and every figure, by sections."""
    if (record := entry.record) is None:
        raise RecordError(f"{name}: not a run but a sweep")
    table = time_table(record)
    verdict, failure = verdict_lines(record), failure_lines(record)
    return {
        **record.model_dump(include={"status", "started", "duration_s", "command"}),
        "headline": table.title or record.name,
        "words": record.words,
        "verdict": verdict,
        "error": failure[0] if failure else None,
        "lines": [line for line in summary_lines(record) if line not in (*verdict, *failure)],
        "times": table_of(table),
        "steps": _steps(entry, most_steps),
        "owners": _owners(record),
        "causes": _causes(record),
        "sections": [table_of(section) for section in sections(record)],
    }


def _owners(record: RunRecord) -> Json | None:
    owned = record.other_by_owner
    if owned is None:
        return None
    actions = [{"name": of.name, **of.model_dump(include={"seconds", "calls", "in_steps"})} for of in owned.actions]
    return {"steps": owned.steps, "seconds": owned.seconds, "actions": actions}


def _causes(record: RunRecord) -> Json:
    bytes_of: Json = {}
    for of in GROUPS["Memory by cause"]:
        if (value := of.get(record)) is not None:
            bytes_of.setdefault(of.title.partition(": ")[2], {})[of.of] = value
    return bytes_of


def _steps(entry: Entry, most: int) -> Json:
    record = entry.record
    if record is None or not record.steps:  # it never began a step
        return {"step": []}
    try:
        timed = entry.rows.of_stages("warmup", "measure")
    except RecordError as error:
        return {"error": f"the steps: {error}"}
    steps = mean_over_ranks(timed)
    every = math.ceil(len(steps) / most) or 1
    rows = steps[::every]
    left_out = math.ceil(record.stretch.start / every)
    warmup = min(sum(row.stage == "warmup" for row in rows) + left_out, len(rows))
    told = any(row.seconds is not None for row in rows)
    host = record.environment is not None and record.environment.device_type != "cpu"
    clocks: list[str] = ["device", "host"] if told and host else ["host"]
    return {
        "of": len(steps),
        "ranks": len(record.rank_step_s),
        "every": every,
        "step": [row.step for row in rows],
        "warmup": warmup,
        "clocks": clocks,
        **{clock: _times(rows, clock) for clock in clocks},
        "odd": _odd(record, steps),
    }


def _times(rows: Sequence[StepRow], clock: str) -> Json:
    known = [row.seconds is not None or clock == "host" for row in rows]
    columns = {
        part: [_short(row.time(part, clock)) if is_known else None for row, is_known in zip(rows, known, strict=True)]
        for part in TIMED
    }
    return {part: column for part, column in columns.items() if part == "step" or any(column)}


def _odd(record: RunRecord, steps: Sequence[StepRow]) -> list[Json]:
    rows = {row.step: row for row in steps}
    texts = {of.step: odd_text(of, len(record.rank_step_s) > 1) for of in record.odd_steps if of.step in rows}
    return [
        {"step": step, "text": text, "device": rows[step].seconds and _short(rows[step].time("step")),
         "host": _short(rows[step].time("step", "host"))}
        for step, text in texts.items()
    ]  # fmt: skip


def _short(seconds: float) -> float:
    # The other digits would be half of an answer's bytes.
    return round(seconds, 9)


def kernels(entry: Entry, most_rows: int | None = None) -> Json:
    """Return the run's kernel tables by file name, rank 0's first, or ``why`` there is none."""
    tables = {file.name: _kernel_table(file, most_rows) for file in kernel_files(entry.folder)}
    return {"tables": tables, "why": None if tables else _no_kernels(entry)}


_OF_KERNEL = ("phase", "kind", "name", "operator", "module", "module_type", "calls", "time_s")


def _kernel_table(file: Path, most_rows: int | None) -> Json:
    try:
        table = read_kernels(file)
    except RecordError as error:
        return {"error": str(error)}
    hidden = [] if most_rows is None else table.rows[most_rows:]
    phases = {
        phase: {"time_s": (of.busy_s + of.idle_s) / table.steps, "overlap_s": of.overlap_s / table.steps}
        for phase, of in table.phases.items()
    }
    return {
        **table.model_dump(include={"source", "steps", "memory_bound_share", "communication_share"}),
        "rest": {
            "rows": table.rest.rows + len(hidden),
            "total_s": table.rest.total_s + sum(row.total_s for row in hidden),
        },
        "step_s": table.window_s / table.steps,
        "phases": phases,
        "kinds": kind_rows(table),
        "rows": [{name: row[name] for name in _OF_KERNEL} for row in kernel_rows(table)[:most_rows]],
        "answers": kernel_answers(table),
    }


def _no_kernels(entry: Entry) -> str:
    if any((entry.folder / "trace").glob(f"*{TRACE_SUFFIX}")):
        return "There is a trace but no table of its kernels: run again to create one."
    if entry.status != "ok":
        return f"No trace: the run ended before its trace stage ({entry.status}: {entry.reason})."
    return "No trace, so no kernels: run it again with --trace.steps=2."

"""The contents of the pages as plain JSON, from records: the list of runs, and the views of each run.

The views: Run, Why, Memory, Ranks, Watch, Kernels; Improve shows a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lm_profiler.analysis.ranks.slowness import fast_ranks
from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.record.entry import Entry
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.kernels import kernel_files, read_kernels
from lm_profiler.record.memory_timeline import HELD, SOURCES, MemoryTimeline, read_timelines
from lm_profiler.record.quantities import GROUPS, PARTS, TERMS, TIMED, TIMES, Place, bytes_text, counted, term_title
from lm_profiler.record.run_record import Ranks, RecordError, RunRecord
from lm_profiler.record.steps import COLUMNS_FILE, STEPS_FILE, StepRow
from lm_profiler.record.watch_files import Sketch, WatchWindow, read_events, read_last_steps, read_status, read_windows
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS, KIND_LOOKS, PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.run import waterfall_text
from lm_profiler.report.run.improve_table import improve_table, way_texts
from lm_profiler.report.run.kernel_tables import kernel_answers, kernel_rows, kind_rows
from lm_profiler.report.run.plan_table import allocation_tables
from lm_profiler.report.run.rank_lines import communication_lines, who_waits
from lm_profiler.report.run.run_page import failure_lines, summary_lines, time_table
from lm_profiler.report.run.sections import known_table, sections
from lm_profiler.report.run.verdict import odd_text, verdict_lines
from lm_profiler.report.run.watch_tables import event_text, is_watched, watch_tables
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import COLUMNS, COMPARED, FACTS, Column, column, figures

Json = dict[str, Any]

TRACE_SUFFIX = ".pt.trace.json.gz"
MOST_STEPS = 4000  # most steps that a page gets: more bars could not be distinguished or drawn

# the colours of the parts of a step, of other series, of shading and of causes of memory; (colour, hatching) for kinds
# of kernel
COLOURS: Json = {"parts": PART_COLOURS, "series": SERIES_COLOURS, "pale": PALE}
COLOURS |= {"kinds": KIND_LOOKS, "causes": CAUSE_COLOURS}


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


def listing(runs: Mapping[str, Entry], where: str, problems: Sequence[str]) -> Json:
    """Return all runs and cells by name with the value of each column, the columns, and the unreadable files."""
    # each part's spread would be most of the answer
    main = [of for of in COLUMNS.values() if of.quantity is None or (of.place <= Place.FILE and of.quantity.of is None)]
    # options with a dot say what was run, others where files go
    given = {path for entry in runs.values() for path in entry.overrides if "." in path}
    options = {of.name: of for of in (*map(column, sorted(given)), *COMPARED)}
    came_of_it = [of for of in FACTS if of.group == COLUMNS["steadiness"].group]
    shown = list(({of.name: of for of in main} | options).values())
    return {
        "where": where,  # where the runs are from
        "columns": [_column(of) for of in shown],
        "options": list(options),
        # the columns of the pages' table, of which the headline stays in view
        "headline": [of.name for of in figures(Place.HEADLINE)],
        "table": [of.name for of in (*came_of_it, *figures(Place.TABLE)) if of.place is Place.TABLE],
        "parts": {part: TIMES[part].name for part in PART_COLOURS},  # in the order of a stack
        "runs": [_listed(name, entry, shown) for name, entry in runs.items()],
        "problems": list(problems),
    }


def _column(column: Column) -> Json:
    of = column.quantity
    shown = None if of is None else {"unit": of.shown_unit, "scale": of.scale, "digits": of.digits}
    return {name: getattr(column, name) for name in ("name", "title", "meaning", "group")} | {"shown": shown}


def _listed(name: str, entry: Entry, columns: list[Column]) -> Json:
    known = {column.name: value for column in columns if (value := column.get(entry)) is not None}
    spans = {column.name: column.interval(entry) for column in columns if column.name in known}
    files = (entry.folder / file for file in ("run.json", STEPS_FILE, COLUMNS_FILE, "trace"))
    stamp = " ".join(str(path.stat().st_mtime_ns) for path in files if path.exists())
    return {
        "run": name,
        "stamp": None if entry.record is None else stamp,  # changes when there is something new to show
        "point": None if entry.cell is None else f"{entry.sweep}: {entry.cell.overrides}",  # equal for repeats
        "values": known,
        "intervals": {name: span for name, span in spans.items() if span},
    }


def searched(searches: Mapping[str, ImproveRecord]) -> list[Json]:
    """Return the searches by name, the latest first; ``way`` is in seconds, and empty where nothing helped."""
    answers = []
    for name, record in sorted(searches.items(), key=lambda of: of[1].started, reverse=True):
        table = improve_table(record)
        said, *below = table.below
        way = zip(record.way, way_texts(record), strict=True)
        answers.append(
            {
                "name": name,
                "ended": record.ended,
                "headline": said,
                "command": record.command,
                "way_titles": [TIMES["step"].heading, "interval"],
                "way": [{**asdict(point), "text": text, "interval": interval} for point, (text, interval) in way],
                "table": table_of(replace(table, below=below, title="")),
            }
        )
    return answers


def run(entry: Entry, most_steps: int = MOST_STEPS) -> Json:
    """Return the page of a run: its table and lines as on the terminal, and every figure, by sections."""
    if (record := entry.record) is None:
        raise RecordError(f"{entry.name}: not a run but a sweep")
    table = time_table(record)
    verdict, failure = verdict_lines(record), failure_lines(record)
    owners = None
    if (owned := record.other_by_owner) is not None:
        shown = {"seconds", "calls", "in_steps"}
        actions = [{"name": of.name, **of.model_dump(include=shown)} for of in owned.actions]
        owners = {**owned.model_dump(include={"steps", "seconds"}), "actions": actions}
    return {
        **record.model_dump(include={"status", "started", "duration_s", "command"}),
        "headline": table.title or record.name,
        "words": record.words,
        "verdict": verdict,
        "error": failure[0] if failure else None,
        "lines": [line for line in summary_lines(record) if line not in (*verdict, *failure)],
        "times": table_of(table),
        "steps": _steps(entry, most_steps),
        "owners": owners,
        "causes": _causes(record),
        "sections": [table_of(section) for section in sections(record)],
    }


def _causes(record: RunRecord) -> Json:
    """Return bytes by cause, and by the part of the step whose peak includes them."""
    bytes_of: Json = {}
    for of in GROUPS["Memory by cause"]:
        if (value := of.get(record)) is not None:
            bytes_of.setdefault(of.title.partition(": ")[2], {})[of.of] = value
    return bytes_of


def _steps(entry: Entry, most: int) -> Json:
    """Return columns of the timed stages, means over the ranks, in SI; ``error`` where a file is missing or damaged."""
    record = entry.record
    if record is None or not record.steps:  # the run never began a step
        return {"step": []}
    try:
        timed = entry.rows.of_stages("warmup", "measure")
    except RecordError as error:
        return {"error": f"the steps: {error}"}
    steps = mean_over_ranks(timed)
    every = math.ceil(len(steps) / most) or 1
    rows = steps[::every]
    left_out = math.ceil(record.stretch.start / every)
    told = any(row.seconds is not None for row in rows)
    host = record.environment is not None and record.environment.device_type != "cpu"
    clocks: list[str] = ["device", "host"] if told and host else ["host"]
    return {
        "of": len(steps),
        "ranks": len(record.rank_step_s),
        "every": every,
        "step": [row.step for row in rows],
        "warmup": min(sum(row.stage == "warmup" for row in rows) + left_out, len(rows)),  # in no summary
        "clocks": clocks,
        **{clock: _times(rows, clock) for clock in clocks},
        "odd": _odd(record, steps),
    }


def _times(rows: Sequence[StepRow], clock: str) -> Json:
    """Return columns of the parts that took time, and of the step; None if a device died before it reported."""
    columns = {
        part: [_short(row.time(part, clock)) if row.seconds is not None or clock == "host" else None for row in rows]
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
    return round(seconds, 9)  # further digits would be half of an answer's bytes


_OF_KERNEL = ("phase", "kind", "name", "operator", "module", "module_type", "calls", "time_s")


def kernels(entry: Entry, most_rows: int | None = None) -> Json:
    """Return the run's kernel tables by file name, rank 0's first, or ``why`` there is none."""
    tables = {file.name: _kernel_table(file, most_rows) for file in kernel_files(entry.folder)}
    why = None
    if not tables:
        why = "No trace, so no kernels: run it again with --trace.steps=2."
        if any((entry.folder / "trace").glob(f"*{TRACE_SUFFIX}")):
            why = "There is a trace but no table of its kernels: run again to create one."
        elif entry.status != "ok":
            why = f"No trace: the run ended before its trace stage ({entry.status}: {entry.reason})."
    return {"tables": tables, "why": why}


def _kernel_table(file: Path, most_rows: int | None) -> Json:
    """Return the rows of one step, as ``report`` has them, and the answers; ``error`` where the file is damaged."""
    try:
        table = read_kernels(file)
    except RecordError as error:
        return {"error": str(error)}
    hidden = [] if most_rows is None else table.rows[most_rows:]
    rest_s = table.rest.total_s + sum(row.total_s for row in hidden)
    return {
        **table.model_dump(include={"source", "steps", "memory_bound_share", "communication_share"}),
        "rest": {"rows": table.rest.rows + len(hidden), "total_s": rest_s},
        "step_s": table.window_s / table.steps,
        "phases": {
            phase: {"time_s": (of.busy_s + of.idle_s) / table.steps, "overlap_s": of.overlap_s / table.steps}
            for phase, of in table.phases.items()
        },
        "kinds": kind_rows(table),
        "rows": [{name: row[name] for name in _OF_KERNEL} for row in kernel_rows(table)[:most_rows]],
        "answers": kernel_answers(table),
    }


def memory(entry: Entry, most_places: int = 2000) -> Json:
    """Return the run's memory timelines, in bytes at ``places`` on the axis of events, or ``why`` there are none."""
    timelines = read_timelines(entry.folder)
    why = "No memory timeline: the run was not planned (--check_memory=true does), or an older version wrote it."
    return {"why": None if timelines else why, "timelines": [_timeline(of, most_places) for of in timelines]}


def _timeline(timeline: MemoryTimeline, most: int) -> Json:
    places, curves = timeline.curves(most)
    tables = []
    for table in allocation_tables(timeline):
        heading = table.above[-1].rstrip(":")
        tables.append({"heading": heading[0].upper() + heading[1:], "table": {**table_of(table), "above": []}})
    return {
        "title": SOURCES[timeline.source],
        "peak": timeline.peak,
        "peak_text": bytes_text(timeline.peak),
        "peak_at": timeline.peak_at,
        "events": len(timeline.events),
        "phases": timeline.shaded(),
        "places": places,
        "causes": [{"name": name, "title": HELD.get(name, name), "bytes": of} for name, of in curves.items()],
        "tables": tables,
    }


_KNOWN_FROM = [
    of
    for of in GROUPS["Ranks"]
    if of.name == "ranks_heard" or (of.path.startswith("ranks.") and "finding" not in of.path)
]


def ranks(entry: Entry) -> Json:
    """Return a row for each rank in seconds of the mean step, or ``why`` there are none."""
    record = entry.record
    if record is None or record.ranks is None:
        return {"why": "No ranks: a cell that left no run." if record is None else _no_ranks(record)}
    known = record.ranks
    phases = [part for part in PARTS if part in known.own and known.own[part].largest_s]
    whole = len(known.by_rank) == known.heard
    # if the record has only some ranks, those with most own work come first
    rows = sorted(known.by_rank, key=lambda of: (0.0 if whole else -of.all_own_s, of.rank))
    above = [_above([of.own_s.get(part, 0.0) for of in rows], known, part) for part in phases]
    by_step = zip(*(_above(column) for column in zip(*(of.own_by_column_s for of in rows), strict=True)), strict=True)
    columns = list(by_step) or [()] * len(rows)
    world = counted(known.world, "rank")
    left_out = f"Drawn are {len(rows):,} of {counted(known.heard, 'rank')}: rank 0, those with most own work and those "
    return {
        "why": None,
        "headline": f"{world if known.heard == known.world else f'{known.heard:,} of {world}'}, mean of "
        f"{counted(known.steps, 'step')}",
        "said": who_waits(known),
        "lines": communication_lines(known),
        "step_s": known.step_s,
        "phases": phases,
        "columns": known.columns,  # the first steps of the columns of the heat map
        "rows": [
            {
                **of.model_dump(include={"rank", "host"}),
                "own": [of.own_s.get(part, 0.0) for part in phases],
                "above": [seconds[at] for seconds in above],
                "waiting": of.all_waiting_s,
                "by_column": [round(seconds, 7) for seconds in columns[at]],
            }
            for at, of in enumerate(rows)
        ],
        "several_hosts": len(known.hosts) > 1,
        "left_out": "" if whole else f"{left_out}with least, most first.",
        "facts": table_of(known_table(record, _KNOWN_FROM)),
    }


def _above(seconds: Sequence[float], known: Ranks | None = None, part: str = "") -> list[float]:
    """Return the seconds of each rank minus the median of the fast ones."""
    # For many ranks, the record has only the extremes, and the median of all.
    if known is not None and len(known.by_rank) < known.heard:
        return [one - known.own[part].median_s for one in seconds]
    if len(seconds) < 2:
        return [0.0] * len(seconds)
    usual_s = median(seconds[rank] for rank in fast_ranks(np.array(seconds)))
    return [one - usual_s for one in seconds]


def _no_ranks(record: RunRecord) -> str:
    world = 1 if record.environment is None else record.environment.world_size
    if world > 1:
        return f"{world:,} ranks, but it is unknown who waited for whom: see the notes of the Run view."
    return "One rank: nobody waits for another."


_WATCHED = {"where the time went": "Where the time went", "ms": "Phases", "rank": "Ranks", "when": "Events"}
_EVENTS = 200


def watch(entry: Entry, most_points: int = 500) -> Json:
    """Return the step's time over a watched run in seconds, its events and its tables, or ``why`` there are none."""
    folder = entry.folder
    if not is_watched(folder):
        return {"why": "Not watched: `fit --watch=true` keeps the marks until training ends."}
    status, tables, events = read_status(folder), watch_tables(folder, _EVENTS), read_events(folder)[-_EVENTS:]
    sketches = _step_sketches(folder, [*read_windows(folder), *([status.window] if status.window else [])], most_points)
    curves = {"median": [of.quantile(0.5) for _, of in sketches], "mean": [of.mean for _, of in sketches]}
    return {
        "why": None,
        "state": tables[0].above,
        "step": [step for step, _ in sketches],
        "curves": {**curves, "99 % are below": [of.quantile(0.99) for _, of in sketches]},
        "events": [
            {"kind": of.kind, "step": of.since_step or of.step, "text": event_text(of, status.world_size)}
            for of in events
        ],
        "tables": [
            {"heading": _WATCHED[of.headings[0].title], "table": table_of(of)} for of in tables[1:] if of.headings
        ],
    }


def _step_sketches(folder: Path, windows: Sequence[WatchWindow], most: int) -> list[tuple[int, Sketch]]:
    """Return first steps with the distribution from there on, at most ``most``: from rows if all are kept."""
    rows = read_last_steps(folder)
    if len(rows) and (not windows or rows["step"][0] <= windows[0].first_step):
        parts = np.array_split(rows, min(most, math.ceil(len(rows) / 10)))
        return [(int(part["step"][0]), Sketch.of(part["seconds"][:, -1].astype(float))) for part in parts]
    every = math.ceil(len(windows) / most) or 1
    known = [(of.first_step, of.seconds["step"]) for of in windows if "step" in of.seconds]
    merged = (known[at : at + every] for at in range(0, len(known), every))
    return [(part[0][0], reduce(Sketch.merged, (of for _, of in part))) for part in merged]


def why(entry: Entry) -> Json:
    """Return the terms in the order of their bars, and the step that they add up to, or ``why`` there are none."""
    record = entry.record
    if record is None or record.waterfall is None:
        why = "a cell that left no run." if record is None else waterfall_text.missing(record)
        return {"why": f"No waterfall: {why}"}
    fall = record.waterfall
    text, _, interval = waterfall_text.step_text(fall).partition(" ")
    terms = []
    for rung in waterfall_text.rungs(fall):
        term = rung.term
        meaning = TERMS[term.name][1] if term.name in TERMS else ""
        if rung.title != term_title(term.name):
            meaning = "kernels that wait for memory, whose bandwidth is unknown"
        terms.append(
            {
                "name": term.name,
                "title": rung.title,
                "meaning": meaning,
                "start_s": rung.start_s,
                "seconds": term.seconds,
                "text": rung.signed_text,
                "share": term.seconds / fall.step_s if fall.step_s else None,
                "at_most": waterfall_text.ceiling_text(fall, term) or None,
                "ends": waterfall_text.ends_text(fall, term),
                "pieces": rung.pieces,  # seconds by phase; those of no known phase have an empty name
                "contributors": table_of(waterfall_text.contributors(term, fall)),
            }
        )
    step = {"seconds": fall.step_s, "text": text, "interval": interval, "low_s": fall.ci_low, "high_s": fall.ci_high}
    return {
        "why": None,
        "words": record.words,
        "step": {**step, "pieces": waterfall_text.of_the_step(record) or {"": fall.step_s}},
        "terms": terms,
        "facts": table_of(known_table(record, GROUPS["Waterfall"])),
        "to_win": waterfall_text.unsure(fall) or "a ceiling, never a gain",
        "notes": fall.notes,
    }


# the views of one run, by their route
VIEWS: dict[str, Callable[..., Json]] = {of.__name__: of for of in (run, why, memory, ranks, watch, kernels)}

"""The Improve, Memory, Ranks, Watch and Why views, as plain JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from statistics import median

import numpy as np

from lm_profiler.analysis.ranks.slowness import fast_ranks
from lm_profiler.record.entry import Entry
from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.memory_timeline import HELD, SOURCES, MemoryTimeline, read_timelines
from lm_profiler.record.quantities import GROUPS, PARTS, TERMS, TIMES, bytes_text, counted, term_title
from lm_profiler.record.run import Ranks, RankTimes, RunRecord, Waterfall
from lm_profiler.record.watch_files import Sketch, WatchWindow, read_events, read_last_steps, read_status, read_windows
from lm_profiler.report.page.answers import Json, table_of
from lm_profiler.report.run.improve_table import improve_table, way_texts
from lm_profiler.report.run.plan_table import allocation_tables
from lm_profiler.report.run.rank_lines import communication_lines, who_waits
from lm_profiler.report.run.sections import known_table
from lm_profiler.report.run.watch_tables import event_text, is_watched, watch_tables
from lm_profiler.report.run.waterfall_text import (
    Rung,
    ceiling_text,
    contributors,
    no_waterfall,
    of_the_step,
    rungs,
    step_text,
    title_in,
    unsure,
)


def searched(searches: Mapping[str, ImproveRecord]) -> list[Json]:
    """Return the searches by name, the latest first; ``way`` is in seconds, and empty where nothing helped."""
    latest = sorted(searches.items(), key=lambda of: of[1].started, reverse=True)
    return [_search(name, record) for name, record in latest]


def _search(name: str, record: ImproveRecord) -> Json:
    table = improve_table(record)
    said, *below = table.below
    return {
        "name": name,
        "ended": record.ended,
        "headline": said,
        "command": record.command,
        "way_titles": [TIMES["step"].heading, "interval"],
        "way": [
            {**asdict(point), "text": text, "interval": interval}
            for point, (text, interval) in zip(record.way, way_texts(record), strict=True)
        ],
        "table": table_of(replace(table, below=below, title="")),
    }


def memory(entry: Entry, most_places: int = 2000) -> Json:
    """Return the run's memory timelines, in bytes at ``places`` on the axis of events, or ``why`` there are none."""
    timelines = read_timelines(entry.folder)
    why = "No memory timeline: the run was not planned (--check_memory=true does), or an older version wrote it."
    return {"why": None if timelines else why, "timelines": [_timeline(of, most_places) for of in timelines]}


def _timeline(timeline: MemoryTimeline, most: int) -> Json:
    places, curves = timeline.curves(most)
    tables = ((table_of(of), of.above) for of in allocation_tables(timeline))
    return {
        "title": SOURCES[timeline.source],
        "peak": timeline.peak,
        "peak_text": bytes_text(timeline.peak),
        "peak_at": timeline.peak_at,
        "events": len(timeline.events),
        "phases": timeline.shaded(),
        "places": places,
        "causes": [{"name": name, "title": HELD.get(name, name), "bytes": of} for name, of in curves.items()],
        "tables": [{"heading": _headline(above[-1]), "table": {**table, "above": []}} for table, above in tables],
    }


def _headline(line: str) -> str:
    return f"{line[0].upper()}{line[1:].rstrip(':')}"


def ranks(entry: Entry) -> Json:
    """Return a row for each rank in seconds of the mean step, or ``why`` there are none."""
    record = entry.record
    if record is None or record.ranks is None:
        return {"why": "No ranks: a cell that left no run." if record is None else _no_ranks(record)}
    known = record.ranks
    phases = [part for part in PARTS if part in known.own and known.own[part].largest_s]
    rows = _in_order(known)
    above = {part: _above([of.own_s.get(part, 0.0) for of in rows], known, part) for part in phases}
    by_step = zip(*(_above(column) for column in zip(*(of.own_by_column_s for of in rows), strict=True)), strict=True)
    columns = list(by_step) or [()] * len(rows)
    return {
        "why": None,
        "headline": f"{_heard(known)}, mean of {counted(known.steps, 'step')}",
        "said": who_waits(known),
        "lines": communication_lines(known),
        "step_s": known.step_s,
        "phases": phases,
        "columns": known.columns,
        "rows": [_row(of, [above[part][at] for part in phases], phases, columns[at]) for at, of in enumerate(rows)],
        "several_hosts": len(known.hosts) > 1,
        "left_out": _left_out(known),
        "facts": table_of(known_table(record, _KNOWN_FROM)),
    }


_KNOWN_FROM = [
    of
    for of in GROUPS["Ranks"]
    if of.name == "ranks_heard" or (of.path.startswith("ranks.") and "finding" not in of.path)
]


def _row(of: RankTimes, above: list[float], phases: Sequence[str], by_column: Sequence[float]) -> Json:
    return {
        **of.model_dump(include={"rank", "host"}),
        "own": [of.own_s.get(part, 0.0) for part in phases],
        "above": above,
        "waiting": of.all_waiting_s,
        "by_column": [round(seconds, 7) for seconds in by_column],
    }


def _in_order(known: Ranks) -> list[RankTimes]:
    whole = len(known.by_rank) == known.heard
    return sorted(known.by_rank, key=lambda of: (0.0 if whole else -of.all_own_s, of.rank))


def _above(seconds: Sequence[float], known: Ranks | None = None, part: str = "") -> list[float]:
    # The record has only the extremes of many ranks, and the median of all of them.
    if known is not None and len(known.by_rank) < known.heard:
        return [one - known.own[part].median_s for one in seconds]
    if len(seconds) < 2:
        return [0.0] * len(seconds)
    usual_s = median(seconds[rank] for rank in fast_ranks(np.array(seconds)))
    return [one - usual_s for one in seconds]


def _heard(known: Ranks) -> str:
    ranks = counted(known.world, "rank")
    return ranks if known.heard == known.world else f"{known.heard:,} of {ranks}"


def _left_out(known: Ranks) -> str:
    if len(known.by_rank) == known.heard:
        return ""
    told = f"{len(known.by_rank):,} of {counted(known.heard, 'rank')}"
    return f"Drawn are {told}: rank 0, those with most own work and those with least, most first."


def _no_ranks(record: RunRecord) -> str:
    world = 1 if record.environment is None else record.environment.world_size
    if world > 1:
        return f"{world:,} ranks, but nothing says who waited for whom: see the notes of the Run view."
    return "One rank: nobody waits for another."


_WATCHED = {"where the time went": "Where the time went", "ms": "Phases", "rank": "Ranks", "when": "Events"}
_EVENTS = 200


def watch(entry: Entry, most_points: int = 500) -> Json:
    """Return the step's time over a watched run in seconds, its last events and its tables, or ``why`` there are none.

    Raises:
        RecordError: a file is damaged.
    """
    folder = entry.folder
    if not is_watched(folder):
        return {"why": "Not watched: `fit --watch=true` keeps the marks until training ends."}
    status, tables = read_status(folder), watch_tables(folder, _EVENTS)
    sketches = _step_sketches(folder, [*read_windows(folder), *([status.window] if status.window else [])], most_points)
    curves = {"median": [of.quantile(0.5) for _, of in sketches], "mean": [of.mean for _, of in sketches]}
    return {
        "why": None,
        "state": tables[0].above,
        "step": [step for step, _ in sketches],
        "curves": {**curves, "99 % are below": [of.quantile(0.99) for _, of in sketches]},
        "events": [
            {"kind": event.kind, "step": event.since_step or event.step, "text": event_text(event, status.world_size)}
            for event in read_events(folder)[-_EVENTS:]
        ],
        "tables": [
            {"heading": _WATCHED[of.headings[0].title], "table": table_of(of)} for of in tables[1:] if of.headings
        ],
    }


def _step_sketches(folder: Path, windows: Sequence[WatchWindow], most: int) -> list[tuple[int, Sketch]]:
    rows = read_last_steps(folder)
    if len(rows) and (not windows or rows["step"][0] <= windows[0].first_step):
        return [
            (int(part["step"][0]), Sketch.of(part["seconds"][:, -1].astype(float)))
            for part in np.array_split(rows, min(most, math.ceil(len(rows) / 10)))
        ]
    every = math.ceil(len(windows) / most) or 1
    known = [(of.first_step, of.seconds["step"]) for of in windows if "step" in of.seconds]
    merged = (known[at : at + every] for at in range(0, len(known), every))
    return [(part[0][0], reduce(Sketch.merged, (of for _, of in part))) for part in merged]


def why(entry: Entry) -> Json:
    """Return the ``terms`` in the order of their bars and the ``step`` that they add up to, or ``why`` there are none.

    ``pieces`` are seconds by phase; those of no known phase have an empty name. Texts are in ms.
    """
    record = entry.record
    if record is None or record.waterfall is None:
        return {"why": "No waterfall: a cell that left no run." if record is None else no_waterfall(record)}
    fall = record.waterfall
    text, _, interval = step_text(fall).partition(" ")
    return {
        "why": None,
        "words": record.words,
        "step": {
            "seconds": fall.step_s,
            "text": text,
            "interval": interval,
            "low_s": fall.ci_low,
            "high_s": fall.ci_high,
            "pieces": of_the_step(record) or {"": fall.step_s},
        },
        "terms": [_term(rung, fall) for rung in rungs(fall)],
        "facts": table_of(known_table(record, GROUPS["Waterfall"])),
        "to_win": unsure(fall) or "a ceiling, never a gain",
        "notes": fall.notes,
    }


def _term(rung: Rung, fall: Waterfall) -> Json:
    term = rung.term
    return {
        "name": term.name,
        "title": rung.title,
        "meaning": _meaning(term.name, fall),
        "start_s": rung.start_s,
        "seconds": term.seconds,
        "text": rung.signed_text,
        "share": term.seconds / fall.step_s if fall.step_s else None,
        "at_most": ceiling_text(fall, term) or None,
        "pieces": rung.pieces,
        "contributors": table_of(contributors(term, fall)),
    }


def _meaning(name: str, fall: Waterfall) -> str:
    if title_in(fall, name) != term_title(name):
        return "kernels that wait for memory, whose bandwidth is unknown"
    return TERMS[name][1] if name in TERMS else ""

"""The list of all runs: what the views Compare and Trace draw, and from which the page chooses a run and a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.quantities import TIMES, Place
from lm_profiler.record.steps import COLUMNS_FILE, STEPS_FILE
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS, SERIES_COLOURS
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    COMPARED,
    FACTS,
    figures,
)
from lm_profiler.report.tables.table_columns import column as column_by_name
from lm_profiler.report.views.blocks import MEANINGS, Json
from lm_profiler.report.views.improve_view import improve_blocks
from lm_profiler.report.views.registry import VIEWS

COLOURS: Json = {"parts": PART_COLOURS, "series": SERIES_COLOURS, "pale": PALE}

COMPARE = {"name": "compare", "title": "Compare", "of_run": False, "is_live": False}
TRACE = {"name": "trace", "title": "Trace", "of_run": True, "is_live": False}
IMPROVE = {"name": "improve", "title": "Improve", "of_run": False, "is_live": False}
_VERSION = "version_"  # a run's own folder, below the one that has its name


def tab_views() -> list[Json]:
    """Return the views of TensorBoard's tab in the order of their tabs."""
    return [*_run_views(), TRACE, COMPARE, IMPROVE]


def page_views() -> list[Json]:
    """Return the views of the HTML page, which holds no traces."""
    return [COMPARE, *_run_views(), IMPROVE]


def _run_views() -> list[Json]:
    return [view.described() for view in VIEWS.values()]


def listing(
    runs: Mapping[str, Entry],
    searches: Mapping[str, ImproveRecord],
    source: str,
    views: Sequence[Json],
    problems: Sequence[str],
) -> Json:
    """Return all runs and cells by name with the value of each column, the columns, and the unreadable files.

    ``source`` is where the runs are from.
    """
    options = _options(runs.values())
    by_name = {column.name: column for column in _main_columns()} | options
    columns = list(by_name.values())
    outcome = COLUMNS["steadiness"].group
    outcome_facts = [fact for fact in FACTS if fact.group == outcome]
    table_columns = []
    for column in (*outcome_facts, *figures(Place.TABLE)):
        if column.place is Place.TABLE:
            table_columns.append(column.name)
    labels = short_names(runs)
    listed_runs = []
    for name, entry in runs.items():
        listed_runs.append(_run(name, entry, columns) | {"label": labels[name]})
    return {
        "where": source,
        "views": list(views),
        "colours": COLOURS,
        "meanings": MEANINGS,
        "columns": [_described(column) for column in columns],
        "options": list(options),
        # the columns of the table of runs, of which the headline stays in view
        "headline": [column.name for column in figures(Place.HEADLINE)],
        "table": table_columns,
        # in the order of a stack
        "parts": {part: TIMES[part].name for part in PART_COLOURS},
        "runs": listed_runs,
        "improve": improve_blocks(searches),
        "empty_views": [] if searches else ["improve"],
        "problems": list(problems),
    }


def _main_columns() -> list[Column]:
    """Return the facts, and the figures of files, without those of single phases: they would be most of the answer."""
    main_columns = []
    for column in COLUMNS.values():
        if column.quantity is None or (
            column.place <= Place.FILE and column.quantity.member is None
        ):
            main_columns.append(column)
    return main_columns


def _options(entries: Iterable[Entry]) -> dict[str, Column]:
    """Return the options that were set on a command line, and those that distinguish runs anyway."""
    # Options with a dot say what was run, others where files go.
    paths: set[str] = set()
    for entry in entries:
        paths.update(path for path in entry.overrides if "." in path)
    set_options = [column_by_name(path) for path in sorted(paths)]
    return {column.name: column for column in (*set_options, *COMPARED)}


def _described(column: Column) -> Json:
    """Return a column as the page's script reads it: its name, title, meaning, and how its figure is shown."""
    quantity = column.quantity
    display = None
    if quantity is not None:
        display = {
            "unit": quantity.shown_unit,
            "scale": quantity.scale,
            "digits": quantity.digits,
        }
    return {
        "name": column.name,
        "title": column.title,
        "meaning": column.meaning,
        "shown": display,
    }


def _run(name: str, entry: Entry, columns: Sequence[Column]) -> Json:
    """Return what the page lists of a run: the values of ``columns`` with intervals, and which views are empty."""
    values: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for column in columns:
        value = column.get(entry)
        if value is None:
            continue
        values[column.name] = value
        interval = column.interval(entry)
        if interval:
            intervals[column.name] = interval
    empty_views = []
    for view in VIEWS.values():
        if view.missing(entry) is not None:
            empty_views.append(view.name)
    has_trace = (entry.folder / "trace").is_dir()
    if not has_trace:
        empty_views.append("trace")
    point = None  # equal for repeats
    if entry.cell is not None:
        point = f"{entry.sweep}: {entry.cell.overrides}"
    return {
        "run": name,
        "stamp": None if entry.record is None else _stamp(entry),
        "point": point,
        "values": values,
        "intervals": intervals,
        "empty_views": empty_views,
    }


def _stamp(entry: Entry) -> str:
    """Return a text that changes when there is something new to show."""
    stamps = []
    for name in ("run.json", STEPS_FILE, COLUMNS_FILE, "trace"):
        path = entry.folder / name
        if path.exists():
            stamps.append(str(path.stat().st_mtime_ns))
    return " ".join(stamps)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each run: without the folders that all runs share, and without a single ``version_0``."""
    stems = {name: _stem(name) for name in names}
    counts = Counter(stems.values())
    labels = {}
    for name, stem in stems.items():
        is_unique = counts[stem] == 1
        labels[name] = stem if is_unique else name
    shared = _shared_folder(list(labels.values()))
    return {name: label.removeprefix(shared) for name, label in labels.items()}


def _stem(name: str) -> str:
    folder, _, run_name = name.rpartition("/")
    if folder and run_name.startswith(_VERSION):
        return folder
    return name


def _shared_folder(names: Sequence[str]) -> str:
    """Return the folders, with the slash behind them, that all ``names`` begin with."""
    folders = [name.split("/")[:-1] for name in names]
    shared = ""
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        shared += f"{parts[0]}/"
    return shared

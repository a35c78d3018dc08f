"""The list of all runs and views, from which a user chooses; the views Compare and Trace draw its values."""

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
_VERSION = "version_"  # the beginning of the name of a run's folder, which is inside the folder with the run's name


def tab_views() -> list[Json]:
    """Return the views in TensorBoard, in their order on the screen."""
    return [*_run_views(), TRACE, COMPARE, IMPROVE]


def page_views() -> list[Json]:
    """Return the views of the HTML page, which contains no traces."""
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

    ``source`` names the place that the runs are from.
    """
    options = _option_columns(runs.values())
    by_name = {column.name: column for column in _main_columns()} | options
    columns = list(by_name.values())
    outcome = COLUMNS["steadiness"].group
    outcome_facts = [fact for fact in FACTS if fact.group == outcome]
    table_columns = []
    for column in (*outcome_facts, *figures(Place.TABLE)):
        # those of the headline are in ``headline`` below
        if column.place is Place.TABLE:
            table_columns.append(column.name)
    labels = short_names(runs)
    listed_runs = []
    for name, entry in runs.items():
        listed_runs.append(_run_entry(name, entry, columns) | {"label": labels[name]})
    return {
        "where": source,
        "views": list(views),
        "colours": COLOURS,
        "meanings": MEANINGS,
        "columns": [_column_description(column) for column in columns],
        "options": list(options),
        # the columns of the table of runs; those of the headline stay visible when it is scrolled
        "headline": [column.name for column in figures(Place.HEADLINE)],
        "table": table_columns,
        # in the order in which phases are stacked in a bar
        "parts": {part: TIMES[part].name for part in PART_COLOURS},
        "runs": listed_runs,
        "improve": improve_blocks(searches),
        "empty_views": [] if searches else ["improve"],
        "problems": list(problems),
    }


def _main_columns() -> list[Column]:
    """Return the facts, and the figures that files for programs have.

    Figures of single phases are left out: they would be most of the answer.
    """
    main_columns = []
    for column in COLUMNS.values():
        if column.quantity is None:
            main_columns.append(column)
            continue
        is_of_single_phase = column.quantity.member is not None
        if column.place <= Place.FILE and not is_of_single_phase:
            main_columns.append(column)
    return main_columns


def _option_columns(entries: Iterable[Entry]) -> dict[str, Column]:
    """Return columns by name: the options that were set for any run, and the facts that always distinguish runs."""
    paths: set[str] = set()
    for entry in entries:
        for path in entry.overrides:
            # Options without a dot, such as the name, do not change what is run.
            if "." in path:
                paths.add(path)
    columns = [column_by_name(path) for path in sorted(paths)]
    columns += COMPARED
    return {column.name: column for column in columns}


def _column_description(column: Column) -> Json:
    """Return the description of a column for the script: name, title, meaning, and how its figure is shown."""
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


def _run_entry(name: str, entry: Entry, columns: Sequence[Column]) -> Json:
    """Return the entry of a run in the list: its values of ``columns`` with intervals, and its empty views.

    Its ``stamp`` changes with the run's files; its ``point`` is equal for the repeats of a cell of a sweep.
    """
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
    stamp = None if entry.record is None else _stamp(entry)
    point = None
    if entry.cell is not None:
        point = f"{entry.sweep}: {entry.cell.overrides}"
    return {
        "run": name,
        "stamp": stamp,
        "point": point,
        "values": values,
        "intervals": intervals,
        "empty_views": _empty_views(entry),
    }


def _empty_views(entry: Entry) -> list[str]:
    """Return the names of the views that have nothing to show of the run."""
    empty_views = []
    for view in VIEWS.values():
        if view.missing(entry) is not None:
            empty_views.append(view.name)
    has_trace = (entry.folder / "trace").is_dir()
    if not has_trace:
        empty_views.append("trace")
    return empty_views


def _stamp(entry: Entry) -> str:
    """Return a text that changes when any file of the run changes."""
    stamps = []
    for name in ("run.json", STEPS_FILE, COLUMNS_FILE, "trace"):
        path = entry.folder / name
        if path.exists():
            stamps.append(str(path.stat().st_mtime_ns))
    return " ".join(stamps)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each run: without the folders that all runs share, and without a single ``version_0``."""
    stems = {name: _name_without_version(name) for name in names}
    counts = Counter(stems.values())
    labels = {}
    for name, stem in stems.items():
        is_unique = counts[stem] == 1
        labels[name] = stem if is_unique else name
    shared = _shared_folder(list(labels.values()))
    return {name: label.removeprefix(shared) for name, label in labels.items()}


def _name_without_version(name: str) -> str:
    """Return the folder of a run called ``version_…``, whose name says nothing; any other name is unchanged."""
    folder, _, run_name = name.rpartition("/")
    if folder and run_name.startswith(_VERSION):
        return folder
    return name


def _shared_folder(names: Sequence[str]) -> str:
    """Return the folders with which all ``names`` begin, with a slash at the end; empty if there are none."""
    folders = [name.split("/")[:-1] for name in names]
    shared = ""
    for parts_at_level in zip(*folders, strict=False):
        if len(set(parts_at_level)) > 1:
            break
        shared += f"{parts_at_level[0]}/"
    return shared

"""The table of runs: a row for each run, cell with its repeats, or group; a column for each fact or figure.

Below it are commands for runs that did not fit, and the best of a sweep's checkpoints.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.analysis.compare.differences import OF_EACH_RUN, SEEDS, flat
from lm_profiler.models.config import DIMENSIONS
from lm_profiler.record.calls import command_line
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import MEMORY, QUANTITIES, Place, bytes_text
from lm_profiler.record.run_record import RecordError, Status
from lm_profiler.record.secrets import masked_line
from lm_profiler.record.sweep_files import CellStatus
from lm_profiler.report.tables import table_columns
from lm_profiler.report.tables.table import STATUS_STYLES, Heading, Table, TableCell, fact_text, is_number
from lm_profiler.report.tables.table_columns import COLUMNS, FACTS, Column, column, figures, preset_of
from lm_profiler.usage_error import UsageError

Merged = Sequence[Entry]  # the entries of one row: at least one

HOW_MERGED = "n > 1: the median of n runs' means [the lowest, the highest]; n = 1: the run's mean [95 % interval]"
WORDS = {"oom": "OOM", "refused": "OOM (planned)"}
_MOST_SHARED = 3  # the most values of a fact that a row names one by one
_STATUSES = tuple(dict.fromkeys((*get_args(CellStatus), *get_args(Status))))


@dataclass(frozen=True)
class Estimate:
    """A figure of ``n`` runs in SI: one run's with its 95 % interval, or the median of several with the extremes."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0


def counted(row: Merged) -> Merged:
    """Return the runs that figures use: the successful ones, or a single one however it ended."""
    return row if len(row) == 1 else [entry for entry in row if entry.status == "ok"]


def estimated(row: Merged, column: Column) -> Estimate:
    """Return the figure of ``column`` over the runs of a row that know it."""
    runs = [entry for entry in counted(row) if column.get(entry) is not None]
    if not runs:
        return Estimate()
    values = [column.get(entry) for entry in runs]
    if len(runs) == 1:
        low, high = column.interval(runs[0]) or (None, None)
        return Estimate(values[0], low, high, 1)
    return Estimate(statistics.median(values), min(values), max(values), len(values))


def fact(row: Merged, column: Column) -> Any:
    """Return the value that the entries share; if they differ, their values as text; None if none is known."""
    values = distinct(map(column.get, row))
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    if len(values) > _MOST_SHARED:
        return f"{values[0]} and {len(values) - 1} more"
    return ", ".join(map(str, values))


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the distinct known ``values``, in order."""
    # By repr: options may be lists and mappings, which cannot be hashed.
    return list({repr(value): value for value in values if value is not None}.values())


def alone(entries: Iterable[Entry]) -> list[Merged]:
    return [[entry] for entry in entries]


def differs(rows: Sequence[Merged], column: Column) -> bool:
    """Return whether ``rows`` differ in a fact; rows with the same mixture of values do not."""
    values = distinct(fact(row, column) for row in rows)
    if len(values) != 1:
        return len(values) > 1
    return any(fact(row, column) is None and unset(row[0], column) for row in rows)


def set_apart(entries: Merged) -> list[str]:
    """Return the options that all configs have, but with different values."""
    configs = [flat(entry.config) for entry in entries if entry.config is not None]
    if not configs:
        return []
    different = []
    for path, value in configs[0].items():
        if path in OF_EACH_RUN | SEEDS or not all(path in config for config in configs):
            continue
        if any(config[path] != value for config in configs):
            different.append(path)
    return different


def unset(entry: Entry, of: Column) -> bool:
    """Return whether ``of`` is an option that the run is known not to have set."""
    return of.option is not None and entry.config is not None and of.get(entry) is None


def told_by_size(groups: Sequence[Merged], column: Column) -> bool:
    """Return whether ``column`` is a dimension that follows from the size of a preset, which has its own column."""
    if column.name == "parameters":
        return all(told_by_size(groups, COLUMNS[name]) for name in DIMENSIONS)
    if column.name not in DIMENSIONS:
        return False
    for group in groups:
        size = fact(group, COLUMNS["size"])
        if fact(group, column) != getattr(preset_of(size), column.name, None):
            return False
    return True


def status(row: Merged, words: Mapping[str, str] = {}) -> str:
    """Return ``ok``, or the number of entries by status; ``words`` replace statuses for people."""
    endings = {words.get(entry.status, entry.status) for entry in row}
    if len(endings) == 1:
        return endings.pop()
    return how_many(row, words)


def how_many(row: Merged, words: Mapping[str, str] = WORDS) -> str:
    """Return the number of entries by status, for people, successful ones first: ``1 OOM, 2 failed``."""
    counts = Counter(entry.status for entry in row)
    in_order = sorted(counts, key=_status_order)
    return ", ".join(f"{counts[status]} {words.get(status, status)}" for status in in_order)


def _status_order(status: str) -> tuple[int, str]:
    """Return a sort key: statuses as the record names them, others last."""
    index = _STATUSES.index(status) if status in _STATUSES else len(_STATUSES)
    return index, status


def repeats_together(entries: Iterable[Entry]) -> list[Merged]:
    """Return a row for each cell of a sweep with all its repeats, and one for each run elsewhere."""
    rows_by_key: dict[object, list[Entry]] = {}
    for entry in entries:
        key: object = id(entry)
        if entry.cell is not None:
            key = (entry.sweep, entry.cut, *entry.cell.overrides.items())
        rows_by_key.setdefault(key, []).append(entry)
    return list(rows_by_key.values())


def by_facts(entries: Iterable[Entry], columns: Sequence[Column]) -> dict[tuple[str, ...], list[Entry]]:
    """Group the entries by their values of ``columns``, in the order of the columns."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: [rank(of.get(entry)) for of in columns]):
        # Options may be lists and mappings, which cannot be keys.
        groups.setdefault(tuple(repr(of.get(entry)) for of in columns), []).append(entry)
    return groups


def rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key for a table: numbers by size, presets from the smallest, words by letter, None last."""
    if isinstance(value, (int, float)):
        return 0, value, ""
    size = preset_of(value)
    if size is not None:
        return 1, size.num_parameters(), value
    if value is None:
        return 3, 0, ""
    return 2, 0, str(value)


def unlike(row: Merged) -> list[str]:
    """Return the titles of facts that affect figures and in which the entries differ."""
    if len(row) < 2:
        return []
    given = [name for entry in row for name in entry.overrides]
    facts = [*table_columns.COMPARED, *map(column, (*DIMENSIONS, *given, *set_apart(row)))]
    columns = {of.name: of for of in facts}
    return [of.title for of in columns.values() if differs(alone(row), of)]


_MOST_REASONS, _MOST_NAMES = 20, 3


def rows(groups: Sequence[Merged], columns: Sequence[Column] | None = None, by: Sequence[Column] = ()) -> Table:
    """Return a table for people: ``columns``, or what tells the rows apart, the main figures and how each ended."""
    names = by or naming(groups)
    usual = _figures(groups)
    known = [figure for figure in usual if _known(groups, figure)]
    above = []
    if columns:
        shown = list(columns)
        table = _table(groups, shown)
    else:
        shown = [*names, *known, COLUMNS["status"]]
        table = _table(groups, shown, without_interval=known[1:])
    above += same_in_all(groups, shown)
    unknown = [figure.title for figure in usual if figure not in known and not _is_time(figure)]
    if columns is None and unknown:
        above.append(f"unknown in all rows: {', '.join(unknown)}")
    below = [*_how_to_read(groups, table), *notes(groups, by or called(names))]
    return Table(table.headings, table.rows, above, below)


def _how_to_read(groups: Sequence[Merged], table: Table) -> list[str]:
    """Return a line on what the figures and brackets of ``table`` are, where it has any that need one."""
    if any(len(group) > 1 for group in groups):
        return [HOW_MERGED]
    if any("[" in cell.text and cell.low for row in table.rows for cell in row):
        return ["[ ]: 95 % interval of the mean"]
    return []


def apart_by(groups: Sequence[Merged]) -> list[Column]:
    return [of for of in _known_facts(groups) if differs(groups, of) and not told_by_size(groups, of)]


def naming(groups: Sequence[Merged]) -> list[Column]:
    """Return the facts that distinguish rows, after the runs' names unless the facts identify the rows' cells."""
    apart = apart_by(groups)
    labels = {tuple(fact_text(fact(group, column)) for column in apart) for group in groups}
    all_are_cells = all(group[0].cell is not None for group in groups)
    if apart and all_are_cells and len(labels) == len(groups):
        return apart
    name = COLUMNS["name"]
    names_differ = len(distinct(fact(group, name) for group in groups)) == len(groups)
    return [name if names_differ else COLUMNS["folder"], *apart]


def called(names: Sequence[Column]) -> Sequence[Column]:
    """Return the columns of ``naming`` by which messages name a row: only the run if it is shown."""
    return names[:1] if names[0].name in ("name", "folder") else names


def same_in_all(groups: Sequence[Merged], shown: Sequence[Column]) -> list[str]:
    """Return a line of the facts that are the same in all rows, and one of the facts that only some rows know."""
    entries = [entry for group in groups for entry in group]
    in_all, where_known = [], []
    for shared_fact in _known_facts(groups):
        if shared_fact in shown or differs(alone(entries), shared_fact):
            continue
        text = f"{shared_fact.title} {_text(fact(entries, shared_fact), shared_fact)}"
        rows_knowing = sum(all(shared_fact.get(entry) is not None for entry in group) for group in groups)
        if rows_knowing == len(groups):
            in_all.append(text)
        else:
            where_known.append(f"{text} ({rows_knowing} of {len(groups)} rows)")
    lines = []
    if in_all:
        lines.append(f"in all rows: {', '.join(in_all)}")
    if where_known:
        lines.append(f"where known: {', '.join(where_known)}")
    return lines


def raw_rows(groups: Sequence[Merged], columns: Sequence[Column] | None = None, by: Sequence[Column] = ()) -> Table:
    """Return a table for programs: facts that all rows share are columns too."""
    if columns is None:
        which = [of for of in COLUMNS.values() if of.quantity is None and of.place is Place.HEADLINE]
        more = [of for of in figures(Place.FILE) if _known(groups, of)]
        facts = [*by, *which, *_known_facts(groups)]
        columns = list({of.name: of for of in (*facts, *_figures(groups), *more)}.values())
    return _table(groups, columns)


def label(group: Merged, apart: Sequence[Column]) -> str:
    """Return the name of the row of ``group`` in messages: the facts that distinguish it, or its run."""
    return " ".join(filter(None, (told(of, fact(group, of)) for of in apart))) or group[0].name


def told(of: Column, value: Any) -> str:
    """Return a single fact as text: numbers, truth values and ``none`` come with their title."""
    bare = isinstance(value, str) and value != "none"
    return fact_text(value) if value is None or bare else f"{of.title} {fact_text(value)}"


def fact_cell(group: Merged, of: Column) -> TableCell:
    if of.name == "status":
        word = status(group)
        return TableCell(word, status(group, WORDS), style=STATUS_STYLES.get(word, ""))
    value = fact(group, of)
    return TableCell(value, _text(value, of))


def _text(value: Any, of: Column) -> str:
    return f"{value:,}" if of.name == "parameters" and isinstance(value, int) else fact_text(value)


def cell(group: Merged, column: Column, interval: bool = True) -> TableCell:
    """Return the cell of a fact or figure; empty where the run did not get that far or has no such phase."""
    if column.quantity is None:
        return fact_cell(group, column)
    typical = estimated(group, column)
    if typical.value is None:
        has_no_figure = status(group) != "ok" or _is_time(column)
        return TableCell(text="" if has_no_figure else "unknown")
    if interval:
        text = column.quantity.rounded(typical.value, typical.low, typical.high)
    else:
        text = column.quantity.rounded(typical.value)
    return TableCell(typical.value, text, typical.low, typical.high)


def heading(of: Column, groups: Sequence[Merged]) -> Heading:
    """Return the heading of a column of facts or figures; numbers are right-aligned."""
    if of.quantity is not None:
        return Heading(of.name, of.quantity.heading, figures=True)
    values = distinct(fact(group, of) for group in groups)
    return Heading(of.name, of.title, figures=bool(values) and all(map(is_number, values)))


def notes(groups: Sequence[Merged], apart: Sequence[Column]) -> list[str]:
    """Return notes for the reader: which rows mix different runs, and why some have no figures."""
    return [*_notes_on_mixed_rows(groups, apart), *_reasons(groups, apart)]


def _notes_on_mixed_rows(groups: Sequence[Merged], apart: Sequence[Column]) -> list[str]:
    mixed: dict[str, list[str]] = {}
    for group in groups:
        facts = ", ".join(unlike(group))
        if facts:
            mixed.setdefault(facts, []).append(label(group, apart))
    lines = []
    for facts, labels in mixed.items():
        line = f"note: runs that differ in {facts} share a row: {'; '.join(labels[:_MOST_NAMES])}"
        if len(labels) > _MOST_NAMES:
            line += f" and {len(labels) - _MOST_NAMES} more"
        lines.append(line)
    return lines


def _reasons(groups: Sequence[Merged], apart: Sequence[Column]) -> list[str]:
    """Return why runs have no figures, each reason of a row once."""
    reasons = []
    for group in groups:
        for entry in group:
            if entry.reason is not None:
                word = WORDS.get(entry.status, entry.status)
                reasons.append(f"{label(group, apart)}: {word}: {entry.reason}")
    reasons = list(dict.fromkeys(reasons))
    if len(reasons) <= _MOST_REASONS:
        return reasons
    more = len(reasons) - _MOST_REASONS
    return [*reasons[:_MOST_REASONS], f"and {more} more; --columns name,status,reason shows all"]


def _table(groups: Sequence[Merged], columns: Sequence[Column], without_interval: Sequence[Column] = ()) -> Table:
    headings = [heading(column, groups) for column in columns]
    cells = []
    for group in groups:
        cells.append([cell(group, column, interval=column not in without_interval) for column in columns])
    if any(len(group) > 1 for group in groups):
        headings.append(Heading("n", "n", figures=True))
        for group, row in zip(groups, cells, strict=True):
            n = sum(entry.status == "ok" for entry in counted(group))
            row.append(TableCell(n, str(n)))
    return Table(headings, cells)


def _known_facts(groups: Sequence[Merged]) -> list[Column]:
    swept = [column(name) for name in dict.fromkeys(name for group in groups for e in group for name in e.overrides)]
    *usual, last = FACTS
    own = [of for of in swept if of.name not in COLUMNS]
    return [of for of in (*usual, *own, last) if _known(groups, of)]


def _figures(groups: Sequence[Merged]) -> list[Column]:
    entries = [entry for group in groups for entry in group]
    allocated, _, resident = (COLUMNS[of.name] for of in MEMORY.values())
    memory = [table_columns.peak_memory(entries)]
    if any(entry.status == "ok" and allocated.get(entry) is None for entry in entries):
        memory = list(dict.fromkeys((*memory, resident)))
    return [of for of in figures(Place.TABLE) if of not in (allocated, resident)] + memory


def _is_time(of: Column) -> bool:
    return of.quantity is not None and of.quantity.unit == "s"


def _known(groups: Sequence[Merged], of: Column) -> bool:
    return any(of.get(entry) is not None for group in groups for entry in group)


# -- below the table ---------------------------------------------------------------------------------------------------

_MOST = 5  # the most runs that a table gives advice for


def remedies(entries: Sequence[Entry]) -> list[str]:
    """Return, for each of ``entries`` that did not fit, a command that would fit as planned, and other options."""
    advice: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if lines := tuple(_remedies(entry)):
            advice.setdefault(lines, [f"{entry.name}:", *lines])  # repeats end the same and are shown once
    shown = [line for lines in list(advice.values())[:_MOST] for line in lines]
    return shown + [f"{len(advice) - _MOST} more did not fit"] * (len(advice) > _MOST)


def _remedies(entry: Entry) -> Iterator[str]:
    if entry.status not in ("oom", "refused"):
        return
    command = "" if entry.record is None else entry.record.command
    if entry.cell is not None:  # as a single run, without the options that a sweep adds to separate its cells
        own = [given for given in entry.cell.arguments if not given.startswith(("--log_dir=", "--name="))]
        command = command_line(masked_line(own))
    failure = entry.record.failure if entry.record is not None else None
    if failure is not None and failure.remedies:
        first, *others = failure.remedies
        yield f"  would fit, as planned: {command} {first}"
        if others:
            yield f"  or instead: {' or '.join(others)}"
    elif " -m lm_profiler fit " in command:
        yield f"  what would fit: {command.replace(' -m lm_profiler fit ', ' -m lm_profiler plan ', 1)}"


_EVERY = "model.checkpoint_every"

# cells that differ only in their checkpoints, by the blocks per checkpoint and nested ones; () is none
Checkpoints = Mapping[tuple[int, ...], Sequence[Entry]]


def best_checkpoints(entries: Sequence[Entry]) -> list[str]:
    """Return, for cells of a sweep that differ only in their checkpoints, a line with the smallest peak."""
    alike: dict[tuple[Path | None, str], dict[tuple[int, ...], list[Entry]]] = {}
    for entry in entries:
        if entry.cell is not None and _EVERY in entry.overrides:
            rest = ", ".join(f"{name}={value}" for name, value in entry.overrides.items() if name != _EVERY)
            every = entry.option(_EVERY)
            key = (every,) if isinstance(every, int) else tuple(every or ())
            alike.setdefault((entry.sweep, rest), {}).setdefault(key, []).append(entry)
    lines = {rest: _best(checkpoints) for (_, rest), checkpoints in alike.items()}
    return [f"{rest}: " * (len(alike) > 1) + line for rest, line in lines.items() if line]


def _best(checkpoints: Checkpoints) -> str | None:
    which, peaks = "", dict[tuple[int, ...], int]()
    for word, name in {"planned": "planned_peak_bytes", "measured": "allocated_peak_bytes"}.items():
        get = QUANTITIES[name].get
        known = {every: [get(of.record) or 0 for of in cells if of.record] for every, cells in checkpoints.items()}
        if largest := {every: max(of_cells) for every, of_cells in known.items() if any(of_cells)}:
            which, peaks = word, largest
    tried = sorted(peaks)
    if len(tried) < 2:
        return None
    best = min(tried, key=lambda every: peaks[every])  # the first of equal ones: no checkpoint if that is as good
    at = tried.index(best)
    others = [every for every in tried[max(at - 1, 0) : at + 2] if every not in (best, ())]
    beside = [f"{_named(every)} {bytes_text(peaks[every])}" for every in [()] * (best != () in peaks) + others]
    line = f"checkpoint_every={_named(best)} has the smallest peak ({which}), {bytes_text(peaks[best])}"
    return f"{line}; {', '.join(beside)}{_cost(checkpoints, best)}"


def _named(every: tuple[int, ...]) -> str:
    return "null" if not every else str(every[0]) if len(every) == 1 else str([*every])


def _cost(checkpoints: Checkpoints, best: tuple[int, ...]) -> str:
    good = {every: [cell for cell in checkpoints.get(every, ()) if cell.status == "ok"] for every in ((), best)}
    if not best or not all(good.values()):
        return ""
    try:
        ratio = compare(good[()], good[best]).step.interval
    except (RecordError, UsageError):
        return ""
    return "" if ratio is None else f"; its step takes {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of null's"

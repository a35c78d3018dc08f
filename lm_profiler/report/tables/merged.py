"""Entries that share a row, as repeats of a cell or runs with the same facts, and their common facts and figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from lm_profiler.analysis.compare.differences import OF_EACH_RUN, SEEDS, flat
from lm_profiler.record.entry import Entry
from lm_profiler.record.run.record import Status
from lm_profiler.record.sweep import CellStatus
from lm_profiler.report.tables.table_columns import COLUMNS, COMPARED, DIMENSIONS, Column, column, preset_of

Merged = Sequence[Entry]  # the entries of one row: at least one

HOW_MERGED = "n > 1: the median of n runs' means [the lowest, the highest]; n = 1: the run's mean [95 % interval]"
WORDS = {"oom": "OOM"}
_STATUSES = tuple(dict.fromkeys((*get_args(CellStatus), *get_args(Status))))


@dataclass(frozen=True)
class Estimate:
    """A figure of ``n`` runs in SI: one run's with its 95 % interval, or the median of several with the extremes."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0


def counted(row: Merged) -> Merged:
    """Return the runs that figures are of: those that ended well, or a single one however it ended."""
    return row if len(row) == 1 else [entry for entry in row if entry.status == "ok"]


def estimated(row: Merged, of: Column) -> Estimate:
    """Return the figure of the runs that count."""
    known = [(entry, value) for entry in counted(row) if (value := of.get(entry)) is not None]
    if not known:
        return Estimate()
    if len(known) == 1:
        [(entry, value)] = known
        low, high = of.interval(entry) or (None, None)
        return Estimate(value, low, high, 1)
    values = [value for _, value in known]
    return Estimate(statistics.median(values), min(values), max(values), len(values))


def fact(row: Merged, of: Column) -> Any:
    """Return the value that the entries share; where they differ, their values as text; None where none is known."""
    values = distinct(map(of.get, row))
    if len(values) > 3:
        return f"{values[0]} and {len(values) - 1} more"
    return values[0] if len(values) == 1 else ", ".join(map(str, values)) or None


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the known ones of ``values``, each once, in order."""
    # By repr: options may be lists and mappings, which cannot be hashed.
    return list({repr(value): value for value in values if value is not None}.values())


def alone(entries: Iterable[Entry]) -> list[Merged]:
    """Return a row for each of ``entries``."""
    return [[entry] for entry in entries]


def differs(rows: Sequence[Merged], of: Column) -> bool:
    """Return whether ``rows`` differ in a fact; rows with the same mixture of values do not."""
    known = distinct(fact(row, of) for row in rows)
    return len(known) > 1 or (bool(known) and any(fact(row, of) is None and unset(row[0], of) for row in rows))


def set_apart(entries: Merged) -> list[str]:
    """Return the options that all configs have, but not all with the same value."""
    configs = [flat(entry.config) for entry in entries if entry.config is not None]
    shared = [path for path in (configs[0] if configs else ()) if all(path in config for config in configs)]
    told = [path for path in shared if path not in OF_EACH_RUN | SEEDS]
    return [path for path in told if any(config[path] != configs[0][path] for config in configs)]


def unset(entry: Entry, of: Column) -> bool:
    """Return whether ``of`` is an option that the run is known not to have set."""
    return of.option is not None and entry.config is not None and of.get(entry) is None


def told_by_size(groups: Sequence[Merged], of: Column) -> bool:
    """Return whether ``of`` is a dimension that follows from the size of a preset, which has a column of its own."""
    if of.name == "parameters":
        return all(told_by_size(groups, COLUMNS[name]) for name in DIMENSIONS)
    pairs = [(fact(group, COLUMNS["size"]), fact(group, of)) for group in groups]
    return of.name in DIMENSIONS and all(value == getattr(preset_of(size), of.name, None) for size, value in pairs)


def status(row: Merged, words: Mapping[str, str] = {}) -> str:
    """Return ``ok``, or how many ended in which way; ``words`` replace statuses for people."""
    endings = {words.get(entry.status, entry.status) for entry in row}
    return endings.pop() if len(endings) == 1 else how_many(row, words)


def how_many(row: Merged, words: Mapping[str, str] = WORDS) -> str:
    """Return how many ended in which way, for people, the good ones first: ``1 OOM, 2 failed``."""
    counts = Counter(entry.status for entry in row)
    in_order = sorted(sorted(counts), key=lambda of: _STATUSES.index(of) if of in _STATUSES else len(_STATUSES))
    return ", ".join(f"{counts[status]} {words.get(status, status)}" for status in in_order)


def repeats_together(entries: Iterable[Entry]) -> list[Merged]:
    """Return a row for each cell of a sweep with all its repeats, and one for each run elsewhere."""
    cells: dict[object, list[Entry]] = {}
    for entry in entries:
        key = (entry.sweep, entry.cut, *entry.cell.overrides.items()) if entry.cell is not None else id(entry)
        cells.setdefault(key, []).append(entry)
    return list(cells.values())


def by_facts(entries: Iterable[Entry], columns: Sequence[Column]) -> dict[tuple[str, ...], list[Entry]]:
    """Group the entries by their values of ``columns``, in the order of these."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: [rank(of.get(entry)) for of in columns]):
        # Options may be lists and mappings, which cannot be keys.
        groups.setdefault(tuple(repr(of.get(entry)) for of in columns), []).append(entry)
    return groups


def rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key for a table: numbers by size, presets from the smallest, words by letter, None last."""
    if isinstance(value, (int, float)):
        return 0, value, ""
    if (size := preset_of(value)) is not None:
        return 1, size.num_parameters(), value
    return (3, 0, "") if value is None else (2, 0, str(value))


def unlike(row: Merged) -> list[str]:
    """Return the titles of the facts that figures depend on and in which the entries differ."""
    if len(row) < 2:
        return []
    given = [name for entry in row for name in entry.overrides]
    facts = [*COMPARED, *map(column, (*DIMENSIONS, *given, *set_apart(row)))]
    columns = {of.name: of for of in facts}
    return [of.title for of in columns.values() if differs(alone(row), of)]

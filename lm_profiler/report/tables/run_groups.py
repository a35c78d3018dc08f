"""Groups of runs, each of which is a row of a table: how runs are grouped, and the facts and figures of a group."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

from lm_profiler.analysis.compare.differences import (
    RUN_SPECIFIC_OPTIONS,
    SEEDS,
    flat_options,
)
from lm_profiler.models.config import DIMENSIONS
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Status
from lm_profiler.record.sweep_files import CellStatus
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.table import fact_text
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    COMPARED,
    column,
    columns_named,
    preset_of,
)
from lm_profiler.usage_error import UsageError

RunGroup = Sequence[Entry]  # the runs of one row, at least one

STATUS_WORDS = {"oom": "OOM", "refused": "OOM (planned)"}
_LISTED_VALUES = 3  # the most values of a fact that a row lists
_VALUES_OF_MESSAGE = 10  # the most values of a fact that a message lists
# all statuses, in the order in which their numbers are printed
_STATUSES = tuple(dict.fromkeys((*get_args(CellStatus), *get_args(Status))))
# the kinds of values that ``sort_key`` distinguishes, in their order
_NUMBER, _PRESET, _TEXT, _UNKNOWN = range(4)


# -- grouping ----------------------------------------------------------------------------------------------------------


def single_run_groups(entries: Iterable[Entry]) -> list[RunGroup]:
    return [[entry] for entry in entries]


def repeats_together(entries: Iterable[Entry]) -> list[RunGroup]:
    """Return a group for each cell of a sweep with all its repeats, and one for each run elsewhere."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        key: object = id(entry)
        if entry.cell is not None:
            key = (entry.sweep, entry.cut, *entry.cell.overrides.items())
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def group_by_facts(
    entries: Iterable[Entry], columns: Sequence[Column]
) -> dict[tuple[str, ...], list[Entry]]:
    """Group the entries by their values of ``columns``, sorted by these values."""

    def sort_keys(entry: Entry) -> list[tuple[int, float, str]]:
        return [sort_key(column.get(entry)) for column in columns]

    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in sorted(entries, key=sort_keys):
        # Options may be lists and mappings, which cannot be keys.
        key = tuple(repr(column.get(entry)) for column in columns)
        groups.setdefault(key, []).append(entry)
    return groups


def sort_key(value: Any) -> tuple[int, float, str]:
    """Return a sort key: its kind, its size and its text.

    The kinds are numbers, presets of a model by their parameters, texts, and None, which comes last.
    """
    if isinstance(value, (int, float)):
        return _NUMBER, value, ""
    size = preset_of(value)
    if size is not None:
        return _PRESET, size.num_parameters(), value
    if value is None:
        return _UNKNOWN, 0, ""
    return _TEXT, 0, str(value)


# -- figures and statuses ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A figure of ``n`` runs in SI units.

    Of a single run it is the run's figure with its 95 % interval, of several runs their median with the extremes.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    is_lower_bound: bool = False  # a rate on a machine that other programs used
    # whether the run has too few steps, or too different ones, for an interval
    lacks_interval: bool = False


def runs_for_figures(group: RunGroup) -> RunGroup:
    """Return the runs that figures use: a single run in any case, of several only the successful ones."""
    if len(group) == 1:
        return group
    return [entry for entry in group if entry.status == "ok"]


def estimate(group: RunGroup, column: Column) -> Estimate:
    """Return the figure of ``column`` for a group: it uses the runs in which the figure is known.

    With several runs it is their median, and the ends of its range are their extremes.
    """
    runs = [entry for entry in runs_for_figures(group) if column.get(entry) is not None]
    if not runs:
        return Estimate()
    # for each run whose rate is only a lower bound, the share of it that is certain; else None
    shares = [column.lower_bound_share(entry) for entry in runs]
    is_lower_bound = any(share is not None for share in shares)
    values = []
    for entry, share in zip(runs, shares, strict=True):
        value = column.get(entry)
        if share is not None:
            value *= share
        values.append(value)
    if len(runs) > 1:
        return Estimate(
            value=statistics.median(values),
            low=min(values),
            high=max(values),
            n=len(values),
            is_lower_bound=is_lower_bound,
        )
    single_run = runs[0]
    single = Estimate(value=values[0], n=1, is_lower_bound=is_lower_bound)
    ends = column.interval(single_run)
    if ends is None:
        return replace(single, lacks_interval=column.lacks_interval(single_run))
    low, high = ends
    factor = 1.0 if shares[0] is None else shares[0]
    return replace(single, low=low * factor, high=high * factor)


def status_text(group: RunGroup, words: Mapping[str, str] = {}) -> str:
    """Return the status that all entries share, or their number by status; ``words`` replaces statuses for people."""
    statuses = {words.get(entry.status, entry.status) for entry in group}
    if len(statuses) == 1:
        return statuses.pop()
    return status_counts(group, words)


def status_counts(group: RunGroup, words: Mapping[str, str] = STATUS_WORDS) -> str:
    """Return the number of entries by status as text, successful ones first: ``1 OOM, 2 failed``."""
    counts = Counter(entry.status for entry in group)
    texts = []
    for status in sorted(counts, key=_status_order):
        word = words.get(status, status)
        texts.append(f"{counts[status]} {word}")
    return ", ".join(texts)


def _status_order(status: str) -> tuple[int, str]:
    """Return a sort key for a status: known statuses in the order of ``_STATUSES``, others last."""
    index = len(_STATUSES)
    if status in _STATUSES:
        index = _STATUSES.index(status)
    return index, status


# -- facts -------------------------------------------------------------------------------------------------------------


def fact_value(group: RunGroup, column: Column) -> Any:
    """Return the value that the runs share; if they differ, their values as text; None if no run has it."""
    values = distinct_values(column.get(entry) for entry in group)
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    if len(values) > _LISTED_VALUES:
        return f"{values[0]} and {len(values) - 1} more"
    return ", ".join(str(value) for value in values)


def distinct_values(values: Iterable[Any]) -> list[Any]:
    """Return the distinct ``values`` that are not None, in order."""
    by_text: dict[str, Any] = {}
    for value in values:
        if value is not None:
            # options may be lists and mappings, which cannot be hashed
            by_text[repr(value)] = value
    return list(by_text.values())


def facts_named(
    names: Iterable[str], entries: Sequence[Entry], option: str
) -> list[Column]:
    """Return the columns called ``names``, which ``option`` takes; raise UsageError if one of them is a figure."""
    facts = columns_named(names, entries)
    for fact in facts:
        if fact.quantity is not None:
            raise UsageError(
                f"{option}: expected an option or property that distinguishes runs, given the figure {fact.name!r}"
            )
    return facts


def known_values_text(column: Column, entries: Iterable[Entry]) -> str:
    """Return the values of a fact in ``entries`` for a message: ``verb is fit, validate``."""
    values = distinct_values(column.get(entry) for entry in entries)
    if not values:
        return f"{column.name} is unknown"
    texts = [fact_text(value) for value in values[:_VALUES_OF_MESSAGE]]
    return f"{column.name} is {', '.join(texts)}"


def fact_phrase(column: Column, value: Any) -> str:
    """Return a fact as a phrase: numbers, truth values and the word ``none`` are preceded by the fact's title."""
    text = fact_text(value)
    is_unknown = value is None
    is_self_explanatory = isinstance(value, str) and value != "none"
    if is_unknown or is_self_explanatory:
        return text
    return f"{column.title} {text}"


def groups_differ(groups: Sequence[RunGroup], column: Column) -> bool:
    """Return whether ``groups`` differ in a fact; two groups with the same mixture of values do not differ."""
    values = distinct_values(fact_value(group, column) for group in groups)
    if len(values) != 1:
        return len(values) > 1
    # All known values are equal. A group differs if it certainly did not set the option, not if nothing is known.
    return any(
        fact_value(group, column) is None and is_unset(group[0], column)
        for group in groups
    )


def is_unset(entry: Entry, column: Column) -> bool:
    """Return whether ``column`` is an option that the run certainly did not set."""
    if column.option is None or entry.config is None:
        return False
    return column.get(entry) is None


def have_options(groups: Sequence[RunGroup]) -> bool:
    """Return whether every run has options; a program that was profiled with ``run`` has none."""
    records = [entry.record for entry in chain.from_iterable(groups)]
    return all(record is None or record.config is not None for record in records)


def follows_from_size(groups: Sequence[RunGroup], column: Column) -> bool:
    """Return whether ``column`` is a dimension of the model that follows from the size of its preset."""
    if column.name == "parameters":
        # The number of parameters follows from the size if all dimensions do.
        follow = [follows_from_size(groups, COLUMNS[name]) for name in DIMENSIONS]
        return all(follow) and have_options(groups)
    if column.name not in DIMENSIONS:
        return False
    for group in groups:
        size = fact_value(group, COLUMNS["size"])
        if fact_value(group, column) != getattr(preset_of(size), column.name, None):
            return False
    return True


def differing_options(entries: Iterable[Entry]) -> list[str]:
    """Return the options that all configs have, but with different values."""
    configs = [
        flat_options(entry.config) for entry in entries if entry.config is not None
    ]
    if not configs:
        return []
    paths = []
    for path, value in configs[0].items():
        if path in RUN_SPECIFIC_OPTIONS or path in SEEDS:
            continue
        in_all_configs = all(path in config for config in configs)
        if in_all_configs and any(config[path] != value for config in configs):
            paths.append(path)
    return paths


def overridden_options(groups: Iterable[RunGroup]) -> list[str]:
    """Return the options that a sweep or a command line sets in any run."""
    paths: dict[str, None] = {}
    for group in groups:
        for entry in group:
            paths.update(dict.fromkeys(entry.overrides))
    return list(paths)


def mixed_facts(group: RunGroup) -> list[str]:
    """Return the titles of the facts that affect figures and in which the runs of ``group`` differ."""
    if len(group) < 2:
        return []
    names = list(DIMENSIONS)
    names += overridden_options([group])
    names += differing_options(group)
    facts = {fact.name: fact for fact in COMPARED}
    for name in names:
        fact = column(name)
        facts[fact.name] = fact
    runs = single_run_groups(group)
    return [fact.title for fact in facts.values() if groups_differ(runs, fact)]

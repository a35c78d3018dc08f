"""Entries against what varies among them, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.record.collection import Entry
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.report.tables.columns import COLUMNS, COMPARED, Column, column
from lm_profiler.report.tables.merged import (
    WORDS,
    Merged,
    alone,
    by_facts,
    differs,
    set_apart,
    status,
    told_by_size,
    unset,
)
from lm_profiler.report.tables.merged import figure as estimated
from lm_profiler.report.tables.options import columns_named
from lm_profiler.report.tables.table import fact_text
from lm_profiler.usage_error import UsageError


@dataclass(frozen=True)
class Group:
    """Entries that differ in nothing that is known of them; ``values`` of ``columns``, in which groups differ."""

    values: tuple[Any, ...]
    entries: Merged
    columns: tuple[Column, ...] = ()

    @property
    def label(self) -> str:
        """Beside an axis that says what of: a single value alone."""
        return _bare(self.columns[0], self.entries[0]) if len(self.columns) == 1 else self.told

    @property
    def told(self) -> str:
        """On its own: each value says what it is of."""
        return ", ".join(word(of, self.entries[0]) for of in self.columns)

    def absence(self, figure: Column) -> str:
        """Why there is no point for ``figure``, or only of some repeats; empty where all is well."""
        return self.trouble or ("unknown" if estimated(self.entries, figure).value is None else "")

    @property
    def trouble(self) -> str:
        """How the entries ended, such as ``OOM`` or ``1 ok, 1 failed``; empty where all ended well."""
        return "" if all(entry.status == "ok" for entry in self.entries) else status(self.entries, WORDS)


@dataclass(frozen=True)
class Groups:
    """Groups in the order of the values of ``columns``, of which the first is what they are shown against."""

    columns: tuple[Column, ...]
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        """What the labels of the groups are of; empty where they say it themselves."""
        return self.columns[0].title if len(self.columns) == 1 else ""


def grouped(entries: Sequence[Entry], by: str | None = None, numbers: bool = False) -> Groups:
    """``entries`` against ``by``, a fact or an option; where it is None, against the first that varies.

    With ``numbers`` rather against the context length, or else an option that is a number: lines need one.

    Raises:
        UsageError: there is no such fact or option, or it is a figure.
    """
    others = varying(entries)
    if by is not None:
        first = _axis(by, entries)
    elif numbers and others:
        first = min(others, key=lambda axis: (axis.name != "context_length", not _is_number(axis, entries)))
    else:
        first = others[0] if others else COLUMNS["name"]
    columns = (first, *(axis for axis in others if axis.name != first.name))
    alike = by_facts(entries, columns).values()
    groups = (Group(tuple(_value(axis, group[0]) for axis in columns), group, columns) for group in alike)
    return Groups(columns, tuple(groups))


def varying(entries: Sequence[Entry]) -> list[Column]:
    """What the entries differ in: the options that were given, the facts that people compare by, other options.

    A value that nobody knows, of a run that died early, is no difference.
    """
    given = dict.fromkeys(path for entry in entries for path in entry.overrides)
    axes = {axis.name: axis for axis in (*map(column, given), *COMPARED, *map(column, set_apart(entries)))}
    rows = alone(entries)
    return [axis for axis in axes.values() if differs(rows, axis) and not told_by_size(rows, axis)]


def word(of: Column, entry: Entry) -> str:
    """A fact of ``entry`` for people, which says what it is of: ``bf16-mixed``, ``compiled``, ``batch 4``."""
    value, title = of.get(entry), of.title.rpartition(".")[2]
    if value is None:
        return f"no {title}" if unset(entry, of) else f"{title} unknown"
    if isinstance(value, bool):
        return _SPOKEN.get((of.name, value)) or (title if value else f"no {title}")
    return fact_text(value) if isinstance(value, str) else f"{title} {fact_text(value)}"


_SPOKEN = {("compile", True): "compiled", ("compile", False): "eager"}


def _bare(of: Column, entry: Entry) -> str:
    value = of.get(entry)
    return word(of, entry) if value is None or isinstance(value, bool) else fact_text(value)


def stack(group: Group) -> dict[str, float]:
    """Seconds of each part of the group's step: their medians, scaled to add up to the median step.

    Medians do not add up; one odd step would move means.
    """
    typical = {part: estimated(group.entries, COLUMNS[TIMES[part].name]).value for part in PARTS}
    known = {part: seconds for part, seconds in typical.items() if seconds is not None}
    step, total = estimated(group.entries, COLUMNS[TIMES["step"].name]).value, sum(known.values())
    return {part: seconds * (step / total if step and total else 1.0) for part, seconds in known.items()}


def lines(groups: Groups) -> dict[str, list[Group]]:
    """The groups by what they are called beside the first column: a line each, over the first column's values."""
    rest = groups.columns[1:]
    by_label: dict[str, list[Group]] = {}
    for group in groups.groups:
        by_label.setdefault(Group(group.values[1:], group.entries, rest).label, []).append(group)
    return by_label


def places(groups: Groups) -> tuple[dict[Any, float], bool]:
    """Where each value of the first column stands on an axis, and whether these are numbers; others stand in a row."""
    values = list(dict.fromkeys(group.values[0] for group in groups.groups))
    if all(map(_number, values)):
        return {value: value for value in values}, True
    return {value: place for place, value in enumerate(values)}, False


def _axis(name: str, entries: Sequence[Entry]) -> Column:
    try:
        [axis] = columns_named([name], entries)
    except UsageError:
        raise UsageError(
            f"by: expected a fact such as size, or an option that these runs have, given {name!r}"
        ) from None
    if axis.quantity is not None:
        raise UsageError(f"by: expected an option or a fact, given the figure {name!r}; take model.size, say")
    return axis


def _is_number(axis: Column, entries: Sequence[Entry]) -> bool:
    return all(_number(value) for entry in entries if (value := axis.get(entry)) is not None)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _value(axis: Column, entry: Entry) -> Any:
    """A value that can be looked up by: lists and mappings of the config as text."""
    value = axis.get(entry)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)

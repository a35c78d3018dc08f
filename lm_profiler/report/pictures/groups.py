"""Groups of entries by what varies among them, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.report.tables import rows as merged
from lm_profiler.report.tables.rows import Merged, distinct, estimated
from lm_profiler.report.tables.table import fact_text, is_number
from lm_profiler.report.tables.table_columns import COLUMNS, COMPARED, Column, column, columns_named
from lm_profiler.usage_error import UsageError


@dataclass(frozen=True)
class Group:
    """Entries that differ in no known fact; ``columns`` are the facts that the groups of a picture differ in."""

    entries: Merged
    columns: Sequence[Column]

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of ``columns`` as a key; lists and mappings of the config are text."""
        values = [of.get(self.entries[0]) for of in self.columns]
        return tuple(x if x is None or isinstance(x, (bool, int, float)) else str(x) for x in values)

    @property
    def label(self) -> str:
        """The name beside an axis with a title: a single value stands alone."""
        return ", ".join(_word(of, self.entries[0], bare=len(self.columns) == 1) for of in self.columns)

    @property
    def told(self) -> str:
        """The name on its own: each value comes with its title."""
        return ", ".join(_word(of, self.entries[0]) for of in self.columns)


def trouble(entries: Merged) -> str:
    """Return how the entries ended, such as ``OOM`` or ``1 ok, 1 failed``; empty where all ended well."""
    ended = merged.status(entries, merged.WORDS)
    return "" if ended == "ok" else ended


def grouped(entries: Sequence[Entry], by: str | None = None, numbers: bool = False) -> list[Group]:
    """Group ``entries``, in the order of ``by``, a fact or an option; where it is None, of the first one that varies.

    With ``numbers`` that is the context length, or else an option that is a number, which lines need on their axis. It
    is the first column of all groups; the others are what else varies.

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
    columns = [first, *(axis for axis in others if axis.name != first.name)]
    return [Group(alike, columns) for alike in merged.by_facts(entries, columns).values()]


def varying(entries: Sequence[Entry]) -> list[Column]:
    """Return what the entries differ in: options that were given, facts that people compare by, other options."""
    given = dict.fromkeys(path for entry in entries for path in entry.overrides)
    axes = {axis.name: axis for axis in (*map(column, given), *COMPARED, *map(column, merged.set_apart(entries)))}
    rows = merged.alone(entries)
    return [axis for axis in axes.values() if merged.differs(rows, axis) and not merged.told_by_size(rows, axis)]


def _word(of: Column, entry: Entry, bare: bool = False) -> str:
    value, title = of.get(entry), of.title.rpartition(".")[2]
    if value is None:
        return f"no {title}" if merged.unset(entry, of) else f"{title} unknown"
    if isinstance(value, bool):
        return _SPOKEN.get((of.name, value)) or (title if value else f"no {title}")
    return fact_text(value) if bare or isinstance(value, str) else f"{title} {fact_text(value)}"


_SPOKEN = {("compile", True): "compiled", ("compile", False): "eager"}


def stack(group: Group) -> dict[str, float]:
    """Return the seconds of each part of the group's step, which add up to it."""
    # Medians over several runs do not add up: the parts are scaled to the step.
    typical = {part: estimated(group.entries, COLUMNS[TIMES[part].name]).value for part in PARTS}
    known = {part: seconds for part, seconds in typical.items() if seconds is not None}
    step, total = estimated(group.entries, COLUMNS[TIMES["step"].name]).value, sum(known.values())
    return {part: seconds * (step / total if step and total else 1.0) for part, seconds in known.items()}


def lines(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each line, which runs over the values of the first column, by the line's name."""
    by_label: dict[str, list[Group]] = {}
    for group in groups:
        by_label.setdefault(Group(group.entries, group.columns[1:]).label, []).append(group)
    return by_label


def places(groups: Sequence[Group]) -> tuple[dict[Any, float], bool]:
    """Return the place of each value of the first column on an axis, and whether the values are numbers."""
    values = dict.fromkeys(group.values[0] for group in groups)
    numbers = all(map(is_number, values))
    return {value: value if numbers else place for place, value in enumerate(values)}, numbers


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
    return all(map(is_number, distinct(map(axis.get, entries))))

"""The groups of runs in a picture, each of which is a bar or a point; their names, and the lines through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.run_groups import (
    STATUS_WORDS,
    RunGroup,
    differing_options,
    distinct_values,
    estimate,
    facts_named,
    follows_from_size,
    group_by_facts,
    groups_differ,
    is_unset,
    overridden_options,
    single_run_groups,
    status_text,
)
from lm_profiler.report.tables.table import fact_text, is_number
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    COMPARED,
    column,
)

_COMPILE_WORDS = {True: "compiled", False: "eager"}


@dataclass(frozen=True)
class Group:
    """Entries with equal known facts; ``columns`` are the facts in which the groups of a picture differ."""

    entries: RunGroup
    columns: Sequence[Column]

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of ``columns`` as a key of mappings; lists and mappings of the config are converted to text."""
        values = []
        for fact in self.columns:
            value = fact.get(self.entries[0])
            can_be_key = value is None or isinstance(value, (bool, int, float))
            values.append(value if can_be_key else str(value))
        return tuple(values)

    @property
    def label(self) -> str:
        """The name on an axis: the value if there is one fact, whose title the axis has; else values with titles."""
        entry = self.entries[0]
        if len(self.columns) == 1:
            return _fact_word(self.columns[0], entry, with_title=False)
        return self.full_label

    @property
    def full_label(self) -> str:
        """The name where no axis shows a title: all facts with their titles."""
        entry = self.entries[0]
        return ", ".join(
            _fact_word(fact, entry, with_title=True) for fact in self.columns
        )

    @property
    def failure_text(self) -> str:
        """How the entries ended, such as ``OOM`` or ``1 ok, 1 failed``; empty if all succeeded."""
        status = status_text(self.entries, STATUS_WORDS)
        return "" if status == "ok" else status

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of each part of the group's step; they add up to the step."""
        seconds = {}
        for part in PARTS:
            typical = estimate(self.entries, COLUMNS[TIMES[part].name]).value
            if typical is not None:
                seconds[part] = typical
        step_s = estimate(self.entries, COLUMNS[TIMES["step"].name]).value
        total_s = sum(seconds.values())
        if not step_s or not total_s:
            return seconds
        # Medians over several runs do not add up: the parts are scaled to the step.
        return {part: part_s * (step_s / total_s) for part, part_s in seconds.items()}


def axis_title(fact: Column) -> str:
    """Return a short title of a fact; that of an option without a title is the last part of its path."""
    return fact.title.rpartition(".")[2]


def _fact_word(fact: Column, entry: Entry, with_title: bool) -> str:
    """Return a fact of ``entry`` as part of a name: texts without their title, numbers ``with_title`` if requested."""
    value = fact.get(entry)
    title = axis_title(fact)
    if value is None:
        return f"no {title}" if is_unset(entry, fact) else f"{title} unknown"
    if isinstance(value, bool):
        if fact.name == "compile":
            return _COMPILE_WORDS[value]
        return title if value else f"no {title}"
    if isinstance(value, str) or not with_title:
        return fact_text(value)
    return f"{title} {fact_text(value)}"


# -- grouping ----------------------------------------------------------------------------------------------------------


def bar_groups(entries: Sequence[Entry], by: str | None = None) -> list[Group]:
    """Group ``entries`` by the facts in which they differ, sorted by the fact ``by`` or else by the first such fact."""
    facts = differing_facts(entries)
    if by is not None:
        [axis] = facts_named([by], entries, "by")
    elif facts:
        axis = facts[0]
    else:
        axis = COLUMNS["name"]
    return _groups_along(axis, facts, entries)


def line_groups(entries: Sequence[Entry], by: str | None = None) -> list[Group]:
    """Group ``entries`` by the facts in which they differ. The first column, the axis, is the fact ``by``.

    If ``by`` is not given, it is the context length if that differs, or else the first fact whose values are numbers,
    or else the first fact.
    """
    facts = differing_facts(entries)
    if by is not None or not facts:
        return bar_groups(entries, by)
    numbers = [fact for fact in facts if _is_number_of_all(fact, entries)]
    axis = (numbers or facts)[0]
    for fact in facts:
        if fact.name == "context_length":
            axis = fact
    return _groups_along(axis, facts, entries)


def _is_number_of_all(fact: Column, entries: Sequence[Entry]) -> bool:
    values = distinct_values(fact.get(entry) for entry in entries)
    return all(is_number(value) for value in values)


def _groups_along(
    axis: Column, facts: Sequence[Column], entries: Sequence[Entry]
) -> list[Group]:
    """Return the groups of ``entries`` that share their values of ``axis`` and of the other ``facts``."""
    columns = [axis]
    for fact in facts:
        if fact.name != axis.name:
            columns.append(fact)
    by_facts = group_by_facts(entries, columns)
    return [Group(run_group, columns) for run_group in by_facts.values()]


def differing_facts(entries: Sequence[Entry]) -> list[Column]:
    """Return the facts in which entries differ: overridden options, facts that always count, and other options."""
    runs = single_run_groups(entries)
    candidates = [column(path) for path in overridden_options([entries])]
    candidates += COMPARED
    candidates += [column(path) for path in differing_options(entries)]
    facts = {}
    for fact in candidates:
        if groups_differ(runs, fact) and not follows_from_size(runs, fact):
            facts[fact.name] = fact
    return list(facts.values())


# -- lines -------------------------------------------------------------------------------------------------------------


def groups_by_line(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups by the name of their line; the points of a line are the values of the first column."""
    lines: dict[str, list[Group]] = {}
    for group in groups:
        without_axis = Group(group.entries, group.columns[1:])
        lines.setdefault(without_axis.label, []).append(group)
    return lines


@dataclass(frozen=True)
class Axis:
    """The place of each value of the groups' first column on an axis; values that are not numbers are side by side."""

    places: dict[Any, float]
    are_numbers: bool


def axis_of(groups: Sequence[Group]) -> Axis:
    """Return the places of the first values of all groups: a number is at its own value, others are side by side."""
    values = list(dict.fromkeys(group.values[0] for group in groups))
    are_numbers = all(is_number(value) for value in values)
    if are_numbers:
        return Axis({value: value for value in values}, are_numbers)
    return Axis(
        {value: float(place) for place, value in enumerate(values)}, are_numbers
    )

"""Choose runs by their facts: ``verb=fit``, ``precision!=32-true``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lm_profiler.record.entry import Entry
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.run_groups import facts_named, known_values_text
from lm_profiler.report.tables.table import fact_text
from lm_profiler.usage_error import UsageError

_CONDITION = re.compile(r"([\w.]+)(!?=)(.*)")


@dataclass(frozen=True)
class Condition:
    """A condition on a fact: its text in a table must be ``value`` or, if it ``excludes``, must not be."""

    column: Column
    value: str
    excludes: bool

    def holds(self, entry: Entry) -> bool:
        is_equal = fact_text(self.column.get(entry)) == self.value
        return is_equal != self.excludes


def entries_where(entries: Sequence[Entry], conditions: Sequence[str]) -> list[Entry]:
    """Return the entries that meet all ``conditions``; several values of one fact are alternatives.

    Raises:
        UsageError: a condition names no fact, or no run meets them all.
    """
    parsed = [_parse_condition(text, entries) for text in conditions]
    matching = [entry for entry in entries if _meets_condition(entry, parsed)]
    if matching:
        return matching
    # The message lists the values that these facts do have.
    columns = {condition.column.name: condition.column for condition in parsed}
    values = [known_values_text(column, entries) for column in columns.values()]
    expected = f"expected runs with {', '.join(conditions)}"
    raise UsageError(f"where: {expected}, found none; {'; '.join(values)}")


def _meets_condition(entry: Entry, conditions: Sequence[Condition]) -> bool:
    """Return whether ``entry`` has one of the wanted values of each fact, and none of the excluded ones."""
    wanted: dict[str, list[Condition]] = {}
    for condition in conditions:
        if not condition.excludes:
            wanted.setdefault(condition.column.name, []).append(condition)
        elif not condition.holds(entry):
            return False
    return all(_any_holds(alternatives, entry) for alternatives in wanted.values())


def _any_holds(conditions: Sequence[Condition], entry: Entry) -> bool:
    return any(condition.holds(entry) for condition in conditions)


def _parse_condition(text: str, entries: Sequence[Entry]) -> Condition:
    """Parse a condition such as verb=fit; raise UsageError if ``text`` is not a condition."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"where: expected a condition such as verb=fit, given {text!r}"
        )
    name, sign, value = match.groups()
    [column] = facts_named([name], entries, "where")
    return Condition(column, value, excludes=sign == "!=")

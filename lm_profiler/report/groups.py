"""Entries against what varies among them, for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.report.collection import Entry
from lm_profiler.report.columns import COLUMNS, OPTIONS, Column, column, option
from lm_profiler.report.merged import Merged, by_facts, distinct, status_text
from lm_profiler.report.table import fact_text

COMPARED = ("size", "precision", "batch_size", "context_length", "compile", "attention", "optimizer", "device", "verb")
"""Facts that runs are told apart by where nobody swept anything."""


@dataclass(frozen=True)
class Group:
    """Entries that differ in nothing that is known of them; ``values`` of the columns in which groups differ."""

    values: tuple[Any, ...]
    entries: Merged

    @property
    def label(self) -> str:
        return label(self.values)

    @property
    def trouble(self) -> str:
        """How the entries ended, such as ``OOM`` or ``1 ok, 1 failed``; empty where all ended well."""
        return "" if all(entry.status == "ok" for entry in self.entries) else status_text(self.entries)


@dataclass(frozen=True)
class Groups:
    """Groups in the order of the values of ``columns``, of which the first is what they are shown against."""

    columns: tuple[Column, ...]
    groups: tuple[Group, ...]


def grouped(entries: Sequence[Entry], by: str | None = None, prefer: str | None = None) -> Groups:
    """``entries`` against ``by``, a fact or an option; where it is None ``prefer`` if that varies, else what does.

    Raises:
        ValueError: there is no such fact or option, or it is a figure.
    """
    others = varying(entries)
    first = next((axis for axis in others if axis.name == prefer), others[0] if others else COLUMNS["name"])
    if by is not None:
        first = _axis(by)
    columns = (first, *(axis for axis in others if axis.name != first.name))
    found = by_facts(entries, columns).values()
    return Groups(columns, tuple(Group(tuple(axis.get(group[0]) for axis in columns), group) for group in found))


def varying(entries: Sequence[Entry]) -> list[Column]:
    """What the entries differ in: the options that were given, then the facts that people compare by.

    A value that nobody knows, of a run that died early, is no difference.
    """
    given = dict.fromkeys(path for entry in entries for path in entry.overrides)
    axes = {axis.name: axis for axis in (*map(_of_option, given), *(COLUMNS[name] for name in COMPARED))}
    return [axis for axis in axes.values() if len(distinct(map(axis.get, entries))) > 1]


def label(values: Sequence[Any]) -> str:
    """``values`` for people."""
    return ", ".join(fact_text(value) or "unknown" for value in values)


def _axis(name: str) -> Column:
    try:
        found = column(name)
    except ValueError:
        raise ValueError(
            f"by: expected an option such as data.batch_size or a fact such as size, given {name!r}"
        ) from None
    if found.quantity is not None:
        raise ValueError(f"by: expected an option or a fact, given the figure {name!r}; take model.size, say")
    return found


def _of_option(path: str) -> Column:
    return OPTIONS.get(path) or Column(path, path, lambda entry: option(entry, path), option=path)

"""A column whose values are computed from a run's files or options, and stand in no record."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import Figure, Place


class ComputedColumn(NamedTuple):
    """The name, title and meaning of a column, its value for a run, and how figures are shown; None for texts."""

    name: str
    title: str
    meaning: str
    get: Callable[[Entry], float | str | None]
    quantity: Figure | None = None


def figure_column(
    name: str,
    title: str,
    unit: str,
    meaning: str,
    get: Callable[[Entry], float | None],
) -> ComputedColumn:
    """Return a column of figures of a ``unit`` of ``UNITS``."""
    quantity = Figure(
        title, unit, meaning, name, compute=_not_in_record, place=Place.ASKED
    )
    return ComputedColumn(name, title, meaning, get, quantity)


def _not_in_record(record: object) -> None:
    return None

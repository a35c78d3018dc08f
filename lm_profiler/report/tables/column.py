"""A column of a table of runs: a fact or a figure of each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.steps.summaries import lower_bound_share
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import Figure, Place


@dataclass(frozen=True)
class Column:
    """One column of a table of runs."""

    name: str
    title: str
    # returns an entry's value: a figure in SI units, a text, a truth value, or None if it is unknown
    get: Callable[[Entry], Any]
    meaning: str = ""
    group: str = ""
    place: Place = Place.TABLE  # how prominently it is shown
    option: str | None = None  # the option that sets a fact, if there is one
    # whether runs are distinguished by it even if no option was swept
    compared: bool = False
    quantity: Figure | None = None  # how figures are shown; None for facts

    @property
    def is_time(self) -> bool:
        return self.quantity is not None and self.quantity.unit == "s"

    def interval(self, entry: Entry) -> tuple[float, float] | None:
        """Return the (low, high) of a figure, in SI; None if it has no interval."""
        if self.quantity is None or entry.record is None:
            return None
        return self.quantity.interval(entry.record)

    def lacks_interval(self, entry: Entry) -> bool:
        """Return whether a figure has no interval because the run has too few steps, or steps that differ too much."""
        if self.quantity is None or entry.record is None:
            return False
        return self.quantity.lacks_interval(entry.record)

    def lower_bound_share(self, entry: Entry) -> float | None:
        """Return the share of a rate that is certain if it is a lower bound; None for other rates."""
        if self.quantity is None or entry.record is None:
            return None
        return lower_bound_share(self.quantity, entry.record)


def asked_column(
    name: str, title: str, meaning: str, get: Callable[[Entry], Any], unit: str = ""
) -> Column:
    """Return a column that is shown only if ``--columns`` names it.

    Its values are computed from a run's files or options, and are in no record. They are figures in ``unit``, one of
    ``UNITS``, or texts if there is no unit.
    """
    quantity = None
    if unit:
        quantity = Figure(title, unit, meaning, name, compute=_not_in_record)
    return Column(name, title, get, meaning, place=Place.ASKED, quantity=quantity)


def _not_in_record(record: object) -> None:
    return None

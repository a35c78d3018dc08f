"""A table before it is printed: each cell has a value in SI units for programs, and a text for people."""

from __future__ import annotations

from collections.abc import (
    Container,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any

from lm_profiler.record.quantities import Quantity
from lm_profiler.record.text import well_formed

STATUS_STYLES = {
    "ok": "green",
    "oom": "yellow",
    "refused": "yellow",
    "failed": "red",
    "timeout": "red",
    "interrupted": "red",
}


@dataclass(frozen=True)
class Heading:
    """The heading of a column: ``name`` for programs, ``title`` with the unit for people.

    ``figures`` is whether the column contains figures, which are right-aligned.
    """

    name: str
    title: str
    figures: bool = False


@dataclass(frozen=True)
class TableCell:
    """``value`` (with ``std``, ``low`` and ``high``) for programs, ``text`` for people, in a ``style`` on a terminal.

    ``std`` is the standard deviation of the steps. ``low`` and ``high`` are the ends of the value's interval.
    ``status`` is the reason why there is no figure: ``oom``, ``refused``, ``failed``, ``timeout``.
    ``bound`` is ``at least`` if the figure is a lower bound.
    """

    value: Any = None
    text: str = ""
    low: float | None = None
    high: float | None = None
    status: str | None = None
    style: str = ""
    std: float | None = None
    bound: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells, with a title and lines above and below for people.

    The lines above keep their layout if the table is ``verbatim``. Without headings a table has no rows.
    """

    headings: Sequence[Heading] = ()
    rows: Sequence[Sequence[TableCell]] = ()
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    verbatim: bool = False
    title: str = ""

    @property
    def titles(self) -> list[str]:
        """The titles of the columns, for people; empty if no column has one."""
        titles = [heading.title for heading in self.headings]
        return titles if any(titles) else []

    def fields(self) -> dict[str, list[Any]]:
        """Return the values of each column by its name, for programs, in SI units.

        A column is followed by ``<name>_std``, ``<name>_low``, ``<name>_high``, ``<name>_status`` and ``<name>_bound``
        if any of its cells has such a value.
        """
        fields: dict[str, list[Any]] = {}
        for index, heading in enumerate(self.headings):
            name = _unicode(heading.name)
            cells = [row[index] for row in self.rows]
            fields[name] = [_unicode(cell.value) for cell in cells]
            for attribute in ("std", "low", "high", "status", "bound"):
                values = [_unicode(getattr(cell, attribute)) for cell in cells]
                is_known = any(value is not None for value in values)
                if is_known:
                    fields[f"{name}_{attribute}"] = values
        return fields

    def records(self) -> list[dict[str, Any]]:
        """Return each row as a mapping from column names to values, for programs, in SI units."""
        fields = self.fields()
        records = []
        for values in zip(*fields.values(), strict=True):
            records.append(dict(zip(fields, values, strict=True)))
        return records


def _unicode(value: Any) -> Any:
    return well_formed(value) if isinstance(value, str) else value


def headings_of(columns: Iterable[Quantity]) -> list[Heading]:
    """Return a heading with title and unit for each column; numbers are right-aligned."""
    return [
        Heading(column.name, column.heading, figures=not column.is_text)
        for column in columns
    ]


def titled_headings(titles: Iterable[str], figures: Container[str]) -> list[Heading]:
    """Return headings whose titles are also their names; ``figures`` are the titles of columns of figures."""
    return [Heading(title, title, figures=title in figures) for title in titles]


def text_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, **more: Any
) -> Table:
    """Return a table of texts; the first ``left`` columns are left-aligned, the others contain figures.

    ``more`` are further fields of the table, such as its title.
    """
    headings = []
    for index, title in enumerate(titles):
        headings.append(Heading(title, title, figures=index >= left))
    cells = []
    for texts in rows:
        cells.append([text_cell(text) for text in texts])
    return Table(headings, cells, **more)


def fact_text(value: Any) -> str:
    """Return the text of a fact: truth values are written as in options, and an unknown fact is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a number, which truth values are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def figure_cell(
    quantity: Quantity, value: float | None, interval: tuple[float, float] | None = None
) -> TableCell:
    """Return the cell of a figure with its interval, in the unit of its heading; empty if it is unknown."""
    if value is None:
        return TableCell()
    if interval is None:
        return TableCell(value, quantity.rounded(value))
    low, high = interval
    return TableCell(value, quantity.rounded(value, low, high), low, high)


def text_cell(text: str | None, style: str = "") -> TableCell:
    return TableCell(text, text or "", style=style)

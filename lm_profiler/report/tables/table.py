"""A table before it is printed; each cell has a value in SI for programs, and a text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_profiler.record.quantities import Quantity

STATUS_STYLES = {
    "ok": "green",
    **dict.fromkeys(("oom", "refused"), "yellow"),
    **dict.fromkeys(("failed", "timeout", "interrupted"), "red"),
}


@dataclass(frozen=True)
class Heading:
    """The heading of a column: ``name`` for programs, ``title`` with the unit for people; figures are right-aligned."""

    name: str
    title: str
    figures: bool = False


@dataclass(frozen=True)
class TableCell:
    """``value`` (with ``std``, ``low`` and ``high``) for programs, ``text`` for people, in a ``style`` on a terminal.

    ``std`` is the standard deviation of the steps, ``low`` and ``high`` are the ends of the value's interval.
    ``status`` says why there is no figure: ``oom``, ``refused``, ``failed``, ``timeout``.
    """

    value: Any = None
    text: str = ""
    low: float | None = None
    high: float | None = None
    status: str | None = None
    style: str = ""
    std: float | None = None


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
        """The titles of the columns, for people; empty where no column has one."""
        titles = [heading.title for heading in self.headings]
        return titles if any(titles) else []

    def fields(self) -> dict[str, list[Any]]:
        """Return columns for programs, in SI.

        A column is followed by ``<name>_std``, ``_low``, ``_high`` and ``_status`` where one of its cells has them.
        """
        fields: dict[str, list[Any]] = {}
        for index, heading in enumerate(self.headings):
            name = _unicode(heading.name)
            cells = [row[index] for row in self.rows]
            fields[name] = [_unicode(cell.value) for cell in cells]
            for part in ("std", "low", "high", "status"):
                values = [_unicode(getattr(cell, part)) for cell in cells]
                if any(value is not None for value in values):
                    fields[f"{name}_{part}"] = values
        return fields

    def records(self) -> list[dict[str, Any]]:
        fields = self.fields()
        return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]


def _unicode(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def headings_of(columns: Iterable[Quantity]) -> list[Heading]:
    return [Heading(of.name, of.heading, not of.is_text) for of in columns]


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, **of_table: Any) -> Table:
    """Return a table of texts; the first ``left`` columns are left-aligned, the others figures."""
    headings = [Heading(title, title, at >= left) for at, title in enumerate(titles)]
    return Table(headings, [list(map(text_cell, row)) for row in rows], **of_table)


def fact_text(value: Any) -> str:
    """Return a fact for people: truth values as options spell them, empty where it is unknown."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a number, which truth values are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def figure(of: Quantity, value: float | None, low: float | None = None, high: float | None = None) -> TableCell:
    """Return a figure with its interval, in the unit of its heading; empty where it is unknown."""
    return TableCell(value, "" if value is None else of.rounded(value, low, high), low, high)


def text_cell(text: str | None, style: str = "") -> TableCell:
    return TableCell(text, text or "", style=style)

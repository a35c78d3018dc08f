"""Which options the configs of some runs have, to tell a mistyped one from one that is not set."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_profiler.record.collection import Entry
from lm_profiler.report.tables.columns import COLUMNS, Column, column
from lm_profiler.report.tables.table import Cell, Heading, Table


def columns_named(names: Iterable[str], entries: Sequence[Entry]) -> list[Column]:
    """The columns called ``names``, facts and figures or options of ``entries``.

    Raises:
        ValueError: there is no such column, and no run has such an option.
    """
    found = [column(name) for name in names]
    asked = [of.name for of in found if of.name not in COLUMNS]
    known = {path for entry in entries for path in _paths(entry)} if asked else set()
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, [*COLUMNS, *sorted(known)], n=1)
            remedy = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"column: expected a name such as step_s, or an option that these runs have, given {name!r}{remedy}"
            )
    return found


def every_column() -> Table:
    """The name of each column that has one of its own, its unit in files for programs, and what it means."""
    headings = [Heading(name, name) for name in ("column", "unit", "meaning")]
    body = []
    for of in COLUMNS.values():
        meaning = of.quantity.meaning if of.quantity is not None else f"option {of.option}" if of.option else of.title
        body.append([Cell(of.name, of.name), *(Cell(t, t) for t in (of.quantity.unit if of.quantity else "", meaning))])
    return Table(headings, body, below=["and any option of the runs by its path, such as data.batch_size"])


def _paths(entry: Entry) -> Iterator[str]:
    yield from entry.overrides
    if entry.record is not None and entry.record.config is not None:
        yield from _below(entry.record.config, "")


def _below(config: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in config.items():
        here = path if key == "init_args" else f"{path}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from _below(value, here)
        yield here

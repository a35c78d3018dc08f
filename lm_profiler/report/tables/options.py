"""Which options the configs of some runs have, to tell a mistyped one from one that is not set."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence

from lm_profiler.analysis.compare.differences import flat
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import GROUPS, TIMES, overview
from lm_profiler.report.tables.columns import COLUMNS, Column, column
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.usage_error import UsageError


def columns_named(names: Iterable[str], entries: Sequence[Entry]) -> list[Column]:
    """The columns called ``names``, facts and figures or options of ``entries``.

    Raises:
        UsageError: there is no such column, and no run has such an option.
    """
    columns = [column(name) for name in names]
    asked = [of.name for of in columns if of.name not in COLUMNS]
    known = {path for entry in entries for path in _paths(entry)} if asked else set()
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, [*COLUMNS, *sorted(known)], n=1)
            remedy = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"column: expected a name such as step_s, or an option that these runs have, given {name!r}{remedy}"
            )
    return columns


def every_column() -> list[Table]:
    """A table for each group of columns: their names, their units in files for programs, and what they mean."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for fact in (of for of in COLUMNS.values() if of.group not in GROUPS):
        option = f" (--{fact.option})" if fact.option else ""
        groups.setdefault(fact.group, []).append((fact.name, "", fact.meaning + option))
    facts = {name for group in groups.values() for name, *_ in group}
    for title, group in overview().items():
        groups[title] = [(of.name, of.unit, of.meaning) for of in group if of.name not in facts]
    tables = [text_table(("column", "unit", "meaning"), rows, left=3, title=title) for title, rows in groups.items()]
    names = [f"PART is one of {', '.join(TIMES)}", "any option of the runs is one too, such as data.batch_size"]
    return [*tables, Table(below=names, title="Names of columns")]


def _paths(entry: Entry) -> Iterator[str]:
    """Of each option that was given or is in the config; of a class also its own path."""
    yield from entry.overrides
    for path in flat(entry.config or {}):
        yield from itertools.accumulate(path.split("."), "{}.{}".format)

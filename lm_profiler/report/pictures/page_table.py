"""The page's table of runs: which run, how fast and how it ended before anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lm_profiler.record.collection import Entry
from lm_profiler.report.tables.columns import COLUMNS, Column
from lm_profiler.report.tables.groups import varying, word
from lm_profiler.report.tables.merged import Merged
from lm_profiler.report.tables.rows import rows, usual_figures
from lm_profiler.report.tables.table import Table

_FIRST = ("step_s", "tokens_per_s", "status")


def run_names(entries: Sequence[Entry]) -> list[str]:
    """What each run is called: of a sweep by what differs among its cells, else by its name, and its folder."""
    cells = [entry for entry in entries if entry.cell is not None]
    apart = varying(cells) if cells else []
    found = [
        ", ".join(word(of, entry) for of in apart) if entry.cell is not None and apart else entry.name
        for entry in entries
    ]
    alike = Counter(name for name, entry in zip(found, entries, strict=True) if entry.cell is None)
    return [
        f"{name}/{entry.folder.name}" if entry.cell is None and alike[name] > 1 else name
        for name, entry in zip(found, entries, strict=True)
    ]


def page_table(groups: Sequence[Merged]) -> Table:
    """A row for each of ``groups``: run, step, tokens/s and status, then what differs, then the other figures."""
    entries = [entry for group in groups for entry in group]
    names = {id(entry): name for entry, name in zip(entries, run_names(entries), strict=True)}
    run = Column("run", "run", lambda entry: names[id(entry)])
    figures = [of for of in usual_figures(groups) if of.name not in _FIRST]
    return rows(groups, [run, *map(COLUMNS.__getitem__, _FIRST), *varying(entries), *figures])

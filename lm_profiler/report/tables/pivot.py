"""One figure of all runs, one fact down and another across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lm_profiler.record.entry import Entry
from lm_profiler.report.tables.columns import Column
from lm_profiler.report.tables.merged import HOW_MERGED, WORDS, Merged, by_facts, distinct, fact, how_many, status
from lm_profiler.report.tables.rows import cell, fact_cell, heading, notes
from lm_profiler.report.tables.table import Heading, Table, TableCell, fact_text


def pivot(entries: Sequence[Entry], down: Sequence[Column], across: Sequence[Column], value: Column) -> Table:
    """``value`` of the runs with the same facts ``down`` and ``across``.

    A cell says in a word why it has no figure; one that nobody planned is empty.
    """
    rows, columns = by_facts(entries, down), by_facts(entries, across)
    cells = by_facts(entries, [*down, *across])
    titles = [" ".join(fact_text(fact(group, of)) for of in across) or "unknown" for group in columns.values()]
    named = [heading(of, list(rows.values())) for of in down]
    taken = _apart([*(of.name for of in named), *titles])[len(named) :]
    headings = [*named, *(Heading(title, title, figures=True) for title in taken)]
    body = []
    for row, group in rows.items():
        values = (value_cell(cells.get((*row, *key), ()), value) for key in columns)
        body.append([*(fact_cell(group, of) for of in down), *values])
    shown = heading(value, []).title
    merged = any(len(group) > 1 for group in cells.values())
    above = [f"{shown}: {HOW_MERGED}" if merged else f"{shown}: mean [95 % interval]" if value.quantity else shown]
    return Table(headings, body, above, notes(list(cells.values()), [*down, *across]))


def value_cell(group: Merged, value: Column, interval: bool = True) -> TableCell:
    """The figure of ``group``, with the number of its runs if there are several; or the word for what became of it."""
    if not group:
        return TableCell()
    if value.quantity is None:
        return fact_cell(group, value)
    good = [entry for entry in group if entry.status == "ok"]
    ran = [entry for entry in group if entry.status != "not run"]
    if not good:
        word = distinct(entry.status for entry in (ran or group))[0]
        return TableCell(text=WORDS.get(word, word), status=status(ran or group))
    typical = cell(good, value, interval)
    n = f" n={len(good)}" if len(good) > 1 else ""
    failed = [entry for entry in ran if entry.status != "ok"]
    rest = f" ({how_many(failed)})" if failed else ""
    return replace(typical, text=typical.text + n + rest)


def _apart(titles: Sequence[str]) -> list[str]:
    """``titles``, each once: facts of different types may read alike."""
    return [title if titles.index(title) == at else f"{title} ({at})" for at, title in enumerate(titles)]

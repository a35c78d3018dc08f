"""The table of runs: a row for each run, cell with its repeats, or group; a column for each fact or figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_profiler.record.quantities import MEMORY, Place
from lm_profiler.report.tables import merged
from lm_profiler.report.tables.merged import HOW_MERGED, WORDS, Merged, distinct, fact, status
from lm_profiler.report.tables.table import STATUS_STYLES, Heading, Table, TableCell, fact_text, is_number
from lm_profiler.report.tables.table_columns import COLUMNS, FACTS, Column, column, figures, peak_memory

_MOST_REASONS, _MOST_NAMES = 20, 3


def rows(groups: Sequence[Merged], columns: Sequence[Column] | None = None, by: Sequence[Column] = ()) -> Table:
    """Return a table for people: ``columns``, or what tells the rows apart, the main figures and how each ended."""
    usual = _figures(groups)
    main = [of for of in usual if _known(groups, of)]
    names = by or naming(groups)
    shown = columns or [*names, *main, COLUMNS["status"]]
    table = _table(groups, shown, () if columns else main[1:])
    unknown = [of.title for of in usual if of not in main and not _is_time(of)] if columns is None else []
    above = [*same_in_all(groups, shown), *([f"unknown in all rows: {', '.join(unknown)}"] if unknown else [])]
    return Table(table.headings, table.rows, above, [*_how(groups, table), *notes(groups, by or called(names))])


def apart_by(groups: Sequence[Merged]) -> list[Column]:
    """Return the facts that tell the rows apart."""
    return [of for of in _known_facts(groups) if merged.differs(groups, of) and not merged.told_by_size(groups, of)]


def naming(groups: Sequence[Merged]) -> list[Column]:
    """Return the facts that tell the rows apart, after the runs' names unless the rows are cells told by the facts."""
    apart = apart_by(groups)
    told = {tuple(fact_text(fact(group, of)) for of in apart) for group in groups}
    if apart and len(told) == len(groups) and all(group[0].cell is not None for group in groups):
        return apart
    name = COLUMNS["name"]
    one_each = len(distinct(fact(group, name) for group in groups)) == len(groups)
    return [name if one_each else COLUMNS["folder"], *apart]


def called(names: Sequence[Column]) -> Sequence[Column]:
    """Return which of the columns of ``naming`` a message names a row by: the run alone where it is shown."""
    return names[:1] if names[0].name in ("name", "folder") else names


def same_in_all(groups: Sequence[Merged], shown: Sequence[Column]) -> list[str]:
    """Return a line of the facts that are the same in all rows, and one of those that only some rows know."""
    everything = [entry for group in groups for entry in group]
    facts = [of for of in _known_facts(groups) if of not in shown and not merged.differs(merged.alone(everything), of)]
    lines: dict[str, list[str]] = {"in all rows": [], "where known": []}
    for of in facts:
        text = f"{of.title} {_text(fact(everything, of), of)}"
        rows = sum(all(of.get(entry) is not None for entry in group) for group in groups)
        if rows == len(groups):
            lines["in all rows"].append(text)
        else:
            lines["where known"].append(f"{text} ({rows} of {len(groups)} rows)")
    return [f"{which}: {', '.join(texts)}" for which, texts in lines.items() if texts]


def raw_rows(groups: Sequence[Merged], columns: Sequence[Column] | None = None, by: Sequence[Column] = ()) -> Table:
    """Return a table for programs: facts that all rows share are columns as well."""
    if columns is None:
        which = [of for of in COLUMNS.values() if of.quantity is None and of.place is Place.HEADLINE]
        more = [of for of in figures(Place.FILE) if _known(groups, of)]
        facts = [*by, *which, *_known_facts(groups)]
        columns = list({of.name: of for of in (*facts, *_figures(groups), *more)}.values())
    return _table(groups, columns)


def label(group: Merged, apart: Sequence[Column]) -> str:
    """Return the name of the row of ``group`` in messages: the facts that tell it apart, or its run."""
    return " ".join(filter(None, (told(of, fact(group, of)) for of in apart))) or group[0].name


def told(of: Column, value: Any) -> str:
    """Return a fact on its own: numbers and truth values come with their title."""
    return fact_text(value) if value is None or isinstance(value, str) else f"{of.title} {fact_text(value)}"


def fact_cell(group: Merged, of: Column) -> TableCell:
    """Return the cell of a fact of ``group``."""
    if of.name == "status":
        word = status(group)
        return TableCell(word, status(group, WORDS), style=STATUS_STYLES.get(word, ""))
    value = fact(group, of)
    return TableCell(value, _text(value, of))


def _text(value: Any, of: Column) -> str:
    return f"{value:,}" if of.name == "parameters" and isinstance(value, int) else fact_text(value)


def cell(group: Merged, of: Column, interval: bool = True) -> TableCell:
    """Return the cell of a fact or figure; empty where the run did not get that far or has no such phase."""
    if of.quantity is None:
        return fact_cell(group, of)
    typical = merged.estimated(group, of)
    if typical.value is None:
        return TableCell(text="" if status(group) != "ok" or _is_time(of) else "unknown")
    ends = (typical.low, typical.high) if interval else (None, None)
    return TableCell(typical.value, of.quantity.rounded(typical.value, *ends), typical.low, typical.high)


def heading(of: Column, groups: Sequence[Merged]) -> Heading:
    """Return the heading of a column of facts or figures; numbers are right-aligned."""
    if of.quantity is not None:
        return Heading(of.name, of.quantity.heading, figures=True)
    values = distinct(fact(group, of) for group in groups)
    return Heading(of.name, of.title, figures=bool(values) and all(map(is_number, values)))


def notes(groups: Sequence[Merged], apart: Sequence[Column]) -> list[str]:
    """Return notes for the reader: which rows mix unlike runs, and why some have no figures."""
    mixed: dict[str, list[str]] = {}
    for group in groups:
        if differ := merged.unlike(group):
            mixed.setdefault(", ".join(differ), []).append(label(group, apart))
    lines = [f"note: runs that differ in {facts} share a row: {_some(rows)}" for facts, rows in mixed.items()]
    ended = [(label(group, apart), entry) for group in groups for entry in group if entry.reason is not None]
    reasons = list(dict.fromkeys(f"{row}: {WORDS.get(of.status, of.status)}: {of.reason}" for row, of in ended))
    if len(reasons) > _MOST_REASONS:
        more = len(reasons) - _MOST_REASONS
        reasons[_MOST_REASONS:] = [f"and {more} more; --columns name,status,reason shows all"]
    return lines + reasons


def _some(words: Sequence[str]) -> str:
    more = len(words) - _MOST_NAMES
    return "; ".join(words[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _table(groups: Sequence[Merged], columns: Sequence[Column], short: Sequence[Column] = ()) -> Table:
    headings = [heading(of, groups) for of in columns]
    cells = [[cell(group, of, of not in short) for of in columns] for group in groups]
    if any(len(group) > 1 for group in groups):
        headings.append(Heading("n", "n", figures=True))
        for group, row in zip(groups, cells, strict=True):
            n = sum(entry.status == "ok" for entry in merged.counted(group))
            row.append(TableCell(n, str(n)))
    return Table(headings, cells)


def _known_facts(groups: Sequence[Merged]) -> list[Column]:
    swept = [column(name) for name in dict.fromkeys(name for group in groups for e in group for name in e.overrides)]
    *usual, last = FACTS
    own = [of for of in swept if of.name not in COLUMNS]
    return [of for of in (*usual, *own, last) if _known(groups, of)]


def _figures(groups: Sequence[Merged]) -> list[Column]:
    entries = [entry for group in groups for entry in group]
    allocated, _, resident = (COLUMNS[of.name] for of in MEMORY.values())
    memory = [peak_memory(entries)]
    if any(entry.status == "ok" and allocated.get(entry) is None for entry in entries):
        memory = list(dict.fromkeys((*memory, resident)))
    return [of for of in figures(Place.TABLE) if of not in (allocated, resident)] + memory


def _is_time(of: Column) -> bool:
    return of.quantity is not None and of.quantity.unit == "s"


def _known(groups: Sequence[Merged], of: Column) -> bool:
    return any(of.get(entry) is not None for group in groups for entry in group)


def _how(groups: Sequence[Merged], table: Table) -> list[str]:
    if any(len(group) > 1 for group in groups):
        return [HOW_MERGED]
    intervals = any("[" in cell.text and cell.low for row in table.rows for cell in row)
    return ["[ ]: 95 % interval of the mean"] * intervals

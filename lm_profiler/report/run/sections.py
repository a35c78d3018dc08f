"""The sections of a run's page, a group of the registry each: its facts, and tables of its lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from lm_profiler.record.quantities import GROUPS, LISTS, PARTS, TIMES, Quantity
from lm_profiler.record.run import MOMENTS, RunRecord, Term, Waterfall
from lm_profiler.report.run.waterfall_text import ceiling_text, step_text, term_texts, title_in, unsure
from lm_profiler.report.tables.table import (
    Heading,
    Table,
    TableCell,
    digits_of,
    fact_text,
    headings_of,
    ms_text,
    text_table,
)

_MOST_CONTRIBUTORS = 5
_CONTRIBUTOR = LISTS["waterfall.terms[].contributors"]


def waterfall_tables(record: RunRecord) -> list[Table]:
    """Return tables of the terms and of the largest contributors of each; none without a waterfall."""
    fall = record.waterfall
    return [] if fall is None else [table for table in (_terms_table(fall), _largest_contributors(fall)) if table.rows]


def _terms_table(fall: Waterfall) -> Table:
    name, seconds, low, high, at_most, *phases = LISTS["waterfall.terms"]
    ends = () if all(term.low_s is None for term in fall.terms) else (low, high)  # one traced step, or an older record
    occurring = {
        part: of for part, of in zip(PARTS, phases, strict=True) if any(t.phases.get(part) for t in fall.terms)
    }
    headings = [*headings_of((name, seconds)), Heading("share", "share", True)]
    headings += headings_of((*ends, at_most, *occurring.values()))
    digits, texts, rows = digits_of(fall.step_s), term_texts(fall), []
    for term in fall.terms:
        told = [TableCell(term.seconds, texts[term.name]), _share(term.seconds, fall.step_s)]
        if term.name in fall.untold:
            told = [TableCell(text="unknown"), TableCell()]
        told += [_ms(of.get(term), digits) for of in ends]
        ceiling = TableCell(term.at_most_s, ceiling_text(fall, term))
        by_phase = [_ms(term.phases.get(part), digits) for part in occurring]
        rows.append([_text(title_in(fall, term.name)), *told, ceiling, *by_phase])
    step = [_text("step"), TableCell(fall.step_s, step_text(fall)), _share(fall.step_s, fall.step_s)]
    rows.append(
        [TableCell(cell.value, cell.text, style="bold") for cell in step]
        + [_text("")] * (len(ends) + len(occurring) + 1)
    )
    below = [
        f"could save at most: {unsure(fall) or 'a ceiling, never a gain'}",
        *(f"note: {note}" for note in fall.notes),
    ]
    return Table(headings, rows, below=below)


def _largest_contributors(fall: Waterfall) -> Table:
    rows, left = [], 0
    for term in fall.terms:
        of_term = contributors(term, fall).rows
        left += len(of_term[_MOST_CONTRIBUTORS:])
        rows += [[_text(title_in(fall, term.name)), *row] for row in of_term[:_MOST_CONTRIBUTORS]]
    headings = [Heading("term", "term"), *headings_of(_CONTRIBUTOR)]
    return Table(headings, rows, below=[f"and {left:,} smaller ones"] if left else [])


def contributors(term: Term, fall: Waterfall) -> Table:
    """Return the contributors of ``term``, the largest first."""
    digits = digits_of(fall.step_s)
    ranked = sorted(term.contributors, key=lambda of: -of.seconds)
    count = [TableCell(of.count, f"{of.count:,g}") for of in ranked]
    rows = [
        [_text(of.module), _text(of.what), times, _ms(of.seconds, digits), _text(of.detail)]
        for of, times in zip(ranked, count, strict=True)
    ]
    return Table(headings_of(_CONTRIBUTOR), rows)


def _text(text: str | None) -> TableCell:
    return TableCell(text, text or "")


def _ms(seconds: float | None, digits: int) -> TableCell:
    return TableCell(seconds, ms_text(seconds, digits) if seconds else "")


def _share(seconds: float, step_s: float) -> TableCell:
    share = seconds / step_s if step_s else None
    return TableCell(share, "" if share is None else f"{share:.1%}")


_LISTS_OF = {
    "Other, by its owner": ("other_by_owner.actions",),
    "Steps": ("odd_steps", "step_counters", "between"),
    "Use of the CPU": ("python_times",),
    "Steadiness": ("steadiness.levels", "steadiness.pattern.slow"),
    "Use of the hardware": ("rates.flops",),
    "Synchronization": ("syncs",),
    "Numerics": ("numerics.kinds", "numerics.losses", "numerics.gradient_norms"),
    "Ranks": ("rank_step_s", "ranks.finding.slow", "ranks.by_rank", "ranks.collectives"),
}
_STEPS = ("odd_steps", "step_counters")
# the lists whose columns are left out where no row has a value
_SPARSE = (*_STEPS, "ranks.by_rank", "findings", "other_by_owner.actions")
# the lists of bare figures: what numbers their rows, and the first number
_NUMBERED = {"rank_step_s": ("rank", 0), "numerics.losses": ("step", 1), "numerics.gradient_norms": ("step", 1)}
_TERMS = "Terms of the waterfall"  # `waterfall_tables` shows them
_TIMES = ("Time of a step", "Time on the host's clock", "Spread of the steps", "Shares of the typical step")
_MOST_ROWS = 64
# the rows of families, each with its title
_KEYS = {part: TIMES[part].title for part in (*PARTS, "forward_backward", "step")} | MOMENTS


def shown(of: Quantity, record: RunRecord) -> str:
    """Return a figure with its unit, and its interval where it has one."""
    ends = of.interval(record)
    return of.fit(of.get(record)) + (f" [{', '.join(of.show(end, unit=False) for end in ends)}]" if ends else "")


def sections(record: RunRecord) -> list[Table]:
    """Return all figures of ``record``: times by phase, then a section for each group; empty ones are left out."""
    times = [of for title in _TIMES for of in GROUPS[title]]
    device, host = ([of for of in times if of.path.startswith("host_") is on_host] for on_host in (False, True))
    tables = [_families(record, device, "Time of a step (ms)")]
    tables.insert(0, replace(list_table(record, "findings"), title="What could be saved"))
    if record.environment is not None and record.environment.device_type != "cpu":  # elsewhere the two clocks are one
        tables.append(_families(record, host, "Time on the host's clock (ms)"))
    for title, of in GROUPS.items():
        if title not in (*_TIMES, _TERMS):
            tables += _section(record, title, of)
    return [table for table in tables if table.rows]


def _section(record: RunRecord, title: str, group: Sequence[Quantity]) -> list[Table]:
    alone = [of for of in group if of.of is None]
    several = _families(record, [of for of in group if of.of is not None])
    lists = [list_table(record, path) for path in _LISTS_OF.get(title, ())]
    tables = [known_table(record, alone, _words(record, title)), *lists, several]
    tables += waterfall_tables(record) if title == "Waterfall" else []
    tables = [table for table in tables if table.rows]
    # The first table carries the title of the section, whichever it is.
    return [replace(table, title="" if at else title) for at, table in enumerate(tables)]


def known_table(record: RunRecord, group: Sequence[Quantity], words: Sequence[Sequence[str]] = ()) -> Table:
    """Return the known figures of ``group`` with their meanings, and then the rows of ``words``."""
    rows = [[of.title, shown(of, record), of.meaning] for of in group if of.get(record) is not None]
    return text_table(("", "", ""), [*rows, *words], left=3)


def _words(record: RunRecord, title: str) -> list[list[str]]:
    part: BaseModel | None = {"Model": record.model, "Machine": record.environment}.get(title)
    said = {} if part is None else {name: _said(value) for name, value in part.model_dump().items()}
    return [[name.replace("_", " "), text, ""] for name, text in said.items() if text]


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(of)}" for name, of in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return fact_text(value) if isinstance(value, (str, bool)) else ""


def list_table(record: RunRecord, path: str) -> Table:
    """Return a table with the first rows of the list at ``path``; empty where the record has none."""
    items: Any = record
    for key in path.split("."):
        items = getattr(items, key, None)
    if not items or (path == "rank_step_s" and len(items) < 2):
        return Table()
    # Steps show only what this machine counts, ranks only the phases that occur: there 0 is nothing too.
    nothing = (None, 0.0) if path == "ranks.by_rank" else (None,)
    columns = [of for of in LISTS[path] if path not in _SPARSE or any(of.get(row) not in nothing for row in items)]
    headings = headings_of(columns)
    rows = [[_list_cell(path, of, row) for of in columns] for row in items[:_MOST_ROWS]]
    if path in _NUMBERED:
        of_each, first = _NUMBERED[path]
        headings = [Heading(of_each, of_each, True), *headings]
        rows = [[TableCell(at, str(at)), *row] for at, row in enumerate(rows, first)]
    more = len(items) - _MOST_ROWS
    return Table(headings, rows, below=[f"and {more:,} more"] if more > 0 else [])


def _list_cell(path: str, of: Quantity, row: Any) -> TableCell:
    value = of.get(row)
    if value is None and path in _SPARSE:  # the row of counters without a step holds the usual ones
        return TableCell(None, "median" if of.name == "step" else "")
    return TableCell(value, of.show(value, unit=False))


def _families(record: RunRecord, group: Sequence[Quantity], title: str = "") -> Table:
    cells: dict[str, dict[str, str]] = {}
    for of in group:
        part = of.of or of.path.split(".")[1]
        name = of.title.removesuffix(" (host)").removeprefix(_KEYS[part]).lstrip(": ")
        if text := _cell(record, of):
            cells.setdefault(name or "mean [95 % interval]", {})[part] = text
    parts = [part for part in _KEYS if any(part in column for column in cells.values())]
    rows = [[_KEYS[part], *(column.get(part, "") for column in cells.values())] for part in parts]
    return text_table(["moment" if {*parts} & {*MOMENTS} else "phase", *cells], rows, title=title)


def _cell(record: RunRecord, of: Quantity) -> str:
    value = of.get(record)
    if value is None or (not value and of.shown_unit):
        return ""
    return of.rounded(value, *(of.interval(record) or ())) if of.unit == "s" else of.fit(value)

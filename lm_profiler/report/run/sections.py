"""The rows of a run's phases, and the sections of its page: the facts and the lists of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from lm_profiler.analysis.hardware.roofline import LEAST_S
from lm_profiler.record.figure import digits_of, ms_text, share_text
from lm_profiler.record.quantities import FLOOR, GROUPS, LISTS, PARTS, TIMES, TIMES_FLOOR, Quantity
from lm_profiler.record.run_record import MOMENTS, Floor, RunRecord
from lm_profiler.report.run.waterfall_text import waterfall_tables
from lm_profiler.report.tables.table import Heading, Table, TableCell, fact_text, headings_of, text_cell, text_table


def phase_table(record: RunRecord) -> Table:
    """Return a row for each phase that occurred, then forward + backward, and the step."""
    host = record.environment is not None and record.environment.device_type != "cpu"
    titles = ["phase", "mean [95 % interval] (ms)", "std", "CV", "median", "p95", "share", *["host (ms)"] * host]
    rows = []
    for part in (*PARTS, "forward_backward", "step"):
        # Phases that this verb or loop lacks have no time. Without backward the sum would repeat the forward pass.
        of = "backward" if part == "forward_backward" else part
        if part == "step" or any(clock[of].max for clock in (record.time, record.host_time) if of in clock):
            rows.append((part, _of_phase(record, part, host)))
    # On a shared machine, the distance of times from a floor means nothing.
    return table_of(titles, rows, {} if record.contended else record.floors)


def table_of(titles: Sequence[str], rows: Sequence[tuple[str, list[str]]], floors: Mapping[str, Floor]) -> Table:
    """Return a table of the texts of each part, the last row bold, with the floors of the parts where any is known."""
    known = any((floor.seconds or 0.0) >= LEAST_S for floor in floors.values())
    shown = [text + floor_texts(floors.get(part)) * known for part, text in rows]
    cells = [[text_cell(text, "bold" if row is shown[-1] else "") for text in row] for row in shown]
    floor_titles = [of.heading for of in (FLOOR, TIMES_FLOOR)] * known
    return Table([Heading(title, title, figures=title != "phase") for title in (*titles, *floor_titles)], cells)


def step_line(record: RunRecord) -> str:
    """Return the measured step, its interval and its spread in a line, for tables without such columns."""
    _, mean, std, cv, median, p95, *_ = _of_phase(record, "step", host=False)
    spread = {"std": std, "CV": cv, "median": median, "p95": p95}
    return ", ".join([f"step: {mean} ms", *(f"{name} {value}" for name, value in spread.items() if value)])


def _of_phase(record: RunRecord, part: str, host: bool) -> list[str]:
    """Return the texts of the row of ``part``; with ``host``, the last one is the time on the host's clock."""
    time, step_s = record.time[part], record.time["step"].mean
    mean_s = time.mean or 0.0
    digits = max(digits_of(mean_s), 1)

    def show(value: float | None) -> str:
        return "unknown" if value is None else ms_text(value, digits)

    mean = show(time.mean)
    if time.mean_low is not None:
        mean += f" [{show(time.mean_low)}, {show(time.mean_high)}]"
    spread = ["" if time.std is None else show(time.std), share_text(time.cv), show(time.median), show(time.p95)]
    share = share_text(record.shares.get(part, mean_s / step_s if step_s else None))
    return [TIMES[part].title, mean, *spread, share, *([show(record.host_time[part].mean)] if host else [])]


def floor_texts(floor: Floor | None) -> list[str]:
    """Return the least time of a phase with its bound, and how many times as long the phase took."""
    if floor is None or floor.seconds is None or floor.seconds < LEAST_S:
        return ["", ""]
    of = {"compute": " FLOPs", "memory": " bytes"}.get(floor.bound or "", "")
    times = "" if floor.times is None else f"{floor.times:,.{0 if floor.times >= 100 else 1}f}"
    return [ms_text(floor.seconds) + of, times]


_LISTS_OF = {
    "Other, by its owner": ("other_by_owner.actions",),
    "Steps": ("odd_steps", "step_counters", "between", "outside"),
    "Use of the CPU": ("python_times",),
    "Steadiness": ("steadiness.levels", "steadiness.pattern.slow", "steadiness.kinds"),
    "Use of the hardware": ("rates.flops",),
    "Synchronization": ("syncs",),
    "Numerics": ("numerics.kinds", "numerics.losses", "numerics.gradient_norms"),
    "Ranks": ("rank_step_s", "ranks.finding.slow", "ranks.by_rank", "ranks.collectives"),
}
# the lists whose columns are left out where no row has a value
_SPARSE = ("odd_steps", "step_counters", "ranks.by_rank", "findings", "other_by_owner.actions")
# lists of bare figures: what their rows count, and the first number
_NUMBERED = {"rank_step_s": ("rank", 0), "numerics.losses": ("step", 1), "numerics.gradient_norms": ("step", 1)}
_TIMES = ("Time of a step", "Time on the host's clock", "Spread of the steps", "Shares of the typical step")
_ELSEWHERE = (*_TIMES, "Terms of the waterfall")  # groups with their own tables
_MOST_ROWS = 64
# the rows of families, each with its title
_KEYS = {part: TIMES[part].title for part in (*PARTS, "forward_backward", "step")} | MOMENTS


def shown(of: Quantity, record: RunRecord) -> str:
    """Return a figure with its unit, and its interval where it has one; a rate of a busy machine is a lower bound."""
    ends = of.interval(record)
    least = "at least " * (record.contended and of.kind in ("tokens/s", "samples/s"))
    return (
        least + of.fit(of.get(record)) + (f" [{', '.join(of.show(end, unit=False) for end in ends)}]" if ends else "")
    )


def sections(record: RunRecord) -> list[Table]:
    """Return all figures of ``record``: times by phase, then a section for each group; empty ones are left out."""
    times = [of for title in _TIMES for of in GROUPS[title]]
    device, host = ([of for of in times if of.path.startswith("host_") is on_host] for on_host in (False, True))
    tables = [replace(list_table(record, "findings"), title="What could be saved")]
    tables.append(_families(record, device, "Time of a step (ms)"))
    if record.environment is not None and record.environment.device_type != "cpu":  # on the CPU the two clocks are one
        tables.append(_families(record, host, "Time on the host's clock (ms)"))
    for title, of in GROUPS.items():
        if title not in _ELSEWHERE:
            tables += _section(record, title, of)
    return [table for table in tables if table.rows]


def _section(record: RunRecord, title: str, group: Sequence[Quantity]) -> list[Table]:
    """Return the tables of one group: its facts with their meanings, its lists, and its families."""
    alone = [of for of in group if of.of is None]
    part: BaseModel | None = {"Model": record.model, "Machine": record.environment}.get(title)
    said = {} if part is None else {name: _said(value) for name, value in part.model_dump().items()}
    words = [[name.replace("_", " "), text, ""] for name, text in said.items() if text]
    lists = [list_table(record, path) for path in _LISTS_OF.get(title, ())]
    tables = [known_table(record, alone, words), *lists, _families(record, [of for of in group if of.of is not None])]
    tables += waterfall_tables(record) if title == "Waterfall" else []
    tables = [table for table in tables if table.rows]
    # The first table has the title of the section.
    return [replace(table, title="" if at else title) for at, table in enumerate(tables)]


def known_table(record: RunRecord, group: Sequence[Quantity], words: Sequence[Sequence[str]] = ()) -> Table:
    """Return the known figures of ``group`` with their meanings, and then the rows of ``words``."""
    rows = [[of.title, shown(of, record), of.meaning] for of in group if of.get(record) is not None]
    return text_table(("", "", ""), [*rows, *words], left=3)


def _said(value: Any) -> str:
    """Return ``value`` as text; empty for numbers, which are separate figures."""
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
    # Steps show only counters of this machine, ranks only phases that occur: there 0 counts as nothing too.
    nothing = (None, 0.0) if path == "ranks.by_rank" else (None,)
    columns = [of for of in LISTS[path] if path not in _SPARSE or any(of.get(row) not in nothing for row in items)]

    def cell(of: Quantity, row: Any) -> TableCell:
        value = of.get(row)
        if value is None and path in _SPARSE:  # the row of counters without a step holds the usual ones
            return TableCell(None, "median" if of.name == "step" else "")
        return TableCell(value, of.show(value, unit=False))

    headings = headings_of(columns)
    rows = [[cell(of, row) for of in columns] for row in items[:_MOST_ROWS]]
    if path in _NUMBERED:
        of_each, first = _NUMBERED[path]
        headings = [Heading(of_each, of_each, True), *headings]
        rows = [[TableCell(at, str(at)), *row] for at, row in enumerate(rows, first)]
    more = len(items) - _MOST_ROWS
    return Table(headings, rows, below=[f"and {more:,} more"] if more > 0 else [])


def _families(record: RunRecord, group: Sequence[Quantity], title: str = "") -> Table:
    """Return a row for each part, or moment, and a column for each family of ``group``, where they are known."""
    cells: dict[str, dict[str, str]] = {}
    for of in group:
        part, value = of.of or of.path.split(".")[1], of.get(record)
        if value is None or (not value and of.shown_unit):  # no time and no memory are left out
            continue
        name = of.title.removesuffix(" (host)").removeprefix(_KEYS[part]).lstrip(": ")
        text = of.rounded(value, *(of.interval(record) or ())) if of.unit == "s" else of.fit(value)
        cells.setdefault(name or "mean [95 % interval]", {})[part] = text
    parts = [part for part in _KEYS if any(part in column for column in cells.values())]
    rows = [[_KEYS[part], *(column.get(part, "") for column in cells.values())] for part in parts]
    return text_table(["moment" if {*parts} & {*MOMENTS} else "phase", *cells], rows, title=title)

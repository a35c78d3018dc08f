"""The rows of a run's phases: how long each took, how it varied, its share of the step, and its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_profiler.record.quantities import FLOOR, PARTS, TIMES, TIMES_FLOOR
from lm_profiler.record.run import Floor, RunRecord
from lm_profiler.report.tables.table import Heading, Table, TableCell

_FLOORS = [of.heading for of in (FLOOR, TIMES_FLOOR)]


def phase_table(record: RunRecord) -> Table:
    """A row for each phase that occurred, then forward + backward, and the step."""
    host = record.environment is not None and record.environment.device_type != "cpu"
    titles = ["phase", "mean ± std (ms)", "CV", "median [95 % interval]", "p95", "share", *["host (ms)"] * host]
    rows = []
    for part in (*PARTS, "forward_backward", "step"):
        # A phase that this verb or loop does not have; without a backward pass the sum is the forward pass once more.
        of = "backward" if part == "forward_backward" else part
        if part == "step" or any(clock[of].max for clock in (record.time, record.host_time) if of in clock):
            rows.append((part, _cells(record, part, host)))
    return table_of(titles, rows, record.floors)


def table_of(titles: Sequence[str], rows: Sequence[tuple[str, list[str]]], floors: Mapping[str, Floor]) -> Table:
    """Texts by part, the last of them bold, with the parts' floors behind them where any is known."""
    known = any(floor.seconds for floor in floors.values())
    shown = [text + floor_texts(floors.get(part)) * known for part, text in rows]
    cells = [[TableCell(text, text, style="bold" if row is shown[-1] else "") for text in row] for row in shown]
    headings = [Heading(title, title, figures=title != "phase") for title in (*titles, *_FLOORS * known)]
    return Table(headings, cells)


def step_line(record: RunRecord) -> str:
    """The measured step, its spread and its median, where a table has no columns for them."""
    _, mean, cv, median, p95, *_ = _cells(record, "step", host=False)
    return ", ".join([f"step: {mean} ms", *[f"CV {cv}"] * bool(cv), f"median {median}", f"p95 {p95}"])


def _cells(record: RunRecord, part: str, host: bool) -> list[str]:
    """The time of ``part``, at last that on the ``host``'s own clock."""
    time = record.time[part]
    mean_s, step_s = time.mean or 0.0, record.time["step"].mean
    digits = _digits(mean_s)
    # Of the typical step; of the mean one in records that do not know it.
    share = record.shares.get(part, mean_s / step_s if step_s else None)

    def show(value: float | None) -> str:
        return TIMES[part].show(value, unit=False, digits=digits)

    median = show(time.median)
    if time.ci_low is not None:
        median += f" [{show(time.ci_low)}, {show(time.ci_high)}]"
    return [
        TIMES[part].title,
        show(time.mean) + ("" if time.std is None else f" ± {show(time.std)}"),
        "" if time.cv is None else f"{time.cv:.1%}",
        median,
        show(time.p95),
        "" if share is None else f"{share:.1%}",
        *([show(record.host_time[part].median)] if host else []),
    ]


def floor_texts(floor: Floor | None) -> list[str]:
    """The least that a phase could take, with what that is of, and how many times as long it took."""
    if floor is None or not floor.seconds:
        return ["", ""]
    of = {"compute": " FLOPs", "memory": " bytes"}.get(floor.bound or "", "")
    seconds = f"{floor.seconds * 1e3:,.{_digits(floor.seconds)}f}"
    return [seconds + of, "" if floor.times is None else f"{floor.times:,.{0 if floor.times >= 100 else 1}f}"]


def _digits(seconds: float) -> int:
    """Behind the point, in milliseconds: three or four figures that mean something."""
    return 3 if seconds < 0.01 else 2 if seconds < 0.1 else 1

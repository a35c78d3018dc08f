"""The rows of a run's phases: how long each took, how it varied, its share of the step, and its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_profiler.analysis.hardware.roofline import LEAST_S
from lm_profiler.record.quantities import FLOOR, PARTS, TIMES, TIMES_FLOOR
from lm_profiler.record.run import Floor, RunRecord
from lm_profiler.report.tables.table import Heading, Table, TableCell

_FLOORS = [of.heading for of in (FLOOR, TIMES_FLOOR)]


def phase_table(record: RunRecord) -> Table:
    """Return a row for each phase that occurred, then forward + backward, and the step."""
    host = record.environment is not None and record.environment.device_type != "cpu"
    titles = ["phase", "mean [95 % interval] (ms)", "std", "CV", "median", "p95", "share", *["host (ms)"] * host]
    rows = []
    for part in (*PARTS, "forward_backward", "step"):
        # Phases that this verb or loop lacks have no time. Without backward the sum would repeat the forward pass.
        of = "backward" if part == "forward_backward" else part
        if part == "step" or any(clock[of].max for clock in (record.time, record.host_time) if of in clock):
            rows.append((part, _cells(record, part, host)))
    # On a shared machine the times say nothing about how far they are from a floor.
    return table_of(titles, rows, {} if record.contended else record.floors)


def table_of(titles: Sequence[str], rows: Sequence[tuple[str, list[str]]], floors: Mapping[str, Floor]) -> Table:
    """Return a table of the texts of each part, the last row bold, with the floors of the parts where any is known."""
    known = any((floor.seconds or 0.0) >= LEAST_S for floor in floors.values())
    shown = [text + floor_texts(floors.get(part)) * known for part, text in rows]
    cells = [[TableCell(text, text, style="bold" if row is shown[-1] else "") for text in row] for row in shown]
    headings = [Heading(title, title, figures=title != "phase") for title in (*titles, *_FLOORS * known)]
    return Table(headings, cells)


def step_line(record: RunRecord) -> str:
    """Return the measured step, its interval and its spread in a line, for tables without such columns."""
    _, mean, std, cv, median, p95, *_ = _cells(record, "step", host=False)
    spread = {"std": std, "CV": cv, "median": median, "p95": p95}
    return ", ".join([f"step: {mean} ms", *(f"{name} {value}" for name, value in spread.items() if value)])


def _cells(record: RunRecord, part: str, host: bool) -> list[str]:
    time = record.time[part]
    mean_s, step_s = time.mean or 0.0, record.time["step"].mean
    digits = _digits(mean_s)
    share = record.shares.get(part, mean_s / step_s if step_s else None)

    def show(value: float | None) -> str:
        return TIMES[part].show(value, unit=False, digits=digits)

    mean = show(time.mean)
    if time.mean_low is not None:
        mean += f" [{show(time.mean_low)}, {show(time.mean_high)}]"
    return [
        TIMES[part].title,
        mean,
        "" if time.std is None else show(time.std),
        "" if time.cv is None else f"{time.cv:.1%}",
        show(time.median),
        show(time.p95),
        "" if share is None else f"{share:.1%}",
        *([show(record.host_time[part].mean)] if host else []),
    ]


def floor_texts(floor: Floor | None) -> list[str]:
    """Return the least time of a phase with what bounds it, and how many times as long the phase took."""
    if floor is None or floor.seconds is None or floor.seconds < LEAST_S:
        return ["", ""]
    of = {"compute": " FLOPs", "memory": " bytes"}.get(floor.bound or "", "")
    seconds = f"{floor.seconds * 1e3:,.{_digits(floor.seconds)}f}"
    return [seconds + of, "" if floor.times is None else f"{floor.times:,.{0 if floor.times >= 100 else 1}f}"]


def _digits(seconds: float) -> int:
    return 3 if seconds < 0.01 else 2 if seconds < 0.1 else 1

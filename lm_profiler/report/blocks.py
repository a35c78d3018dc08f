"""A block a run with each of its steps, then a summary: the layout of a lab report."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.record.run import TimeSummary
from lm_profiler.report.collection import Entry
from lm_profiler.report.columns import COLUMNS
from lm_profiler.report.layouts import names
from lm_profiler.report.merged import WORDS
from lm_profiler.report.recut import Steps, steps_after
from lm_profiler.report.table import Cell, Heading, Table

_PASSES = {"forward": "Forward pass", "forward_backward": "Forward + Backward pass"}
_SUMMARY = ("Model", "Params", "Forward (s)", "Backward (s)")


def blocks(entries: Sequence[Entry], warmup: int | None = None) -> Table:
    """The blocks above, the summary as the table. ``warmup`` cuts the recorded steps anew.

    Raises:
        RecordError: an entry's steps cannot be read.
    """
    above: list[str] = []
    rows = []
    for entry, name in zip(entries, names(entries), strict=True):
        steps = steps_after(entry, warmup) if entry.status == "ok" else None
        above += [*_block(entry, name, steps), ""]
        rows.append(_row(entry, name, steps))
    headings = [Heading(title, title, title == "Params") for title in _SUMMARY]
    return Table(headings, rows, above, verbatim=True)


def _block(entry: Entry, name: str, steps: Steps | None) -> list[str]:
    size = str(COLUMNS["size"].get(entry) or entry.name)
    parameters = COLUMNS["parameters"].get(entry)
    lines = [
        f"{size.upper()} MODEL{name[len(size) :]}",
        f"Parameters: {'unknown' if parameters is None else f'{parameters:,}'}",
    ]
    if steps is None:
        word = WORDS.get(entry.status, entry.status)
        return [*lines, f"{word}: {entry.reason}" if entry.reason else word]
    for part, title in _PASSES.items():
        if part == "forward" or steps.times["backward"].max:
            lines += _pass(part, title, steps)
    forward_s, backward_s = steps.times["forward"].mean, steps.times["backward"].mean
    if backward_s:
        ratio = f" ({backward_s / forward_s:.2f}x forward)" if forward_s else ""
        lines.append(f"  Backward-only: {backward_s:.6f} seconds{ratio}")
    return lines


def _pass(part: str, title: str, steps: Steps) -> list[str]:
    each = [f"    Step {number}: {row.time(part):.6f} seconds" for number, row in enumerate(steps.rows, 1)]
    time = steps.times[part]
    cv = "" if time.cv is None else f" (CV: {time.cv:.2%})"
    mean = f"  Mean: {_mean_std(time, ' ± ')} seconds{cv}" if time.n else "  no steps left"
    return [f"{title}:", "  Measurement steps:", *each, mean]


def _mean_std(time: TimeSummary, sign: str) -> str:
    return f"{time.mean:.6f}" + (f"{sign}{time.std:.6f}" if time.std is not None else "")


def _row(entry: Entry, name: str, steps: Steps | None) -> list[Cell]:
    parameters = COLUMNS["parameters"].get(entry)
    cells = [Cell(name, name), Cell(parameters, "" if parameters is None else f"{parameters:,}")]
    for part in ("forward", "backward"):
        if steps is None:
            cells.append(Cell(text=WORDS.get(entry.status, entry.status), word=entry.status))
        else:
            time = steps.times[part]
            cells.append(Cell(time.mean, _mean_std(time, "±")) if time.max else Cell())
    return cells

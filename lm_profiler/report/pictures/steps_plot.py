"""The time of every step: a panel for each run, or a line for each of many runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import OddStep, RecordError, worst_first
from lm_profiler.record.steps import StepRow
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS, SERIES_COLOURS, legend, new_figure, wrapped
from lm_profiler.report.pictures.groups import Group, trouble
from lm_profiler.report.tables.table_columns import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WARMUP, _CUT = "#D0D0D0", "#E8E8E8"
_ODD = PART_COLOURS["data"]  # stands out from black
_TOLD = 3
_WIDTH = 8.0
_MOST_PANELS = 30
_NAMED = 8  # the most lines in one panel that a reader can follow; those of further runs are grey
_DASHES = ("-", "--")
_LINEAR = 3.0  # how many medians the slowest step may take on a linear axis; a first step that compiles takes a hundred


def steps(groups: Sequence[Group]) -> Figure:
    """Draw every step that was timed, with the warm-up shaded; no point is left out."""
    runs = [(_called(group, entry), entry) for group in groups for entry in group.entries]
    return _panels(runs) if len(runs) <= _MOST_PANELS else _together(runs)


def _panels(runs: Sequence[tuple[str, Entry]]) -> Figure:
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    figure, grid = new_figure(_WIDTH, 0.8 + 1.9 * rows, nrows=rows, ncols=columns, sharex=True, squeeze=False)
    for axes, (name, entry) in zip(grid.flat, runs, strict=False):
        axes.set_title(wrapped(name, _WIDTH / columns - 0.7), fontsize=9, loc="left")
        _panel(axes, entry)
    for axes in grid.flat[len(runs) :]:
        axes.remove()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("time of the step (ms)", fontsize=9)
    cut = any(entry.record is not None and entry.record.stretch.start for _, entry in runs)
    odd = any(entry.record is not None and entry.record.odd_steps for _, entry in runs)
    others = [*([("also left out: not steady yet", _CUT)] * cut), *([("odd", _ODD)] * odd)]
    legend(figure, [("warm-up", _WARMUP), *others])
    return figure


def _called(group: Group, entry: Entry) -> str:
    if entry.cell is not None:
        return group.told + (f" (repeat {entry.cell.repeat})" if entry.cell.repeat else "")
    return group.told if len(group.entries) == 1 else f"{group.told} ({COLUMNS['name'].get(entry)})"


def _series(entry: Entry) -> list[StepRow]:
    # Other stages are not timed, and a device that died never said how long its last steps took.
    try:
        timed = entry.rows.of_stages("warmup", "measure")
    except RecordError:
        return []
    return [row for row in mean_over_ranks(timed) if row.seconds is not None]


def unreadable(entries: Iterable[Entry]) -> list[str]:
    """Return what is wrong with the ``steps.csv`` of runs that finished steps, a line each, as no picture shows it."""
    problems = []
    for entry in entries:
        if entry.record is not None and any(entry.record.steps.values()):
            try:
                _ = entry.rows
            except RecordError as error:
                problems.append(str(error))
    return problems


def _panel(axes: Axes, entry: Entry) -> None:
    rows = _series(entry)
    if rows:
        warmup = sum(row.stage == "warmup" for row in rows)
        cut = entry.record.stretch.start if entry.record is not None else 0
        first, ms = rows[0].step - 0.5, [row.time("step") * TIMES["step"].scale for row in rows]
        axes.axvspan(first, first + warmup, color=_WARMUP, lw=0)
        axes.axvspan(first + warmup, first + warmup + cut, color=_CUT, lw=0)
        axes.plot([row.step for row in rows], ms, "o-", color="black", ms=2.5, lw=0.8)
        axes.locator_params(axis="x", integer=True)
        _scale(axes, ms)
        _mark_odd(axes, [] if entry.record is None else entry.record.odd_steps)
    else:
        axes.set_yticks([])
    if entry.status != "ok" or not rows:
        axes.annotate(trouble([entry]) or "no steps", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")


def _mark_odd(axes: Axes, odd: Sequence[OddStep]) -> None:
    if not odd:
        return
    scale = TIMES["step"].scale
    axes.plot([of.step for of in odd], [of.step_s * scale for of in odd], "o", mfc="none", color=_ODD, ms=6)
    left, right = axes.get_xlim()
    for of in worst_first(odd)[:_TOLD]:
        beyond = of.step > (left + right) / 2
        axes.annotate(
            shortened(of.cause or "no cause seen", 36) if of.rank is not None else "",
            (of.step, of.step_s * scale),
            xytext=(-6 if beyond else 6, 0),
            textcoords="offset points",
            ha="right" if beyond else "left",
            va="center",
            fontsize=6,
            color=_ODD,
        )


def _scale(axes: Axes, ms: Sequence[float]) -> None:
    if min(ms) > 0 and max(ms) > _LINEAR * median(ms):
        from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

        axes.set_yscale("log")
        at = LogLocator(subs=(1.0, 2.0, 5.0) if max(ms) < 100 * min(ms) else (1.0,))
        axes.yaxis.set(major_locator=at, major_formatter=ScalarFormatter(), minor_formatter=NullFormatter())
        axes.text(0.98, 0.96, "log scale", transform=axes.transAxes, ha="right", va="top", fontsize=7, color="#666666")
    else:
        axes.set_ylim(0, 1.1 * max(ms) or 1.0)


def _together(runs: Sequence[tuple[str, Entry]]) -> Figure:
    figure, axes = new_figure(_WIDTH, 5.0)
    scale = TIMES["step"].scale
    known = [(name, rows) for name, entry in runs if (rows := _series(entry))]
    lines = [(name, [(row.step, row.time("step") * scale) for row in rows], _uneven(rows)) for name, rows in known]
    lines.sort(key=lambda line: line[2])
    rest, told = lines[:-_NAMED], lines[-_NAMED:]
    _thin(axes, [points for _, points, _ in rest])
    for at, (name, points, ratio) in enumerate(reversed(told)):
        look = {"color": SERIES_COLOURS[at % len(SERIES_COLOURS)], "ls": _DASHES[at // len(SERIES_COLOURS)]}
        axes.plot(*zip(*points, strict=True), lw=1.2, label=wrapped(f"{ratio:.2f} x  {shortened(name)}", 2.0), **look)
    if lines:
        _scale(axes, [ms for _, points, _ in lines for _, ms in points])
        figure.legend(loc="outside right upper", fontsize=7, title="slowest / median step", title_fontsize=7)
    absent = len(runs) - len(known)
    axes.set_xlabel("step" + (f"\n{absent} of {len(runs)} runs have no step to show" if absent else ""))
    axes.set_ylabel("time of the step (ms)")
    grey = f", the other {len(rest)} grey" * bool(rest)
    said = (
        f"{len(known)} runs with their warm-up: in colour the {len(told)} whose slowest measured step stands out most"
    )
    axes.set_title(wrapped(said + grey, 5.0), fontsize=9, loc="left")
    return figure


def _thin(axes: Axes, lines: Sequence[Sequence[tuple[int, float]]]) -> None:
    from matplotlib.collections import LineCollection

    opacity = max(0.08, min(0.6, 30 / max(1, len(lines))))
    axes.add_collection(LineCollection(lines, colors=PALE, alpha=opacity, linewidths=0.5, rasterized=True))
    axes.autoscale_view()


def _uneven(rows: Sequence[StepRow]) -> float:
    seconds = [row.time("step") for row in rows if row.stage == "measure"]
    return max(seconds) / median(seconds) if seconds and median(seconds) else 1.0

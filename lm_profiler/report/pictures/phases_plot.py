"""Where a step's time goes: a bar a group, cut into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.colours import PART_COLOURS
from lm_profiler.report.pictures.drawing import error_bars, known_points, legend, new_figure, thinned, wrapped
from lm_profiler.report.pictures.groups import Group, stack, trouble
from lm_profiler.report.tables.columns import COLUMNS
from lm_profiler.report.tables.merged import Estimate, estimated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 8.0
_TEXT = 2.6
"""Inches for the names: more goes on a second line."""
_MOST_NAMED = 100
"""More bars than that are drawn without names of their own but for every k-th."""


def phases(groups: Sequence[Group]) -> Figure:
    """Bars read from above: the means of a group's parts, which add up to its step, with its interval."""
    count, scale = len(groups), TIMES["step"].scale
    figure, axes = new_figure(_WIDTH, 1.4 + 0.36 * min(count, _MOST_NAMED))
    stacks = [stack(group) for group in groups]
    left = [0.0] * count
    present = [part for part in PARTS if any(part in parts for parts in stacks)]
    for part in present:
        rows = [row for row in range(count) if part in stacks[row]]
        widths, starts = [stacks[row][part] * scale for row in rows], [left[row] for row in rows]
        axes.barh(rows, widths, 0.72, starts, color=PART_COLOURS[part], edgecolor="white", lw=0.4 * (count < 50))
        for row, width in zip(rows, widths, strict=True):
            left[row] += width
    steps = [estimated(group.entries, COLUMNS["step_s"]) for group in groups]
    at, values, *around = known_points(enumerate(steps), scale)
    if values:
        axes.errorbar(values, at, xerr=around, fmt="|", color="black", ms=9, capsize=3, lw=1.2)
    named = thinned(count, _MOST_NAMED)
    axes.set_yticks(list(named), [wrapped(shortened(groups[row].label, 64), _TEXT) for row in named])
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, 1.03 * max([*left, *map(_reach, steps)]) or 1.0)
    beside = axes.secondary_yaxis("right")  # a column: behind the bars the longest text would press all of them
    said = [_said(steps[row], trouble(groups[row].entries)) for row in named]
    beside.set_yticks(list(named), said)
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("\n".join(_explained(steps, named)))
    if len(groups[0].columns) == 1:  # otherwise the names say what they are of
        axes.set_ylabel(shortened(groups[0].columns[0].title))
    legend(figure, [(part, PART_COLOURS[part]) for part in present])
    return figure


def _explained(steps: Sequence[Estimate], named: range) -> list[str]:
    bars = error_bars(steps)
    lines = ["time of a step (ms)", "phases and step: means"]
    lines += [f"black: the mean step, {bars}"] * bool(bars)
    return lines + [f"{len(steps)} bars, every {named.step}th with its name"] * (named.step > 1)


def _reach(step: Estimate) -> float:
    """How far to the right a bar reaches, with its interval, in ms."""
    return (step.high or step.value or 0.0) * TIMES["step"].scale


def _said(step: Estimate, ended: str) -> str:
    """What stands beside a bar; on two lines where that is long."""
    if step.value is None:
        return shortened(ended)
    ms = TIMES["step"].show(step.value, digits=1)
    return f"{ms} {ended}".rstrip() if len(ended) <= 16 else f"{ms}\n{shortened(ended)}"

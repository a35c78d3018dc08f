"""Where a step's time goes: a bar a group, cut into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.colours import PART_COLOURS
from lm_profiler.report.pictures.drawing import inches, legend, new_figure, thinned
from lm_profiler.report.pictures.groups import Groups, stack
from lm_profiler.report.tables.columns import COLUMNS, Column
from lm_profiler.report.tables.merged import Figure as Estimate
from lm_profiler.report.tables.merged import figure as estimated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 8.0
_MOST_NAMED = 100
"""More bars than that are drawn without names of their own but for every k-th."""


def phases(groups: Groups) -> Figure:
    """Bars read from above: the medians of a group's parts, scaled to end at its median step, with its interval."""
    count, scale = len(groups.groups), TIMES["step"].scale
    figure, axes = new_figure(_WIDTH, 1.4 + 0.36 * min(count, _MOST_NAMED))
    stacks = [stack(group) for group in groups.groups]
    left = [0.0] * count
    present = [part for part in PARTS if any(part in parts for parts in stacks)]
    for part in present:
        widths = [parts.get(part, 0.0) * scale for parts in stacks]
        rows = [row for row in range(count) if part in stacks[row]]
        known, starts = [widths[row] for row in rows], [left[row] for row in rows]
        axes.barh(rows, known, 0.72, starts, color=PART_COLOURS[part], edgecolor="white", lw=0.4 * (count < 50))
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    steps = [estimated(group.entries, COLUMNS["step_s"]) for group in groups.groups]
    known_steps = [(row, step.value * scale, *errors(step)) for row, step in enumerate(steps) if step.value is not None]
    if known_steps:
        at, values, below, above = zip(*known_steps, strict=True)
        xerr = [[error * scale for error in side] for side in (below, above)]
        axes.errorbar(values, at, xerr=xerr, fmt="|", color="black", ms=9, capsize=3, lw=1.2)
    named = thinned(count, _MOST_NAMED)
    names = [shortened(groups.groups[row].label) for row in named]
    ends = [(*_said(steps[row]), groups.groups[row].trouble) for row in named]
    said = [(end, f"{text} {trouble}".strip()) for end, text, trouble in ends]
    for row, (end, text) in zip(named, said, strict=True):
        axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(list(named), names)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, _room(names, said))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("\n".join(_explained(groups, named)))
    axes.set_ylabel(shortened(groups.title))
    legend(figure, [(part, PART_COLOURS[part]) for part in present])
    return figure


def _room(names: Sequence[str], said: Sequence[tuple[float, str]]) -> float:
    """Where the axis ends, so that what is written behind the bars stays within the figure."""
    axis = _WIDTH - 0.7 - inches(names)
    ends = (end * axis / (axis - 0.2 - inches([text])) for end, text in said)
    return max(ends, default=0.0) or 1.0


def _explained(groups: Groups, named: range) -> list[str]:
    bars = error_bars(groups, COLUMNS["step_s"])
    lines = ["time of a step (ms)", "phases: medians, scaled to add up to the median step"]
    lines += [f"black: the median step, {bars}"] * bool(bars)
    return lines + [f"{len(groups.groups)} bars, every {named.step}th with its name"] * (named.step > 1)


def _said(step: Estimate) -> tuple[float, str]:
    """How far to the right a bar reaches, and what to write there."""
    if step.value is None:
        return 0.0, ""
    return (step.value + errors(step)[1]) * TIMES["step"].scale, TIMES["step"].show(step.value, digits=1)


def error_bars(groups: Groups, figure: Column) -> str:
    """What the bars of error are; empty where there are none."""
    counts = [step.n for group in groups.groups if (step := estimated(group.entries, figure)).low is not None]
    parts = ["with 95 % interval"] * (1 in counts) + ["of repeats, the extremes"] * (max(counts, default=1) > 1)
    return "; ".join(parts)


def errors(figure: Estimate) -> tuple[float, float]:
    """How far the interval reaches below and above; 0 where there is none."""
    if figure.value is None or figure.low is None or figure.high is None:
        return 0.0, 0.0
    return figure.value - figure.low, figure.high - figure.value

"""Horizontal bars, each beginning where the one before it ends: a step's waterfall, and the way down of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.quantities import PARTS, TERMS, TIMES
from lm_profiler.record.run import RunRecord, Waterfall
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures import drawing
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS, SERIES_COLOURS, Group, new_figure, wrapped
from lm_profiler.report.run.improve_table import headline, way_texts
from lm_profiler.report.run.waterfall_text import Rung, no_waterfall, of_the_step, rungs, step_text
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 12
_WIDTH = 8.0
_STEP = "measured step"
_TOLD = 0.01  # the least share of the step that is written beside a bar
_SEEN = 0.002  # the least share of the step with which a phase is in the drawing.legend
_SCALE = TIMES["step"].scale


@dataclass(frozen=True)
class _Panel:
    """A run: its bars, and the measured step by phase, which is empty where that is unknown."""

    title: str
    fall: Waterfall
    rungs: Sequence[Rung]
    step: Mapping[str, float]

    @property
    def said(self) -> dict[str, tuple[float, str]]:
        """How far each term's bar reaches to the right, in ms, and the text that stands there."""
        told = {}
        for of in self.rungs:
            share = of.term.seconds / self.fall.step_s
            text = of.signed_text + (f"  ({share:.0%})" if share >= _TOLD else "")
            told[of.term.name] = ((of.start_s + max(of.term.seconds, 0.0)) * _SCALE, text)
        step = f"{step_text(self.fall).partition(' [')[0]} ms"
        return told | {_STEP: (max(self.fall.step_s, self.fall.ci_high or 0.0) * _SCALE, step)}

    @property
    def parts(self) -> set[str]:
        stacks = [self.step, *(rung.pieces for rung in self.rungs)]
        return {part for of in stacks for part, seconds in of.items() if seconds >= _SEEN * self.fall.step_s}


def waterfalls(groups: Sequence[Group]) -> Figure:
    """Draw two panels a row, with the same terms and scale of time, and below them why other runs have none."""
    panels, without = [], []
    for name, record in _named_records(groups):
        if record is not None and record.waterfall is not None:
            panels.append(_Panel(name, record.waterfall, rungs(record.waterfall), of_the_step(record)))
        else:
            why = "No waterfall: a cell that left no run." if record is None else no_waterfall(record)
            without.append((name, why))
    if not panels:
        raise UsageError(f"plot: expected runs whose steps were taken apart, given none. {without[0][1]}")
    if len(panels) > _MOST_PANELS:
        raise UsageError(f"plot: expected at most {_MOST_PANELS} runs for waterfall, given {len(panels)}; name fewer")
    return _draw(panels, [wrapped(f"{name}: {why}", _WIDTH) for name, why in without])


def _named_records(groups: Sequence[Group]) -> list[tuple[str, RunRecord | None]]:
    each = [(group.told, entry) for group in groups for entry in group.entries]
    repeats = [f" (repeat {of.cell.repeat})" if of.cell is not None and of.cell.repeat else "" for _, of in each]
    return [(name + repeat, entry.record) for (name, entry), repeat in zip(each, repeats, strict=True)]


def _draw(panels: Sequence[_Panel], without: Sequence[str]) -> Figure:
    occurring = dict.fromkeys(rung.term.name for panel in panels for rung in panel.rungs)
    known = [name for name in TERMS if name in occurring]
    later = [name for name in occurring if name not in TERMS]  # of a later version: before the unexplained
    rows = {name: row for row, name in enumerate([*known[:-1], *later, *known[-1:], _STEP])}
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    height = 1.0 + lines * (0.4 + 0.27 * len(rows)) + 0.3 * len(without)
    figure, grid = new_figure(_WIDTH, height, nrows=lines, ncols=columns, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set_title(wrapped(panel.title, _WIDTH / columns - 0.4), fontsize=9, loc="left")
        _bars(axes, panel, rows)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    axes = grid[0, 0]
    ranked = sorted(panels, key=lambda panel: panel.fall.bandwidth_bytes_per_s is not None)  # the usual titles win
    by_name: dict[str, str] = {rung.term.name: rung.title for panel in ranked for rung in panel.rungs}
    titles = [by_name.get(name, name) for name in rows]
    axes.set_yticks(list(rows.values()), titles)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    room = (_WIDTH - 0.3 - drawing.inches(titles)) / columns
    axes.set_xlim(0, drawing.end_of_axis([told for panel in panels for told in panel.said.values()], room))
    said = ["time of a step (ms), and its share of the step"]
    said += ["black: 95 % interval of the mean step"] * any(panel.fall.ci_low is not None for panel in panels)
    figure.supxlabel("\n".join([*said, *without]), fontsize=9)
    parts = {part for panel in panels for part in panel.parts}
    drawing.legend(figure, [(part, PART_COLOURS[part]) for part in PARTS if part in parts])
    return figure


def _bars(axes: Axes, panel: _Panel, rows: Mapping[str, int]) -> None:
    """Draw each term in the colours of its phases, with thin lines from one bar to the next."""
    ends = [*(rows[rung.term.name] for rung in panel.rungs[1:]), rows[_STEP]]
    for rung, below in zip(panel.rungs, ends, strict=True):
        row, end = rows[rung.term.name], (rung.start_s + rung.term.seconds) * _SCALE
        axes.plot([end, end], [row, below], color=PALE, lw=0.6, zorder=0.5)
        _stack(axes, row, rung.start_s, rung.pieces)
    fall, row = panel.fall, rows[_STEP]
    _stack(axes, row, 0.0, panel.step or {"": fall.step_s})
    if fall.ci_low is not None and fall.ci_high is not None:
        drawing.bar_of_error(axes, row, *(seconds * _SCALE for seconds in (fall.step_s, fall.ci_low, fall.ci_high)))
    for name, (end, text) in panel.said.items():
        weight = "bold" if name == _STEP else "normal"
        axes.annotate(text, (end, rows[name]), (4, 0), textcoords="offset points", va="center", weight=weight)
    axes.grid(visible=False, axis="y")


def _stack(axes: Axes, row: int, start_s: float, pieces: Mapping[str, float]) -> None:
    """Draw the ``pieces`` of a bar one after the other; those of no known phase are hatched."""
    for part, seconds in pieces.items():
        of = {"color": PART_COLOURS[part]} if part else {"facecolor": "#DDDDDD", "edgecolor": PALE, "hatch": "////"}
        look: dict[str, Any] = {"lw": 0, **of}
        axes.barh(row, seconds * _SCALE, 0.72, start_s * _SCALE, **look)
        start_s += seconds


_WAY_WIDTH = 7.2


def way_down(record: ImproveRecord) -> Figure:
    """Draw a bar for each step of a search; behind it, pale, what the change saved, and over its end the interval."""
    way = record.way
    if not way:
        raise UsageError(f"plot: expected a search that kept a change, given {record.name}: {headline(record)}")
    steps = [of.step_s * _SCALE for of in way]
    saved = [0.0, *(max(last - step, 0.0) for last, step in pairwise(steps))]
    ends = [max(step + of, (at.high_s or 0.0) * _SCALE) for step, of, at in zip(steps, saved, way, strict=True)]
    figure, axes = new_figure(_WAY_WIDTH, 1.3 + 0.32 * len(way))
    axes.barh(range(len(way)), steps, 0.7, color=SERIES_COLOURS[0], lw=0)
    axes.barh(range(len(way)), saved, 0.7, steps, color=PALE, alpha=0.3, lw=0)
    texts = [text for text, _ in way_texts(record)]
    for row, (point, text, end) in enumerate(zip(way, texts, ends, strict=True)):
        if point.low_s is not None and point.high_s is not None:
            drawing.bar_of_error(
                axes, row, *(seconds * _SCALE for seconds in (point.step_s, point.low_s, point.high_s))
            )
        axes.annotate(text, (end, row), (5, 0), textcoords="offset points", va="center")
    names = [shortened(of.name) for of in way]
    axes.set_yticks(range(len(way)), names)
    axes.set_ylim(len(way) - 0.4, -0.6)
    axes.set_xlim(0, drawing.end_of_axis(zip(ends, texts, strict=True), _WAY_WIDTH - 0.3 - drawing.inches(names)))
    axes.grid(visible=False, axis="y")
    axes.set_title(wrapped(headline(record), _WAY_WIDTH), fontsize=9, loc="left")
    axes.set_xlabel("time of a step (ms), with the interval that decided; pale: what the change saved")
    return figure

"""Horizontal bars, each beginning where the one before it ends: a step's waterfall, and the way down of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.improve import ImproveRecord, WayPoint
from lm_profiler.record.quantities import PARTS, TERMS, TIMES
from lm_profiler.record.run import Waterfall
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS, SERIES_COLOURS, inches, legend, new_figure, wrapped
from lm_profiler.report.pictures.groups import Group
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
_SEEN = 0.002  # the least share of the step with which a phase is in the legend
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
        """How far each term's bar reaches to the right, and the text that stands there."""
        told = {of.term.name: (of.start_s + max(of.term.seconds, 0.0), self._share(of)) for of in self.rungs}
        step = f"{step_text(self.fall).partition(' [')[0]} ms"
        return told | {_STEP: (max(self.fall.step_s, self.fall.ci_high or 0.0), step)}

    @property
    def parts(self) -> set[str]:
        """The phases that are large enough to be seen."""
        stacks = [self.step, *(rung.pieces for rung in self.rungs)]
        return {part for of in stacks for part, seconds in of.items() if seconds >= _SEEN * self.fall.step_s}

    def _share(self, of: Rung) -> str:
        share = of.term.seconds / self.fall.step_s
        return of.signed_text + (f"  ({share:.0%})" if share >= _TOLD else "")


def waterfalls(groups: Sequence[Group]) -> Figure:
    """Draw two panels a row, with the same terms and scale of time, and below them why other runs have none."""
    runs = [(group.told + _repeat(entry), entry) for group in groups for entry in group.entries]
    panels = [_panel_of(name, entry) for name, entry in runs if entry.record is not None and entry.record.waterfall]
    without = [(name, why) for name, entry in runs if (why := _why_not(entry))]
    if not panels:
        raise UsageError(f"plot: expected runs whose steps were taken apart, given none. {without[0][1]}")
    if len(panels) > _MOST_PANELS:
        raise UsageError(f"plot: expected at most {_MOST_PANELS} runs for waterfall, given {len(panels)}; name fewer")
    return _draw(panels, [wrapped(f"{name}: {why}", _WIDTH) for name, why in without])


def _panel_of(name: str, entry: Entry) -> _Panel:
    record = entry.record
    assert record is not None
    assert record.waterfall is not None
    return _Panel(name, record.waterfall, rungs(record.waterfall), of_the_step(record))


def _repeat(entry: Entry) -> str:
    return f" (repeat {entry.cell.repeat})" if entry.cell is not None and entry.cell.repeat else ""


def _why_not(entry: Entry) -> str:
    return "No waterfall: a cell that left no run." if entry.record is None else no_waterfall(entry.record)


def _draw(panels: Sequence[_Panel], without: Sequence[str]) -> Figure:
    rows = {name: row for row, name in enumerate([*_terms(panels), _STEP])}
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
    axes.set_xlim(0, _end(panels, (_WIDTH - 0.3 - inches(titles)) / columns))
    said = ["time of a step (ms), and its share of the step"]
    said += ["black: 95 % interval of the mean step"] * any(panel.fall.ci_low is not None for panel in panels)
    figure.supxlabel("\n".join([*said, *without]), fontsize=9)
    parts = {part for panel in panels for part in panel.parts}
    legend(figure, [(part, PART_COLOURS[part]) for part in PARTS if part in parts])
    return figure


def _terms(panels: Sequence[_Panel]) -> list[str]:
    occurring = dict.fromkeys(rung.term.name for panel in panels for rung in panel.rungs)
    known = [name for name in TERMS if name in occurring]
    return [*known[:-1], *(name for name in occurring if name not in TERMS), *known[-1:]]


def _bars(axes: Axes, panel: _Panel, rows: Mapping[str, int]) -> None:
    ends = [*(rows[rung.term.name] for rung in panel.rungs[1:]), rows[_STEP]]
    for rung, below in zip(panel.rungs, ends, strict=True):
        row, end = rows[rung.term.name], (rung.start_s + rung.term.seconds) * _SCALE
        axes.plot([end, end], [row, below], color=PALE, lw=0.6, zorder=0.5)
        _stack(axes, row, rung.start_s, rung.pieces)
    fall, row = panel.fall, rows[_STEP]
    _stack(axes, row, 0.0, panel.step or {"": fall.step_s})
    if fall.ci_low is not None and fall.ci_high is not None:
        around = [[(fall.step_s - fall.ci_low) * _SCALE], [(fall.ci_high - fall.step_s) * _SCALE]]
        axes.errorbar([fall.step_s * _SCALE], [row], xerr=around, fmt="|", color="black", ms=9, capsize=3, lw=1.2)
    for name, (end_s, text) in panel.said.items():
        weight = "bold" if name == _STEP else "normal"
        axes.annotate(
            text, (end_s * _SCALE, rows[name]), (4, 0), textcoords="offset points", va="center", weight=weight
        )
    axes.grid(visible=False, axis="y")


def _stack(axes: Axes, row: int, start_s: float, pieces: Mapping[str, float]) -> None:
    for part, seconds in pieces.items():
        of = {"color": PART_COLOURS[part]} if part else {"facecolor": "#DDDDDD", "edgecolor": PALE, "hatch": "////"}
        look: dict[str, Any] = {"lw": 0, **of}
        axes.barh(row, seconds * _SCALE, 0.72, start_s * _SCALE, **look)
        start_s += seconds


def _end(panels: Sequence[_Panel], width: float) -> float:
    said = [told for panel in panels for told in panel.said.values()]
    ends = (end_s * _SCALE * width / max(width - 0.2 - inches([text]), 1.0) for end_s, text in said)
    return max(ends) or 1.0


_WAY_WIDTH = 7.2


def way_down(record: ImproveRecord) -> Figure:
    """Draw a bar for each step of a search; behind it, pale, what the change saved, and over its end the interval."""
    way = record.way
    if not way:
        raise UsageError(f"plot: expected a search that kept a change, given {record.name}: {headline(record)}")
    steps = [of.step_s * _SCALE for of in way]
    before = [steps[0], *steps[:-1]]
    ends = [max(step, last, (of.high_s or 0.0) * _SCALE) for of, step, last in zip(way, steps, before, strict=True)]
    figure, axes = new_figure(_WAY_WIDTH, 1.3 + 0.32 * len(way))
    axes.barh(range(len(way)), steps, 0.7, color=SERIES_COLOURS[0], lw=0)
    saved = [max(last - step, 0.0) for step, last in zip(steps, before, strict=True)]
    axes.barh(range(len(way)), saved, 0.7, steps, color=PALE, alpha=0.3, lw=0)
    for row, point in enumerate(way):
        _interval(axes, row, point)
    texts = [text for text, _ in way_texts(record)]
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        axes.annotate(text, (end, row), (5, 0), textcoords="offset points", va="center")
    names = [shortened(of.name) for of in way]
    axes.set_yticks(range(len(way)), names)
    axes.set_ylim(len(way) - 0.4, -0.6)
    room = _WAY_WIDTH - 0.3 - inches(names)
    axes.set_xlim(0, max(ends) * room / max(room - 0.2 - inches(texts), 1.0))
    axes.grid(visible=False, axis="y")
    axes.set_title(wrapped(headline(record), _WAY_WIDTH), fontsize=9, loc="left")
    axes.set_xlabel("time of a step (ms), with the interval that decided; pale: what the change saved")
    return figure


def _interval(axes: Axes, row: int, of: WayPoint) -> None:
    if of.low_s is not None and of.high_s is not None:
        around = [[max(of.step_s - of.low_s, 0.0) * _SCALE], [max(of.high_s - of.step_s, 0.0) * _SCALE]]
        axes.errorbar([of.step_s * _SCALE], [row], xerr=around, fmt="|", color="black", ms=9, capsize=3, lw=1.2)

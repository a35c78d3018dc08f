"""The way down: a bar for the step of the first setting and one after each change that was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_profiler.record.improve import ImproveRecord, WayPoint
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.colours import PALE, SERIES_COLOURS
from lm_profiler.report.pictures.drawing import inches, new_figure, wrapped
from lm_profiler.report.run.improve import headline, way_texts
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.2
_SCALE = TIMES["step"].scale


def way_down(record: ImproveRecord) -> Figure:
    """Bars below each other; behind each, pale, what the change saved, and over its end the interval.

    Raises:
        UsageError: nothing was kept.
    """
    way = record.way
    if not way:
        raise UsageError(f"plot: expected a search that kept a change, given {record.name}: {headline(record)}")
    steps = [of.step_s * _SCALE for of in way]
    before = [steps[0], *steps[:-1]]
    ends = [max(step, last, (of.high_s or 0.0) * _SCALE) for of, step, last in zip(way, steps, before, strict=True)]
    figure, axes = new_figure(_WIDTH, 1.3 + 0.32 * len(way))
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
    room = _WIDTH - 0.3 - inches(names)
    axes.set_xlim(0, max(ends) * room / max(room - 0.2 - inches(texts), 1.0))
    axes.grid(visible=False, axis="y")
    axes.set_title(wrapped(headline(record), _WIDTH), fontsize=9, loc="left")
    axes.set_xlabel("time of a step (ms), with the interval that decided; pale: what the change saved")
    return figure


def _interval(axes: Axes, row: int, of: WayPoint) -> None:
    if of.low_s is not None and of.high_s is not None:
        around = [[max(of.step_s - of.low_s, 0.0) * _SCALE], [max(of.high_s - of.step_s, 0.0) * _SCALE]]
        axes.errorbar([of.step_s * _SCALE], [row], xerr=around, fmt="|", color="black", ms=9, capsize=3, lw=1.2)

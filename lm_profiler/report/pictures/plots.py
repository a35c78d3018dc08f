"""Pictures of runs for documents: PNG, SVG or PDF."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_profiler.record.calls import require
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import write_whole
from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.text import shortened
from lm_profiler.report.pictures.colours import SERIES_COLOURS
from lm_profiler.report.pictures.drawing import STYLE, error_bars, known_points, new_figure, thinned, wrapped
from lm_profiler.report.pictures.groups import Group, grouped, lines, places, trouble
from lm_profiler.report.pictures.improve_plot import way_down
from lm_profiler.report.pictures.phases_plot import phases
from lm_profiler.report.pictures.steps_plot import steps
from lm_profiler.report.pictures.waterfall_plot import waterfalls
from lm_profiler.report.tables.columns import COLUMNS, Column, peak_memory
from lm_profiler.report.tables.merged import Estimate, estimated
from lm_profiler.report.tables.table import fact_text
from lm_profiler.usage_error import UsageError, expect, expect_one_of

if TYPE_CHECKING:  # it takes half a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("phases", "waterfall", "steps", "memory", "attention", "tokens", "mfu")
WAY_DOWN = "improve"
"""The kind that is no picture of runs, but of a search among them."""
SUFFIXES = (".png", ".svg", ".pdf")

_NO_DATE = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")


def save_plot(kind: str, entries: Sequence[Entry], path: Path, by: str | None = None) -> None:
    """Draw ``entries`` against ``by`` into ``path``, whose suffix says the format.

    ``phases``: the median step, cut into its parts; ``waterfall``: from the ideal step to the measured one; ``steps``:
    the time of every step, warm-up shaded; ``memory``: the peak; ``attention``: what forward leaves for backward, of
    attention alone its scores and outputs; ``tokens`` a second; ``mfu``. Bars of error are 95 % intervals. A run that
    has no figure stands there with the word for what became of it. ``by`` is an option or a fact; where it is None, one
    that varies.

    Raises:
        UsageError: an unknown kind, suffix or ``by``, or nothing to draw.
        OSError: ``path`` cannot be written.
        MissingExtra: matplotlib is not installed.
    """
    expect_one_of(KINDS, "plot", kind)
    _save(lambda: draw(kind, entries, by), path)


def save_way_down(searches: Sequence[ImproveRecord], path: Path) -> None:
    """Draw what the one of ``searches`` found into ``path``: the step after each change that was kept.

    Raises:
        UsageError: an unknown suffix, no search or several, or one that kept nothing.
        OSError: ``path`` cannot be written.
        MissingExtra: matplotlib is not installed.
    """
    if len(searches) != 1:
        raise UsageError(
            f"plot: expected one folder of `lm_profiler improve`, given {len(searches) or 'none'}; name one"
        )
    _save(lambda: way_down(searches[0]), path)


def _save(draw_it: Callable[[], Figure], path: Path) -> None:
    suffix = path.suffix.lower()
    expect(suffix in SUFFIXES, "plot", f"a file ending in {', '.join(SUFFIXES)}", path.name)
    require("matplotlib", "plot")
    from matplotlib import rc_context

    with rc_context(STYLE):
        content = io.BytesIO()
        draw_it().savefig(content, format=suffix[1:], dpi=150, metadata=_NO_DATE[suffix])
    write_whole(path, content.getvalue())


def draw(kind: str, entries: Sequence[Entry], by: str | None = None) -> Figure:
    """The figure that ``save_plot`` saves.

    Raises:
        UsageError: there is no run, ``by`` is no option and no fact, or no run has the figure.
    """
    if not entries:
        raise UsageError("plot: expected at least one run, given none; name a folder that holds one")
    if kind == "phases":
        return phases(grouped(entries, by))
    if kind == "waterfall":
        return waterfalls(grouped(entries, by))
    if kind == "steps":
        return steps(grouped(entries, by))
    figures = {"mfu": COLUMNS["mfu"], "tokens": COLUMNS["tokens_per_s"], "attention": COLUMNS["saved_bytes"]}
    return _figure_against(grouped(entries, by, numbers=True), figures.get(kind) or peak_memory(entries))


_MOST_WORDS = 12
"""Lines in a legend, and below an axis: of more there is the number."""
_WIDTH, _MOST_TICKS = 7.2, 24


def _figure_against(groups: Sequence[Group], figure: Column) -> Figure:
    """``figure`` against the first column, a line for each combination of the others."""
    assert figure.quantity is not None
    figures = [estimated(group.entries, figure) for group in groups]
    if all(of.value is None for of in figures):
        raise UsageError(
            f"plot: expected runs that ended well and know their {figure.title}, given none; "
            "`report RUNS` shows how each ended"
        )
    absent = _absent(groups, figures)
    drawn, axes = new_figure(_WIDTH, 4.0 + 0.17 * len(absent))
    ticks, numbers = places(groups)
    named = lines(groups)
    for at, (name, line) in enumerate(named.items()):
        style = _MARKERS[at % len(_MARKERS)] + (_DASHES[at // len(SERIES_COLOURS) % len(_DASHES)] if numbers else "")
        points = [(ticks[group.values[0]], estimated(group.entries, figure)) for group in line]
        look = {"color": SERIES_COLOURS[at % len(SERIES_COLOURS)], "fmt": style}
        _line(axes, points, figure.quantity.scale, label=shortened(name) if at < _MOST_WORDS else "_", **look)
    _ticks(axes, ticks, numbers)
    columns = groups[0].columns
    axes.set_xlabel("\n".join((wrapped(columns[0].title, _WIDTH), *absent)))
    axes.set_ylabel("\n".join(filter(None, (figure.quantity.heading, error_bars(figures)))))
    if len(named) > 1:
        more = f"\nand {len(named) - _MOST_WORDS} more" * (len(named) > _MOST_WORDS)
        title = shortened(columns[1].title, 24) if len(columns) == 2 else ""
        drawn.legend(loc="outside right upper", title=title + more)
    return drawn


def _line(axes: Axes, points: Sequence[tuple[float, Estimate]], scale: float, color: str, **look: Any) -> None:
    """A point for each figure; on the axis, a cross where there is none."""
    x, y, *around = known_points(points, scale)
    axes.errorbar(x, y, yerr=around, color=color, capsize=3, **look)
    missing = [x for x, figure in points if figure.value is None]
    if missing:
        axes.plot(missing, [0.0] * len(missing), "x", color=color, clip_on=False)


def _absent(groups: Sequence[Group], figures: Sequence[Estimate]) -> list[str]:
    """A line for each group that has no point, or of which only some repeats speak: what became of it."""
    told = []
    for group, figure in zip(groups, figures, strict=True):
        if word := trouble(group.entries) or ("unknown" if figure.value is None else ""):
            told.append(f"{shortened(group.label)}: {word}")
    return told[:_MOST_WORDS] + [f"and {len(told) - _MOST_WORDS} more"] * (len(told) > _MOST_WORDS)


def _ticks(axes: Axes, ticks: Mapping[Any, float], numbers: bool) -> None:
    """A tick at each value that was run; doubling values stand at equal distances."""
    if numbers and 0 < 4 * min(ticks.values()) <= max(ticks.values()):
        axes.set_xscale("log", base=2)
    shown = [list(ticks.items())[at] for at in thinned(len(ticks), _MOST_TICKS)]
    names = [shortened(fact_text(value) or "unknown", 32) for value, _ in shown]
    crowded = not numbers and sum(map(len, names)) > _WIDTH * 8
    turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if crowded else {}
    axes.set_xticks([place for _, place in shown], names, **turned)
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])

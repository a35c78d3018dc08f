"""Functions and constants that all pictures share: colours, style, new figures, legends, and wrapped texts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lm_profiler.report.tables.run_groups import Estimate

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PART_COLOURS = {
    "data": "#D55E00",  # Okabe-Ito vermillion
    "transfer": "#CC79A7",  # Okabe-Ito reddish purple
    "forward": "#0072B2",  # Okabe-Ito blue
    "zero_grad": "#999933",  # Tol muted olive
    "backward": "#56B4E9",  # Okabe-Ito sky blue
    "clip": "#AA3377",  # Tol bright purple
    "optimizer": "#E69F00",  # Okabe-Ito orange
    "other": "#888888",
}

# Colours of lines that are not parts of a step (Tol muted teal, purple, rose, green); no phase has one of them. More
# than four lines are distinguished by their markers.
SERIES_COLOURS = ("#44AA99", "#AA4499", "#CC6677", "#117733")

# the colour of shading, grids and missing figures, readable on white and on dark
PALE = "#888888"

# colours of the causes of memory, in the order of a stack
CAUSE_COLOURS = {
    "parameters": "#332288",  # Tol muted indigo
    "gradients": "#88CCEE",  # Tol muted cyan
    "optimizer_states": "#44AA99",  # Tol muted teal
    "buffers": "#117733",  # Tol muted green
    "workspaces": "#DDCC77",  # Tol muted sand
    "activations": "#CC6677",  # Tol muted rose
    "rest": "#BBBBBB",
}

_MATMUL_COLOUR, _ELEMENTWISE_COLOUR, _ROW_COLOUR, _COPY_COLOUR = SERIES_COLOURS

# The colour and the hatching (as matplotlib and plotly name it) of each kind of kernel, in the order of a stack. Kinds
# with similar work share a colour.
KIND_LOOKS = {
    "matmul": (_MATMUL_COLOUR, ""),
    "attention": (_MATMUL_COLOUR, "/"),
    "elementwise": (_ELEMENTWISE_COLOUR, ""),
    "softmax": (_ROW_COLOUR, ""),
    "normalization": (_ROW_COLOUR, "/"),
    "reduction": (_ROW_COLOUR, "x"),
    "copies": (_COPY_COLOUR, ""),
    "host_copies": (_COPY_COLOUR, "/"),
    "communication": (_COPY_COLOUR, "x"),
    "waiting": (PALE, "x"),
    "other": (PALE, ""),
    "idle": (PALE, "/"),
}

STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.parse_math": False,  # a dollar in a run's name stays a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lm_profiler",  # equal figures make equal files
}

_CHARACTERS_PER_INCH = 13  # in DejaVu Sans at 9 points; fewer capitals fit


def new_figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


def label_logarithmic(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: matplotlib's own labels are formulas, which are off here."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(StrMethodFormatter("{x:g}"))


def add_legend(figure: Figure, colours: Sequence[tuple[str, str]]) -> None:
    """Add a legend above the axes of ``figure``: pairs of a label and its colour."""
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(color=colour, label=label) for label, colour in colours]
        figure.legend(
            handles=patches,
            loc="outside upper center",
            ncols=len(patches),
            handlelength=1.0,
        )


@dataclass
class ErrorBars:
    """Points of known figures and their intervals, as matplotlib's ``errorbar`` takes them."""

    places: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    # how far each interval reaches below the value
    below: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)


def error_bars(figures: Iterable[tuple[float, Estimate]], scale: float) -> ErrorBars:
    """Return the points and error bars of ``figures``, pairs of a place on the axis and a figure.

    Figures are multiplied by ``scale``; unknown ones are left out.
    """
    bars = ErrorBars()
    for place, figure in figures:
        if figure.value is None:
            continue
        # Without an interval no error bar is drawn: one of length 0 would suggest an exact figure.
        low = high = math.nan
        if figure.low is not None and figure.high is not None:
            low, high = figure.low, figure.high
        bars.places.append(place)
        bars.values.append(scale * figure.value)
        bars.below.append(scale * abs(low - figure.value))
        bars.above.append(scale * abs(high - figure.value))
    return bars


def error_bar_text(figures: Iterable[Estimate]) -> str:
    """Return what the error bars of ``figures`` mean; empty if there are none."""
    counts = [figure.n for figure in figures if figure.low is not None]
    texts = []
    if 1 in counts:
        texts.append("with 95 % interval")
    if max(counts, default=1) > 1:
        texts.append("of repeats, the extremes")
    return "; ".join(texts)


def wrapped(text: str, inches: float) -> str:
    """Return ``text`` on at most two lines that are at most ``inches`` wide; the rest is left out."""
    width = max(8, int(inches * _CHARACTERS_PER_INCH))
    lines = textwrap.wrap(
        text, width, max_lines=2, placeholder=" …", break_on_hyphens=False
    )
    return "\n".join(lines)


def thinned(count: int, most_places: int) -> range:
    """Return every k-th index below ``count``, with the smallest k that leaves at most ``most_places``."""
    interval = math.ceil(count / most_places)
    return range(0, count, max(1, interval))

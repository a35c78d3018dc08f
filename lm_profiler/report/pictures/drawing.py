"""The parts that all pictures share: colours, style, a new figure, a legend, titles that stay within it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lm_profiler.report.tables.rows import Estimate

if TYPE_CHECKING:
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

# Colours of lines that are not parts of a step (Tol muted teal, purple, rose, green); none of them means a phase.
# Markers tell more lines apart.
SERIES_COLOURS = ("#44AA99", "#AA4499", "#CC6677", "#117733")

# the colour of shading, grids and what has no figure, readable on white and on dark
PALE = "#888888"

# colours of what memory is held for, in the order of a stack
CAUSE_COLOURS = {
    "parameters": "#332288",  # Tol muted indigo
    "gradients": "#88CCEE",  # Tol muted cyan
    "optimizer_states": "#44AA99",  # Tol muted teal
    "buffers": "#117733",  # Tol muted green
    "workspaces": "#DDCC77",  # Tol muted sand
    "activations": "#CC6677",  # Tol muted rose
    "rest": "#BBBBBB",
}

_MULTIPLY, _EACH, _ROWS, _MOVE = SERIES_COLOURS

# The colour and the hatching (as matplotlib and plotly name it) of each kind of kernel, in the order of a stack. Kinds
# that work alike share a colour.
KIND_LOOKS = {
    "matmul": (_MULTIPLY, ""),
    "attention": (_MULTIPLY, "/"),
    "elementwise": (_EACH, ""),
    "softmax": (_ROWS, ""),
    "normalization": (_ROWS, "/"),
    "reduction": (_ROWS, "x"),
    "copies": (_MOVE, ""),
    "host_copies": (_MOVE, "/"),
    "communication": (_MOVE, "x"),
    "other": (PALE, ""),
    "idle": (PALE, "/"),
}


STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.parse_math": False,  # a dollar in a run's name is a dollar
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

_CHARACTERS_AN_INCH = 13  # of DejaVu Sans at 9 points, capitals aside


def new_figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


def legend(figure: Figure, colours: Sequence[tuple[str, str]]) -> None:
    """Add a patch for each (label, colour) above the figure."""
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(color=colour, label=label) for label, colour in colours]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), handlelength=1.0)


def known_points(figures: Iterable[tuple[float, Estimate]], scale: float) -> Sequence[Sequence[float]]:
    """Return places, values times ``scale``, and how far intervals reach below and above, of the known figures."""
    points = []
    for at, of in figures:
        if of.value is not None:
            around = (0.0 if end is None else abs(end - of.value) for end in (of.low, of.high))
            points.append((at, *(scale * x for x in (of.value, *around))))
    return list(zip(*points, strict=True)) or [()] * 4


def error_bars(figures: Iterable[Estimate]) -> str:
    """Return what the error bars are; empty where there are none."""
    counts = [figure.n for figure in figures if figure.low is not None]
    parts = ["with 95 % interval"] * (1 in counts) + ["of repeats, the extremes"] * (max(counts, default=1) > 1)
    return "; ".join(parts)


def wrapped(text: str, inches: float) -> str:
    """Return ``text`` on at most two lines no wider than ``inches``; the rest is left out."""
    width = max(8, int(inches * _CHARACTERS_AN_INCH))
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …", break_on_hyphens=False))


def inches(texts: Sequence[str]) -> float:
    """Return a generous estimate of the width of the longest of ``texts``, in inches."""
    return max(map(len, texts), default=0) / (_CHARACTERS_AN_INCH - 2)


def thinned(count: int, most: int) -> range:
    """Return every k-th of ``count`` places, so that at most ``most`` are left."""
    return range(0, count, max(1, -(-count // most)))

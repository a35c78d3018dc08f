"""The parts that all pictures share: colours, style, a new figure, texts that stay within it, groups of entries."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS, TIMES
from lm_profiler.report.tables import rows as merged
from lm_profiler.report.tables.rows import Estimate, Merged, estimated
from lm_profiler.report.tables.table import fact_text
from lm_profiler.report.tables.table_columns import COLUMNS, COMPARED, Column, column, columns_named
from lm_profiler.usage_error import UsageError

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
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(color=colour, label=label) for label, colour in colours]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), handlelength=1.0)


def error_bars(figures: Iterable[Estimate]) -> str:
    counts = [figure.n for figure in figures if figure.low is not None]
    parts = ["with 95 % interval"] * (1 in counts) + ["of repeats, the extremes"] * (max(counts, default=1) > 1)
    return "; ".join(parts)


def wrapped(text: str, inches: float) -> str:
    """Return ``text`` on at most two lines no wider than ``inches``; the rest is left out."""
    width = max(8, int(inches * _CHARACTERS_AN_INCH))
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …", break_on_hyphens=False))


@dataclass(frozen=True)
class Group:
    """Entries that differ in no known fact; ``columns`` are the facts that the groups of a picture differ in."""

    entries: Merged
    columns: Sequence[Column]

    @property
    def label(self) -> str:
        """The name beside an axis with a title: a single value stands alone."""
        return ", ".join(_word(of, self.entries[0], bare=len(self.columns) == 1) for of in self.columns)

    @property
    def told(self) -> str:
        return ", ".join(_word(of, self.entries[0]) for of in self.columns)


def grouped(entries: Sequence[Entry], by: str | None = None) -> list[Group]:
    """Group ``entries`` by what varies, in the order of ``by``, or else of the first."""
    others = varying(entries)
    first = _axis(by, entries) if by is not None else others[0] if others else COLUMNS["name"]
    columns = [first, *(axis for axis in others if axis.name != first.name)]
    return [Group(alike, columns) for alike in merged.by_facts(entries, columns).values()]


def varying(entries: Sequence[Entry]) -> list[Column]:
    """Return what the entries differ in: options that were given, facts that people compare by, other options."""
    given = dict.fromkeys(path for entry in entries for path in entry.overrides)
    axes = {axis.name: axis for axis in (*map(column, given), *COMPARED, *map(column, merged.set_apart(entries)))}
    rows = merged.alone(entries)
    return [axis for axis in axes.values() if merged.differs(rows, axis) and not merged.told_by_size(rows, axis)]


def _word(of: Column, entry: Entry, bare: bool = False) -> str:
    value, title = of.get(entry), of.title.rpartition(".")[2]
    if value is None:
        return f"no {title}" if merged.unset(entry, of) else f"{title} unknown"
    if isinstance(value, bool):
        return _SPOKEN.get((of.name, value)) or (title if value else f"no {title}")
    return fact_text(value) if bare or isinstance(value, str) else f"{title} {fact_text(value)}"


_SPOKEN = {("compile", True): "compiled", ("compile", False): "eager"}


def stack(group: Group) -> dict[str, float]:
    """Return the seconds of each part of the group's step, which add up to it."""
    # Medians over several runs do not add up: the parts are scaled to the step.
    typical = {part: estimated(group.entries, COLUMNS[TIMES[part].name]).value for part in PARTS}
    known = {part: seconds for part, seconds in typical.items() if seconds is not None}
    step, total = estimated(group.entries, COLUMNS[TIMES["step"].name]).value, sum(known.values())
    return {part: seconds * (step / total if step and total else 1.0) for part, seconds in known.items()}


def _axis(name: str, entries: Sequence[Entry]) -> Column:
    try:
        [axis] = columns_named([name], entries)
    except UsageError:
        raise UsageError(
            f"by: expected a fact such as size, or an option that these runs have, given {name!r}"
        ) from None
    if axis.quantity is not None:
        raise UsageError(f"by: expected an option or a fact, given the figure {name!r}; take model.size, say")
    return axis

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
from lm_profiler.report.tables.table import fact_text, is_number
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

_MULTIPLY, _EACH, _ROWS, _MOVE = SERIES_COLOURS

# The colour and the hatching (as matplotlib and plotly name it) of each kind of kernel, in the order of a stack. Kinds
# with similar work share a colour.
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

_CHARACTERS_AN_INCH = 13  # DejaVu Sans at 9 points, except capitals


def new_figure(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Return a figure of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


def legend(figure: Figure, colours: Sequence[tuple[str, str]]) -> None:
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
    counts = [figure.n for figure in figures if figure.low is not None]
    parts = ["with 95 % interval"] * (1 in counts) + ["of repeats, the extremes"] * (max(counts, default=1) > 1)
    return "; ".join(parts)


def wrapped(text: str, inches: float) -> str:
    """Return ``text`` on at most two lines no wider than ``inches``; the rest is left out."""
    width = max(8, int(inches * _CHARACTERS_AN_INCH))
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …", break_on_hyphens=False))


def thinned(count: int, most: int) -> range:
    """Return every k-th of ``count`` places, so that at most ``most`` are left."""
    return range(0, count, max(1, -(-count // most)))


@dataclass(frozen=True)
class Group:
    """Entries that differ in no known fact; ``columns`` are the facts in which a picture's groups differ."""

    entries: Merged
    columns: Sequence[Column]

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of ``columns`` as a key; lists and mappings of the config are text."""
        values = [of.get(self.entries[0]) for of in self.columns]
        return tuple(x if x is None or isinstance(x, (bool, int, float)) else str(x) for x in values)

    @property
    def label(self) -> str:
        """The name at an axis with a title: a single value has no heading."""
        return ", ".join(_word(of, self.entries[0], bare=len(self.columns) == 1) for of in self.columns)

    @property
    def told(self) -> str:
        return ", ".join(_word(of, self.entries[0]) for of in self.columns)


def trouble(entries: Merged) -> str:
    """Return how the entries ended, such as ``OOM`` or ``1 ok, 1 failed``; empty if all succeeded."""
    ended = merged.status(entries, merged.WORDS)
    return "" if ended == "ok" else ended


def grouped(entries: Sequence[Entry], by: str | None = None, numbers: bool = False) -> list[Group]:
    """Group ``entries`` by varying facts, in the order of ``by``, or else of the first; ``numbers`` go before words."""

    def is_word(axis: Column) -> bool:
        return not all(map(is_number, merged.distinct(map(axis.get, entries))))

    others = varying(entries)
    if by is not None:
        first = _axis(by, entries)
    elif numbers and others:  # a line has a number on its axis, the context length if that varies
        first = min(others, key=lambda axis: (axis.name != "context_length", is_word(axis)))
    else:
        first = others[0] if others else COLUMNS["name"]
    columns = [first, *(axis for axis in others if axis.name != first.name)]
    return [Group(alike, columns) for alike in merged.by_facts(entries, columns).values()]


def varying(entries: Sequence[Entry]) -> list[Column]:
    """Return the columns in which entries differ: given options, facts that users compare by, other options."""
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


def lines(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each line, which runs over the values of the first column, by the line's name."""
    by_label: dict[str, list[Group]] = {}
    for group in groups:
        by_label.setdefault(Group(group.entries, group.columns[1:]).label, []).append(group)
    return by_label


def places(groups: Sequence[Group]) -> tuple[dict[Any, float], bool]:
    """Return the place of each value of the first column on an axis, and whether the values are numbers."""
    values = dict.fromkeys(group.values[0] for group in groups)
    numbers = all(map(is_number, values))
    return {value: value if numbers else place for place, value in enumerate(values)}, numbers


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

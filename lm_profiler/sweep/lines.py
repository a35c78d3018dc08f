"""A table of cells as lines of a terminal: whatever its width, status and figures stay whole, and reasons lie below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from lm_profiler.record.sweep import Cell
from lm_profiler.record.text import printable
from lm_profiler.sweep.plan import labels_of, telling

_LEAST = 4
"""Characters of an option's column, where there is no room for all of it."""
_GAP = "  "
_STYLES = {"ok": "green", "oom": "yellow", "refused": "yellow", "failed": "red", "timeout": "red", "interrupted": "red"}
_STAGES = ("warm-up", "measuring", "reading memory", "tracing")
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Row:
    """A cell: its status, its figures as they are shown, and why it did not end well."""

    cell: Cell
    status: str
    figures: Sequence[str] = ()
    reason: str | None = None


class CellTable:
    """Lines for ``cells``, each told by its values of the options that tell them apart."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        points = [cell.overrides for cell in {tuple(cell.overrides.items()): cell for cell in cells}.values()]
        self._labels = labels_of(telling(points))
        self._repeats = len({cell.repeat for cell in cells}) > 1

    def lines(self, rows: Sequence[Row], titles: Sequence[str], width: int) -> Iterator[Text]:
        """The head with the ``titles`` of the figures, then a line for each row, and one below it for its reason."""
        options = [*self._labels.values(), *(["repeat"] if self._repeats else [])]
        table = [["status", *options, *titles]]
        table += [[row.status, *self._values(row.cell), *row.figures] for row in rows]
        table = [[printable(word, keep="") for word in words] for words in table]
        widths = _widths(table, len(options), width)
        yield Text(_line(table[0], widths, len(options)), "bold", no_wrap=True)
        for row, words in zip(rows, table[1:], strict=True):
            text = Text(_line(words, widths, len(options)), no_wrap=True)
            text.stylize(_STYLES.get(row.status, "bold"), 0, len(row.status))
            yield text
            if row.reason:
                yield Text(_cut("  " + printable(" ".join(row.reason.split()), keep=""), width), "dim", no_wrap=True)

    def _values(self, cell: Cell) -> list[str]:
        values = [cell.overrides.get(option, "") for option in self._labels]
        return [*values, *([str(cell.repeat)] if self._repeats else [])]


def _widths(table: Sequence[Sequence[str]], options: int, width: int) -> list[int]:
    """The width of each column: the widest option gives way first; where that is not enough, the last have none."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    swept = range(1, 1 + options)

    def excess() -> int:
        return sum(widths) + len(_GAP) * (sum(map(bool, widths)) - 1) - width

    while excess() > 0 and any(widths[at] > _LEAST for at in swept):
        widths[max(swept, key=widths.__getitem__)] -= 1
    for at in reversed(swept):
        if excess() > 0:
            widths[at] = 0
    return widths


def _line(words: Sequence[str], widths: Sequence[int], options: int) -> str:
    """Figures stand to the right of their columns."""
    cut = [(at > options, _cut(word, size), size) for at, (word, size) in enumerate(zip(words, widths, strict=True))]
    return _GAP.join(word.rjust(size) if right else word.ljust(size) for right, word, size in cut if size).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def stage_of(output: Path) -> str:
    """What a running cell does, from the last line about it in its output."""
    try:
        with output.open("rb") as file:
            file.seek(max(output.stat().st_size - _TAIL_BYTES, 0))
            said = file.read().decode(errors="replace").splitlines()
    except OSError:
        said = []
    stages = (stage for line in reversed(said) for stage in _STAGES if line.startswith(f"{stage}: "))
    return next(stages, "starting")

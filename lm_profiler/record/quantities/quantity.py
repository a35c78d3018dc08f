"""One measured quantity: what it is called, how it is shown, and where a run's record has it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lm_profiler.record.run import RunRecord

UNITS: dict[str, tuple[str, str, float, int]] = {
    "ms": ("s", "ms", 1e3, 3),
    "s": ("s", "s", 1.0, 2),
    "GiB": ("bytes", "GiB", 2.0**-30, 3),
    "bytes": ("bytes", "", 1.0, 0),
    "%": ("1", "%", 100.0, 1),
    "x": ("1", "x", 1.0, 2),
    "ppm": ("1", "ppm", 1e6, 1),
    "count": ("1", "", 1.0, 0),
    "number": ("1", "", 1.0, 3),
    "loss": ("1", "", 1.0, 6),
    "error": ("1", "%", 100.0, 4),
    "tokens/s": ("1/s", "tokens/s", 1.0, 0),
    "samples/s": ("1/s", "samples/s", 1.0, 1),
    "GFLOP": ("FLOP", "GFLOP", 1e-9, 3),
    "TFLOP/s": ("FLOP/s", "TFLOP/s", 1e-12, 3),
    "GB/s": ("bytes/s", "GB/s", 1e-9, 1),
    "MHz": ("Hz", "MHz", 1e-6, 0),
    "W": ("W", "W", 1.0, 1),
    "J": ("J", "J", 1.0, 4),
    "°C": ("°C", "°C", 1.0, 0),
    "text": ("text", "", 1.0, 0),
}
"""By how they are shown: as stored, as shown, the factor between them, and the most digits behind the point.

``bytes`` are shown each in the unit that fits. ``text`` is of no figure, but of what one needs beside it: a source, a
reason.
"""

_BINARY = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
_DECIMAL = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6))


class Place(IntEnum):
    """How early a figure is shown where there is no room for all."""

    HEADLINE = 1
    """Beside a run's name: at a sweep's end, and in the columns of the tab that stay in place."""
    TABLE = 2
    """In the usual table of runs, and among TensorBoard's HPARAMS."""
    FILE = 3
    """In files for programs."""
    ASKED = 4
    """By its name, and on the page of its run."""


@dataclass(frozen=True)
class Quantity:
    """One quantity, stored in SI under ``name`` and shown as ``value * scale`` in ``shown_unit``.

    Attributes:
        meaning: One line without a full stop.
        tag: TensorBoard's, of its value in each step; None where steps have none.
        path: Where its file has it; empty for what is computed of several values, or is of a step alone.
        get: Its value in a record, or in a row of its list, in SI; None where it is unknown.
        interval: Its (low, high) there, 95 %; None for a figure without one.
        run_tag: What TensorBoard's HPARAMS call a run's value.
        of: In ``name`` and ``meaning`` of a family, such as one for each phase, what its members differ in.
    """

    name: str
    title: str
    unit: str
    shown_unit: str
    scale: float
    digits: int
    meaning: str
    tag: str | None = None
    path: str = ""
    get: Callable[[Any], Any] = lambda record: None
    interval: Callable[[Any], tuple[float, float] | None] = lambda record: None
    place: Place = Place.FILE
    run_tag: str | None = None
    group: str = ""
    of: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is no figure, but what one needs beside it."""
        return self.unit == "text"

    @property
    def heading(self) -> str:
        """``step (ms)``; a title that has its unit stays as it is."""
        unit = self.shown_unit
        has = re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", self.title)
        return self.title if not unit or has else f"{self.title} ({unit})"

    def show(self, value: Any, unit: bool = True, digits: int | None = None) -> str:
        """``value`` (SI) for people; ``unknown`` for None. ``digits`` behind the point, if not the usual ones."""
        if value is None:
            return "unknown"
        if self.is_text:
            return value if isinstance(value, str) else ", ".join(map(str, value)) or "none"
        if self.unit == "bytes" and not self.shown_unit:
            return bytes_text(value)
        number = f"{value * self.scale:,.{self.digits if digits is None else digits}f}"
        return f"{number} {self.shown_unit}" if unit and self.shown_unit else number

    def rounded(self, value: float, low: float | None = None, high: float | None = None) -> str:
        """To four places that mean something, with its interval to as many behind the point; without its unit."""
        shown = abs(value * self.scale)
        places = 3 - math.floor(math.log10(shown)) if shown else self.digits
        digits = max(0, min(self.digits, places))
        text, *ends = (self.show(x, unit=False, digits=digits) for x in (value, low, high) if x is not None)
        return f"{text} [{', '.join(ends)}]" if len(ends) == 2 else text

    def fit(self, value: Any) -> str:
        """The same on its own, where no other value has to stand in the same unit."""
        if value is None or self.is_text:
            return self.show(value)
        if self.unit == "bytes":
            return bytes_text(value)
        if self.unit.startswith("FLOP"):
            return with_prefix(value, self.unit)
        if self.unit in ("J", "W"):
            return f"{value:,.4g} {self.shown_unit}"
        return self.show(value)


def at(path: str) -> Callable[[Any], Any]:
    """What a record has at ``path``; None where there is no such part."""
    keys = path.split(".") if path else []

    def get(record: Any) -> Any:
        for key in keys:
            record = record.get(key) if isinstance(record, dict) else getattr(record, key)
            if record is None:
                return None
        return record

    return get


def figure(path: str, title: str, unit: str, meaning: str, name: str = "", **more: Any) -> Quantity:
    """One that the record has at ``path``; called as there, unless ``name`` tells it from another."""
    return Quantity(name or path.rpartition(".")[2], title, *UNITS[unit], meaning, path=path, get=at(path), **more)


def figures_of(part: str, *rows: tuple[str, ...]) -> tuple[Quantity, ...]:
    """Those of one part of the record, each by its field there, title, unit and meaning, and perhaps a name."""
    return tuple(figure(f"{part}.{field}", *rest) for field, *rest in rows)


def computed(name: str, title: str, unit: str, meaning: str, get: Callable[[RunRecord], Any]) -> Quantity:
    """One that follows from several values of the record."""
    return Quantity(name, title, *UNITS[unit], meaning, get=get)


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Bytes with three figures, in the largest unit of which they are at least a half."""
    unit, size = next(((unit, size) for unit, size in _BINARY if abs(count) >= size / 2), ("B", 1.0))
    shown = count / size
    digits = 0 if size == 1 or abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else 2
    return f"{shown:,.{digits}f} {unit}"


def duration_text(seconds: float) -> str:
    """Figures that mean something, in the unit that fits: ``9.5 ms``, ``45.0 s``, ``9.5 min``, ``1.25 h``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 90.0:
        return f"{seconds:.1f} s"
    return f"{seconds / 60.0:.3g} min" if seconds < 5400.0 else f"{seconds / 3600.0:,.3g} h"


def with_prefix(value: float, unit: str) -> str:
    """``196 GFLOP/s``: three figures, and the prefix that fits."""
    prefix, size = next(((prefix, size) for prefix, size in _DECIMAL if value >= size), ("", 1.0))
    return f"{value / size:.3g} {prefix}{unit}"

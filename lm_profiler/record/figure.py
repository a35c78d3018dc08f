"""``Figure``: title, unit and meaning of a record's field, written beside it; reading and showing its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from pydantic import Field
from pydantic_core import PydanticUndefined

# Units by name: as stored, as shown, the factor between the two, and the most decimals. ``bytes`` are
# each shown in a fitting unit. ``text`` is not a figure but what a reader needs with one: a source, a reason.
UNITS: dict[str, tuple[str, str, float, int]] = {
    "ms": ("s", "ms", 1e3, 3),
    "s": ("s", "s", 1.0, 2),
    "GiB": ("bytes", "GiB", 2.0**-30, 3),
    "MiB": ("bytes", "MiB", 2.0**-20, 3),
    "KiB": ("bytes", "KiB", 2.0**-10, 3),
    "MB": ("bytes", "MB", 1e-6, 3),
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
    "GB/s of a link": ("bytes/s", "GB/s", 1e-9, 3),
    "MHz": ("Hz", "MHz", 1e-6, 0),
    "W": ("W", "W", 1.0, 1),
    "J": ("J", "J", 1.0, 4),
    "°C": ("°C", "°C", 1.0, 0),
    "text": ("text", "", 1.0, 0),
}

# stands where an interval would stand that would reach farther than the figure itself
TOO_FEW_STEPS = "too few steps"

# stands before a rate of a busy machine, and in the column ``<name>_bound`` of files for programs
AT_LEAST = "at least"

_BINARY = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
_DECIMAL = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6))


class Place(IntEnum):
    """How prominently a figure is shown; each place includes those before it."""

    HEADLINE = 1  # shown beside a run's name: at a sweep's end, and in the columns of the tab that stay in place
    TABLE = 2  # shown in the usual table of runs, and among TensorBoard's HPARAMS
    FILE = 3  # written to files for programs
    ASKED = 4  # shown when asked for by name, and on the page of its run


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure, stored in SI under ``name`` and shown as ``value * scale`` in ``shown_unit``.

    In the texts of a field with ``keys``, ``{key}`` stands for the key and ``{word}`` for its display name; in those of
    a part that a record has by phase, ``PHASE`` stands for the phase.
    """

    title: str
    kind: str  # one of ``UNITS``
    meaning: str  # one line without a full stop
    name: str = ""  # the name in the registry; empty if it equals the field's name, or the key
    _: KW_ONLY
    path: str = ""  # its place in its file, which the registry fills in; empty for a computed value
    compute: Callable[[Any], Any] | None = None  # reads it from a record, if its path is not enough
    # the keys of a mapping of numbers that are figures, perhaps each with its word
    keys: Iterable[str] | Mapping[str, str] = ()
    interval_ends: tuple[str, str] | None = None  # the neighbouring fields with the ends of its 95 % interval
    # whether it is a rate over the step's time; its interval is then that of the step, inverted
    goes_by_step: bool = False
    place: Place = Place.FILE
    tag: str | None = None  # the TensorBoard tag of its value in each step; None where steps have no such value
    run_tag: str | None = None  # the tag of a run's value among TensorBoard's HPARAMS
    group: str = ""  # the section that shows it, if not that of its part
    # the word in ``name`` and ``meaning`` that distinguishes the members of a family, such as the phase
    of: str | None = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Describe the field in the published ``schema``; pydantic calls this as ``json_schema_extra``."""
        # A meaning with a placeholder belongs to a part with several places, and fits none of them without its word.
        if "{" not in self.meaning:
            text = self.meaning.replace("PHASE", "the phase")
            schema.setdefault("description", text if self.unit in ("1", "text") else f"{text} ({self.unit})")

    # the four entries of its row in ``UNITS``: as stored, as shown, the factor between the two, decimals
    @property
    def unit(self) -> str:
        return UNITS[self.kind][0]

    @property
    def shown_unit(self) -> str:
        return UNITS[self.kind][1]

    @property
    def scale(self) -> float:
        return UNITS[self.kind][2]

    @property
    def digits(self) -> int:
        return UNITS[self.kind][3]

    @property
    def is_text(self) -> bool:
        """Whether it is a text about a figure, such as a source or a reason."""
        return self.kind == "text"

    @property
    def heading(self) -> str:
        """The title with its unit, ``step (ms)``; a title that already names the unit stays as it is."""
        unit = self.shown_unit
        has = re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", self.title)
        return self.title if not unit or has else f"{self.title} ({unit})"

    @cached_property
    def get(self) -> Callable[[Any], Any]:
        """A function that returns its value in a record, or in a row of its list, in SI; None where it is unknown."""
        return self.compute or at(self.path)

    @cached_property
    def _ends(self) -> list[Callable[[Any], Any]]:
        above = self.path.rpartition(".")[0]
        return [at(f"{above}.{end}".lstrip(".")) for end in self.interval_ends or ()]

    def interval(self, record: Any) -> tuple[float, float] | None:
        """Return its 95 % interval (low, high) in ``record``; None where it has none."""
        if not (self._ends or self.goes_by_step) or (value := self.get(record)) is None:
            return None
        if self.goes_by_step:
            step = record.time.get("step")
            ends = (None, None) if step is None or not step.mean else (step.mean_high, step.mean_low)
            return (value * step.mean / ends[0], value * step.mean / ends[1]) if all(ends) else None
        low, high = (end(record) for end in self._ends)
        return None if low is None or high is None else (low, high)

    def lacks_interval(self, record: Any) -> bool:
        """Return whether ``record`` has the figure without its interval, because its steps are too few or too unlike.

        Records of versions before 0.3 know no intervals of means: they lack none.
        """
        if self.get(record) is None or self.interval(record) is not None:
            return False
        if self.goes_by_step:
            step = record.time.get("step")
            return step is not None and "mean_low" in step.model_fields_set
        if not self.interval_ends:
            return False
        part = at(self.path.rpartition(".")[0])(record)
        return part is not None and self.interval_ends[0] in part.model_fields_set

    def show(self, value: Any, unit: bool = True, digits: int | None = None) -> str:
        """Return ``value`` (SI) for people, ``unknown`` for None; ``digits`` is the number of decimals."""
        if value is None:
            return "unknown"
        if self.is_text:
            return value if isinstance(value, str) else ", ".join(map(str, value)) or "none"
        if self.kind == "bytes":
            return bytes_text(value)
        number = f"{value * self.scale:,.{self.digits if digits is None else digits}f}"
        return f"{number} {self.shown_unit}" if unit and self.shown_unit else number

    def rounded(self, value: float, low: float | None = None, high: float | None = None) -> str:
        """Return ``value`` to four significant digits, its interval to as many decimals, without the unit."""
        shown = abs(value * self.scale)
        places = 3 - math.floor(math.log10(shown)) if shown else self.digits
        # For a small model, settings that differ by 1 % differ in the fifth digit of a GiB.
        most = 6 if self.kind == "GiB" and shown < 0.1 else self.digits
        digits = max(0, min(most, places))
        text, *ends = (self.show(x, unit=False, digits=digits) for x in (value, low, high) if x is not None)
        return f"{text} [{', '.join(ends)}]" if len(ends) == 2 else text

    def fit(self, value: Any) -> str:
        """Return ``value`` in the unit that fits it best, if no column needs the same unit in all rows."""
        if value is None or self.is_text:
            return self.show(value)
        if self.unit == "bytes":
            return bytes_text(value)
        if self.unit.startswith("FLOP"):
            return with_prefix(value, self.unit)
        return f"{value:,.4g} {self.shown_unit}" if self.unit in ("J", "W") else self.show(value)


@dataclass(frozen=True, kw_only=True)
class Within:
    """How the figures of a part are named and shown in the field that holds it, once or by key."""

    group: str = ""  # the section that shows them
    # the keys of a mapping of parts that are shown, perhaps each with its word
    keys: Iterable[str] | Mapping[str, str] = ()
    # a template; ``{name}``, ``{title}`` and ``{meaning}`` stand for the part's own, here and in the next two
    name: str = "{name}"
    title: str = "{title}"
    meaning: str = "{meaning}"
    place: Place | None = None  # replaces the part's own place
    # by field, the figure that replaces the part's own; None for no figure
    instead: Mapping[str, Figure | None] = field(default_factory=dict)

    def __call__(self, schema: dict[str, Any]) -> None:
        """Leave ``schema`` as it is: the part describes itself."""


def figure(title: str, unit: str, meaning: str, name: str = "", **more: Any) -> Any:
    """Return a field of a record that is a ``Figure``; its default is given as in pydantic's ``Field``."""
    defaults, ends = _default(more), more.pop("interval", None)
    return Field(**defaults, json_schema_extra=Figure(title, unit, meaning, name, interval_ends=ends, **more))


def within(**more: Any) -> Any:
    """Return a field of a record that holds a part, as ``Within`` says; its default is given as in pydantic's."""
    return Field(**_default(more), json_schema_extra=Within(**more))


def _default(more: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {key: more.pop(key) for key in ("default", "default_factory") if key in more}
    return given or {"default": PydanticUndefined}


def at(path: str) -> Callable[[Any], Any]:
    """Return a function that reads ``path`` from a record; None where a part on the way is missing."""
    keys = path.split(".") if path else []

    def get(record: Any) -> Any:
        for key in keys:
            record = record.get(key) if isinstance(record, dict) else getattr(record, key)
            if record is None:
                return None
        return record

    return get


def in_fitting_unit(quantity: Figure, values: Iterable[float]) -> Figure:
    """Return ``quantity`` in the largest unit in which the largest of ``values`` is 1 or more; only bytes change."""
    largest = max(values, default=0.0)
    if quantity.kind != "GiB" or largest >= 2**30:
        return quantity
    return replace(quantity, kind="MiB" if largest >= 2**20 else "KiB")


def counted(count: int, noun: str) -> str:
    """Return ``count`` and its noun: ``1 step``, ``2 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Return bytes with three significant digits, in the largest unit that gives at least 0.5."""
    unit, size = next(((unit, size) for unit, size in _BINARY if abs(count) >= size / 2), ("B", 1.0))
    shown = count / size
    # At 9.995 and 99.95, rounding adds a digit before the point.
    digits = 0 if size == 1 or abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else 2
    return f"{shown:,.{digits}f} {unit}"


def duration_text(seconds: float) -> str:
    """Return a time with three significant digits in the unit that fits: ``9.5 ms``, ``45.0 s``, ``1.25 h``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 90.0:
        return f"{seconds:.1f} s"
    return f"{seconds / 60.0:.3g} min" if seconds < 5400.0 else f"{seconds / 3600.0:,.3g} h"


def with_prefix(value: float, unit: str) -> str:
    """Return three significant digits and the prefix that fits: ``196 GFLOP/s``."""
    prefix, size = next(((prefix, size) for prefix, size in _DECIMAL if value >= size), ("", 1.0))
    return f"{value / size:.3g} {prefix}{unit}"


_MS = Figure("", "ms", "")


def digits_of(step_s: float) -> int:
    """Return how many decimals show this step in ms with four significant digits."""
    return len(_MS.rounded(step_s).partition(".")[2])


def ms_text(seconds: float, digits: int | None = None) -> str:
    """Return a time in ms without its unit; with ``digits`` decimals, or with four significant digits."""
    digits = digits_of(seconds) if digits is None else digits
    # Adding 0.0 turns -0.0 into 0.0: a value that rounds to 0 has no sign.
    return _MS.show(round(seconds, digits + 3) + 0.0, unit=False, digits=digits)


def is_zero_text(text: str) -> bool:
    """Return whether ``text``, a number, shows nothing but zeros."""
    return not text.strip("-0.,")


def share_text(share: float | None) -> str:
    """Return a share in per cent with one decimal; empty if it is unknown."""
    return "" if share is None else f"{share:.1%}"

"""``Figure``: title, unit and meaning of a record's field, written beside it; reading and showing its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import Field
from pydantic_core import PydanticUndefined


class Unit(NamedTuple):
    """How the values of a kind of figure are stored and shown."""

    stored: str
    shown: str
    scale: float  # the factor from the stored to the shown unit
    digits: int  # the largest number of decimals


# kind of figure → its unit. Bytes are shown in the unit that fits the value. ``text`` is no figure, but explains one: a
# source, a reason.
UNITS = {
    "ms": Unit("s", "ms", 1e3, 3),
    "s": Unit("s", "s", 1.0, 2),
    "GiB": Unit("bytes", "GiB", 2.0**-30, 3),
    "MiB": Unit("bytes", "MiB", 2.0**-20, 3),
    "KiB": Unit("bytes", "KiB", 2.0**-10, 3),
    "MB": Unit("bytes", "MB", 1e-6, 3),
    "bytes": Unit("bytes", "", 1.0, 0),
    "%": Unit("1", "%", 100.0, 1),
    "x": Unit("1", "x", 1.0, 2),
    "ppm": Unit("1", "ppm", 1e6, 1),
    "count": Unit("1", "", 1.0, 0),
    "number": Unit("1", "", 1.0, 3),
    "loss": Unit("1", "", 1.0, 6),
    "error": Unit("1", "%", 100.0, 4),
    "tokens/s": Unit("1/s", "tokens/s", 1.0, 0),
    "samples/s": Unit("1/s", "samples/s", 1.0, 1),
    "GFLOP": Unit("FLOP", "GFLOP", 1e-9, 3),
    "TFLOP/s": Unit("FLOP/s", "TFLOP/s", 1e-12, 3),
    "GB/s": Unit("bytes/s", "GB/s", 1e-9, 1),
    "GB/s of a link": Unit("bytes/s", "GB/s", 1e-9, 3),
    "MHz": Unit("Hz", "MHz", 1e-6, 0),
    "W": Unit("W", "W", 1.0, 1),
    "J": Unit("J", "J", 1.0, 4),
    "°C": Unit("°C", "°C", 1.0, 0),
    "text": Unit("text", "", 1.0, 0),
}

# shown instead of an interval whose end would be farther from the figure than zero is
TOO_FEW_STEPS = "too few steps"

# stands before a rate of a busy machine, and in the column ``<name>_bound`` of files for programs
AT_LEAST = "at least"

_BINARY_UNITS = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}
_DECIMAL_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6}


# keys of a mapping, perhaps each with its word
Keys = Iterable[str] | Mapping[str, str]


class Place(IntEnum):
    """How prominently a figure is shown; each place includes those before it."""

    HEADLINE = 1  # shown beside a run's name: at a sweep's end, and in the columns of the tab that stay in place
    TABLE = 2  # shown in the usual table of runs, and among TensorBoard's HPARAMS
    FILE = 3  # written to files for programs
    ASKED = 4  # shown when requested by name, and on the page of its run


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure, stored in SI under ``name`` and shown as ``value * scale`` in ``shown_unit``.

    In the texts of a field with ``keys``, ``{key}`` stands for the key and ``{word}`` for its display name; in those of
    a part that a record has by phase, ``PHASE`` stands for the phase.
    """

    title: str
    kind: str  # the kind of unit: one of ``UNITS``
    meaning: str  # one line without a full stop
    # the name in the registry; empty if it equals the field's name, or the key
    name: str = ""
    _: KW_ONLY
    path: str = ""  # its place in its file, which the registry fills in; empty for a computed value
    # reads it from a record, if its path is not enough
    compute: Callable[[Any], Any] | None = None
    # the keys of a mapping of numbers that are figures
    keys: Keys = ()
    # the neighbouring fields with the ends of its 95 % interval
    interval_ends: tuple[str, str] | None = None
    # whether it is a rate over the step's time; its interval is then that of the step, inverted
    goes_by_step: bool = False
    place: Place = Place.FILE
    # the TensorBoard tag of its value in each step; None if steps have no such value
    tag: str | None = None
    run_tag: str | None = None  # the tag of a run's value among TensorBoard's HPARAMS
    group: str = ""  # the section that shows it, if not that of its part
    # for one of several figures with the same description: the word in which ``name`` and ``meaning`` differ, such as
    # the phase
    member: str | None = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Describe the field in the published ``schema``; pydantic calls this as ``json_schema_extra``."""
        # A meaning with a placeholder belongs to a part with several places, and fits none of them without its word.
        if "{" in self.meaning:
            return
        text = self.meaning.replace("PHASE", "the phase")
        if self.unit not in ("1", "text"):
            text += f" ({self.unit})"
        schema.setdefault("description", text)

    @property
    def unit(self) -> str:
        """The unit of stored values."""
        return UNITS[self.kind].stored

    @property
    def shown_unit(self) -> str:
        return UNITS[self.kind].shown

    @property
    def scale(self) -> float:
        return UNITS[self.kind].scale

    @property
    def digits(self) -> int:
        return UNITS[self.kind].digits

    @property
    def is_text(self) -> bool:
        """Whether this figure is a text, such as a source or a reason."""
        return self.kind == "text"

    @property
    def heading(self) -> str:
        """The title with its unit, ``step (ms)``; a title that already names the unit stays as it is."""
        unit = self.shown_unit
        title_names_unit = re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", self.title)
        if not unit or title_names_unit:
            return self.title
        return f"{self.title} ({unit})"

    # -- values --------------------------------------------------------------------------------------------------------

    @cached_property
    def get(self) -> Callable[[Any], Any]:
        """A function that returns its value in a record, or in a row of its list, in SI; None if it is unknown."""
        return self.compute or getter(self.path)

    def interval(self, record: Any) -> tuple[float, float] | None:
        """Return the figure's 95 % interval (low, high) in ``record``; None if it has none."""
        if self.goes_by_step:
            return _interval_by_step(self.get(record), record)
        if self._end_getters is None or self.get(record) is None:
            return None
        get_low, get_high = self._end_getters
        low, high = get_low(record), get_high(record)
        if low is None or high is None:
            return None
        return low, high

    @cached_property
    def _end_getters(self) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
        """Functions that return the two ends of this figure's interval in a record."""
        if self.interval_ends is None:
            return None
        low_name, high_name = self.interval_ends
        parent = self.path.rpartition(".")[0]
        if not parent:
            return getter(low_name), getter(high_name)
        return getter(f"{parent}.{low_name}"), getter(f"{parent}.{high_name}")

    def lacks_interval(self, record: Any) -> bool:
        """Return whether ``record`` has the figure without its interval, because its steps are too few or too unlike.

        Records of versions before 0.3 have no intervals of means, and none is missed there.
        """
        if self.get(record) is None or self.interval(record) is not None:
            return False
        if self.goes_by_step:
            step = record.time.get("step")
            return step is not None and "mean_low" in step.model_fields_set
        if not self.interval_ends:
            return False
        parent_path = self.path.rpartition(".")[0]
        part = getter(parent_path)(record)
        return part is not None and self.interval_ends[0] in part.model_fields_set

    # -- texts ---------------------------------------------------------------------------------------------------------

    def show(self, value: Any, unit: bool = True, digits: int | None = None) -> str:
        """Return ``value`` (SI) for people, ``unknown`` for None; ``digits`` is the number of decimals."""
        if value is None:
            return "unknown"
        if self.is_text:
            return _text_or_list(value)
        if self.kind == "bytes":
            return bytes_text(value)
        decimals = self.digits if digits is None else digits
        number = f"{value * self.scale:,.{decimals}f}"
        if unit and self.shown_unit:
            return f"{number} {self.shown_unit}"
        return number

    def rounded(
        self, value: float, low: float | None = None, high: float | None = None
    ) -> str:
        """Return ``value`` to four significant digits, its interval to as many decimals, without the unit."""
        digits = self._digits_for(value)
        text = self.show(value, unit=False, digits=digits)
        if low is None or high is None:
            return text
        low_text = self.show(low, unit=False, digits=digits)
        high_text = self.show(high, unit=False, digits=digits)
        return f"{text} [{low_text}, {high_text}]"

    def _digits_for(self, value: float) -> int:
        """Return how many decimals show ``value`` with four significant digits, within the most decimals."""
        shown = abs(value * self.scale)
        if shown == 0:
            return self.digits
        decimals = 3 - math.floor(math.log10(shown))
        most_decimals = self.digits
        if self.kind == "GiB" and shown < 0.1:
            most_decimals = 6  # for a small model, settings that differ by 1 % differ in the fifth digit of a GiB
        return max(0, min(most_decimals, decimals))

    def fit(self, value: Any) -> str:
        """Return ``value`` in the unit that fits it best, if no column needs the same unit in all rows."""
        if value is None or self.is_text:
            return self.show(value)
        if self.unit == "bytes":
            return bytes_text(value)
        if self.unit.startswith("FLOP"):
            return with_prefix(value, self.unit)
        if self.unit in ("J", "W"):
            return f"{value:,.4g} {self.shown_unit}"
        return self.show(value)


def _interval_by_step(rate: float | None, record: Any) -> tuple[float, float] | None:
    """Return the interval of a rate over the step's time: that of the step, inverted."""
    step = record.time.get("step")
    if (
        rate is None
        or step is None
        or not step.mean
        or not step.mean_low
        or not step.mean_high
    ):
        return None
    return rate * step.mean / step.mean_high, rate * step.mean / step.mean_low


def _text_or_list(value: Any) -> str:
    if isinstance(value, str):
        return value
    return ", ".join(str(word) for word in value) or "none"


@dataclass(frozen=True, kw_only=True)
class Within:
    """How the figures of a part are named and shown in the field that holds it, once or by key."""

    group: str = ""  # the section that shows them
    # the keys of a mapping of parts that are shown
    keys: Keys = ()
    # a template; ``{name}``, ``{title}`` and ``{meaning}`` stand for the part's own, here and in the next two
    name: str = "{name}"
    title: str = "{title}"
    meaning: str = "{meaning}"
    place: Place | None = None  # replaces the part's own place
    # by field, the figure that replaces the part's own; None for no figure
    instead: Mapping[str, Figure | None] = field(default_factory=dict)

    def __call__(self, schema: dict[str, Any]) -> None:
        """Leave ``schema`` as it is: the part describes itself."""


def figure(title: str, unit: str, meaning: str, name: str = "", **options: Any) -> Any:
    """Return a field of a record that is a ``Figure``; its default is given as in pydantic's ``Field``.

    ``options`` are further fields of the figure; ``interval`` stands for its ``interval_ends``.
    """
    default = _take_default(options)
    interval_ends = options.pop("interval", None)
    return Field(
        **default,
        json_schema_extra=Figure(
            title, unit, meaning, name, interval_ends=interval_ends, **options
        ),
    )


def within(**options: Any) -> Any:
    """Return a field of a record that holds a part, as ``Within`` describes; its default is passed as to pydantic's."""
    default = _take_default(options)
    return Field(**default, json_schema_extra=Within(**options))


def _take_default(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the default from ``options`` and return it for pydantic's ``Field``; without one a field is required."""
    for name in ("default", "default_factory"):
        if name in options:
            return {name: options.pop(name)}
    return {"default": PydanticUndefined}


def getter(path: str) -> Callable[[Any], Any]:
    """Return a function that reads ``path`` from a record; None if a part on the way is missing."""
    names = path.split(".") if path else []

    def get(record: Any) -> Any:
        value = record
        for name in names:
            value = value.get(name) if isinstance(value, dict) else getattr(value, name)
            if value is None:
                return None
        return value

    return get


def in_fitting_unit(quantity: Figure, values: Iterable[float]) -> Figure:
    """Return ``quantity`` in the largest unit in which the largest of ``values`` is 1 or more; only bytes change."""
    largest = max(values, default=0.0)
    if quantity.kind != "GiB" or largest >= 2**30:
        return quantity
    if largest >= 2**20:
        return replace(quantity, kind="MiB")
    return replace(quantity, kind="KiB")


# -- values without a figure -------------------------------------------------------------------------------------------


def count_text(count: int, noun: str) -> str:
    """Return ``count`` and its noun: ``1 step``, ``2 steps``."""
    if count == 1:
        return f"{count:,} {noun}"
    return f"{count:,} {noun}s"


def bytes_text(count: float) -> str:
    """Return bytes with three significant digits, in the largest unit that gives at least 0.5."""
    unit, size = byte_unit(count)
    if unit == "B":
        return f"{count:,.0f} B"
    shown = count / size
    return f"{shown:,.{_decimals(shown)}f} {unit}"


def byte_unit(count: float) -> tuple[str, float]:
    """Return the largest unit in which ``count`` bytes are at least 0.5, and how many bytes the unit has."""
    for unit, size in _BINARY_UNITS.items():
        if abs(count) >= size / 2:
            return unit, size
    return "B", 1.0


def _decimals(shown: float) -> int:
    """Return how many decimals show a number with three significant digits (below 1 with two decimals)."""
    # At 9.995 and 99.95, rounding adds a digit before the point.
    if abs(shown) >= 99.95:
        return 0
    if abs(shown) >= 9.995:
        return 1
    return 2


def duration_text(seconds: float) -> str:
    """Return a time with three significant digits in the unit that fits: ``9.5 ms``, ``45.0 s``, ``1.25 h``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 90.0:
        return f"{seconds:.1f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.3g} min"
    return f"{seconds / 3600.0:,.3g} h"


def with_prefix(value: float, unit: str) -> str:
    """Return three significant digits and the prefix that fits: ``196 GFLOP/s``."""
    for prefix, size in _DECIMAL_PREFIXES.items():
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


_MS = Figure("", "ms", "")


def digits_of(step_s: float) -> int:
    """Return how many decimals show this step in ms with four significant digits."""
    decimals = _MS.rounded(step_s).partition(".")[2]
    return len(decimals)


def ms_text(seconds: float, digits: int | None = None) -> str:
    """Return a time in ms without its unit; with ``digits`` decimals, or with four significant digits."""
    if digits is None:
        digits = digits_of(seconds)
    # Adding 0.0 turns -0.0 into 0.0: a value that rounds to 0 has no sign.
    rounded_s = round(seconds, digits + 3) + 0.0
    return _MS.show(rounded_s, unit=False, digits=digits)


def is_zero_text(text: str) -> bool:
    """Return whether ``text``, a number, shows nothing but zeros."""
    return not text.strip("-0.,")


def share_text(share: float | None) -> str:
    """Return a share in per cent with one decimal; empty if it is unknown."""
    if share is None:
        return ""
    return f"{share:.1%}"

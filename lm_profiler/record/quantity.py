"""``Quantity``, one measured quantity and how it is shown; all of them are read from the fields of a record's type."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from lm_profiler.record.figure import UNITS, Figure, Place, Within, bytes_text, with_prefix
from lm_profiler.record.run import Part


@dataclass(frozen=True)
class Quantity:
    """One quantity, stored in SI under ``name`` and shown as ``value * scale`` in ``shown_unit``."""

    name: str
    title: str
    unit: str
    shown_unit: str
    scale: float
    digits: int
    meaning: str  # one line without a full stop
    tag: str | None = None  # the TensorBoard tag of its value in each step; None where steps have no such value
    path: str = ""  # its place in its file; empty for a computed value, or one that only steps have
    # returns its value in a record, or in a row of its list, in SI; None where it is unknown
    get: Callable[[Any], Any] = lambda record: None
    # returns its 95 % interval (low, high) there; None for a figure without one
    interval: Callable[[Any], tuple[float, float] | None] = lambda record: None
    place: Place = Place.FILE
    run_tag: str | None = None  # the tag of a run's value among TensorBoard's HPARAMS
    group: str = ""
    # the word in ``name`` and ``meaning`` that tells the members of a family apart, such as the phase
    of: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is a text beside a figure, such as a source or a reason."""
        return self.unit == "text"

    @property
    def heading(self) -> str:
        """The title with its unit, ``step (ms)``; a title that already names the unit stays as it is."""
        unit = self.shown_unit
        has = re.search(rf"(?<!\w){re.escape(unit)}(?!\w)", self.title)
        return self.title if not unit or has else f"{self.title} ({unit})"

    def show(self, value: Any, unit: bool = True, digits: int | None = None) -> str:
        """Return ``value`` (SI) for people, ``unknown`` for None; ``digits`` are behind the point."""
        if value is None:
            return "unknown"
        if self.is_text:
            return value if isinstance(value, str) else ", ".join(map(str, value)) or "none"
        if self.unit == "bytes" and not self.shown_unit:
            return bytes_text(value)
        number = f"{value * self.scale:,.{self.digits if digits is None else digits}f}"
        return f"{number} {self.shown_unit}" if unit and self.shown_unit else number

    def rounded(self, value: float, low: float | None = None, high: float | None = None) -> str:
        """Return ``value`` to four significant digits, its interval to as many behind the point, without the unit."""
        shown = abs(value * self.scale)
        places = 3 - math.floor(math.log10(shown)) if shown else self.digits
        # Of a small model, settings that differ in a per cent differ in the fifth digit of a GiB.
        most = 6 if self.unit == "bytes" and self.shown_unit and shown < 0.1 else self.digits
        digits = max(0, min(most, places))
        text, *ends = (self.show(x, unit=False, digits=digits) for x in (value, low, high) if x is not None)
        return f"{text} [{', '.join(ends)}]" if len(ends) == 2 else text

    def fit(self, value: Any) -> str:
        """Return ``value`` in the unit that fits it best, where no column asks for the same unit in all rows."""
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
    """Return a function that reads ``path`` from a record; None where a part on the way is missing."""
    keys = path.split(".") if path else []

    def get(record: Any) -> Any:
        for key in keys:
            record = record.get(key) if isinstance(record, dict) else getattr(record, key)
            if record is None:
                return None
        return record

    return get


def between(low: Callable[[Any], Any], high: Callable[[Any], Any]) -> Callable[[Any], tuple[float, float] | None]:
    """Return a function that reads the interval with these ends; None where one of them is unknown."""

    def interval(record: Any) -> tuple[float, float] | None:
        ends = low(record), high(record)
        return None if None in ends else ends

    return interval


def column(path: str, title: str, unit: str, meaning: str, name: str = "", **more: Any) -> Quantity:
    """Return the quantity at ``path``, named like the field unless ``name`` tells it from another."""
    return Quantity(name or path.rpartition(".")[2], title, *UNITS[unit], meaning, path=path, get=at(path), **more)


class FigureAt(NamedTuple):
    """A figure and its path in the objects of a type; ``key`` is the key of the mapping on the way.

    Properties are not stored: files do not have them.
    """

    path: str
    figure: Figure
    is_stored: bool = True
    key: str | None = None

    @property
    def quantity(self) -> Quantity:
        """The figure as the registry has it."""
        told, (above, _, _) = self.figure, self.path.rpartition(".")
        own: dict[str, Any] = {
            "tag": told.tag,
            "run_tag": told.run_tag,
            "place": told.place,
            "group": told.group,
            "of": self.key if told.place is Place.ASKED else None,
        }
        if told.interval is not None:
            low, high = (at(f"{above}.{end}".lstrip(".")) for end in told.interval)
            own["interval"] = between(low, high)
        stored = column(self.path, told.title, told.unit, told.meaning, told.name, **own)
        return stored if self.is_stored else replace(stored, path="")


def figures_in(form: type[Part]) -> Iterator[FigureAt]:
    """Yield the figures that an object of the type has once: its fields', those of parts within it, its properties'."""
    for name, field in form.model_fields.items():
        told, kind = field.json_schema_extra, _bare(field.annotation)
        if isinstance(told, Figure) and told.keys:
            yield from (_keyed(FigureAt(f"{name}.{key}", told, key=key), key, word) for key, word in _words(told.keys))
        elif isinstance(told, Figure) and not _is_column(kind):
            yield FigureAt(name, _named(told, name))
        elif isinstance(told, Within) or _is_part(kind):
            yield from _figures_within(name, told if isinstance(told, Within) else Within(), kind)
    for name, member in vars(form).items():
        returned = getattr(member.fget, "__annotations__", {}).get("return", "") if isinstance(member, property) else ""
        # Annotations are text here, and only those of figures are worth evaluating.
        if str(returned).startswith("Annotated"):
            told = get_type_hints(member.fget, include_extras=True)["return"].__metadata__[0]
            yield FigureAt(name, _named(told, name), is_stored=False)


def _named(figure: Figure, field: str) -> Figure:
    return figure if figure.name else replace(figure, name=field)


def _figures_within(name: str, told: Within, kind: Any) -> Iterator[FigureAt]:
    by_key = get_origin(kind) is dict
    for inner in figures_in(get_args(kind)[1] if by_key else kind):
        if inner.path in told.instead:
            continue
        if by_key:
            for key, word in _words(told.keys):
                figure = _retold(inner.figure, told, key, word)
                yield FigureAt(f"{name}.{key}.{inner.path}", figure, inner.is_stored, key)
        else:
            yield FigureAt(f"{name}.{inner.path}", _retold(inner.figure, told), inner.is_stored, inner.key)
    for field, other in told.instead.items():
        if other is not None:
            yield FigureAt(f"{name}.{field}", replace(other, group=other.group or told.group))


def _retold(figure: Figure, told: Within, key: str = "", word: str = "") -> Figure:
    own = {"name": figure.name, "title": figure.title, "meaning": figure.meaning, "key": key, "word": word}
    return replace(
        figure,
        name=told.name.format(**own),
        title=told.title.format(**own),
        meaning=told.meaning.format(**own).replace("PHASE", key),
        place=told.place or figure.place,
        group=figure.group or told.group,
        tag=None if key else figure.tag,
        run_tag=None if key else figure.run_tag,
    )


def _keyed(one: FigureAt, key: str, word: str) -> FigureAt:
    told = one.figure
    texts = {name: getattr(told, name).format(key=key, word=word) for name in ("name", "title", "meaning")}
    return one._replace(figure=replace(told, **texts | {"name": texts["name"] or key}))


def rows_in(form: type[Part], before: str = "") -> Iterator[tuple[str, tuple[Quantity, ...]]]:
    """Yield the path and the columns of each list in the type whose rows have figures; ``[]`` stands for each item."""
    for name, field in form.model_fields.items():
        told, kind = field.json_schema_extra, _bare(field.annotation)
        inner = _bare(get_args(kind)[0]) if get_origin(kind) is list else None
        if isinstance(told, Figure) and _is_column(kind):
            yield before + name, (replace(FigureAt("", told).quantity, name=told.name or name, group=""),)
        elif _is_part(inner):
            if row := tuple(one.quantity for one in figures_in(inner)):
                yield before + name, row
            yield from rows_in(inner, f"{before}{name}[].")
        elif _is_part(kind):
            yield from rows_in(kind, f"{before}{name}.")


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _bare(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation


def _is_part(kind: Any) -> TypeGuard[type[Part]]:
    return isinstance(kind, type) and issubclass(kind, Part)


def _is_column(kind: Any) -> bool:
    return get_origin(kind) is list and _bare(get_args(kind)[0]) in (int, float)


def _words(keys: Any) -> list[tuple[str, str]]:
    return list(keys.items()) if isinstance(keys, Mapping) else [(key, key) for key in keys]

"""The figures of a type of record, read from its fields: their names and places, also of parts within parts.

A field is a ``Figure``, or holds a part; ``Within`` states how the figures of that part are named and shown there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import UnionType
from typing import (
    Annotated,
    Any,
    TypeGuard,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from lm_profiler.record.figure import Figure, Keys, Place, Within, getter
from lm_profiler.record.files import Part

# -- figures that an object has once -----------------------------------------------------------------------------------


def figures_in(form: type[Part]) -> Iterator[Figure]:
    """Yield the figures that an object of the type has once: of its fields, of parts within it, of its properties."""
    for name, field in form.model_fields.items():
        yield from _figures_of_field(
            name, field.json_schema_extra, _bare_type(field.annotation)
        )
    for name, member in vars(form).items():
        figure = _figure_of_property(member)
        if figure is not None:
            yield replace(figure, name=figure.name or name, compute=getter(name))


def _figures_of_field(name: str, description: Any, kind: Any) -> Iterator[Figure]:
    """Yield the figures of the field ``name``, which has a ``description`` and values of a ``kind``."""
    if isinstance(description, Figure):
        if description.keys:
            for key, word in _words_by_key(description.keys).items():
                yield _figure_of_key(name, description, key, word)
        elif not _is_column(kind):
            yield replace(description, name=description.name or name, path=name)
    elif isinstance(description, Within):
        yield from _figures_of_part(name, description, kind)
    elif _is_part(kind):
        yield from _figures_of_part(name, Within(), kind)


def _figure_of_key(field_name: str, figure: Figure, key: str, word: str) -> Figure:
    """Return the description of one entry of the field ``field_name``, which maps keys to numbers."""
    return replace(
        figure,
        name=figure.name.format(key=key) or key,
        title=figure.title.format(key=key, word=word),
        meaning=figure.meaning.format(key=key, word=word),
        path=f"{field_name}.{key}",
        member=key if figure.place is Place.ASKED else None,
    )


def _figure_of_property(member: Any) -> Figure | None:
    """Return the figure in the annotation of a property: ``-> Annotated[int | None, PEAK]``; None if there is none."""
    if not isinstance(member, property):
        return None
    annotation = getattr(member.fget, "__annotations__", {}).get("return", "")
    # Annotations are text here, and only those of figures need evaluating.
    if not str(annotation).startswith("Annotated"):
        return None
    hints = get_type_hints(member.fget, include_extras=True)
    figure: Figure = hints["return"].__metadata__[0]
    return figure


# -- figures of a part -------------------------------------------------------------------------------------------------


def _figures_of_part(name: str, within: Within, kind: Any) -> Iterator[Figure]:
    """Yield the figures of the part in the field ``name``, or of each part in a mapping of parts.

    ``kind`` is the type of the field: a class of parts, or a dict with parts as its values.
    """
    # path of a part → its key in the mapping, and the word that texts use for the key
    paths = {name: ("", "")}
    part_kind = kind
    is_mapping = get_origin(kind) is dict
    if is_mapping:
        part_kind = get_args(kind)[1]
        paths = {}
        for key, word in _words_by_key(within.keys).items():
            paths[f"{name}.{key}"] = (key, word)
    for figure in figures_in(part_kind):
        is_replaced = figure.path in within.instead and figure.compute is None
        if is_replaced:
            continue
        for path, (key, word) in paths.items():
            yield _figure_within(figure, within, path, key, word)
    for field_name, replacement in within.instead.items():
        if replacement is not None:
            group = replacement.group or within.group
            yield replace(replacement, path=f"{name}.{field_name}", group=group)


def _figure_within(
    figure: Figure, within: Within, path: str, key: str, word: str
) -> Figure:
    """Return ``figure``, which is one of a part, as a figure of the record that has the part at ``path``.

    In a mapping of parts, ``key`` is the part's key and ``word`` the name that texts use for it; else both are empty.
    ``within`` has the patterns of the figure's name, title and meaning.
    """
    texts = {
        "name": figure.name,
        "title": figure.title,
        "meaning": figure.meaning,
        "key": key,
        "word": word,
    }
    changed = replace(
        figure,
        name=within.name.format(**texts),
        title=within.title.format(**texts),
        meaning=within.meaning.format(**texts).replace("PHASE", key),
        path=f"{path}.{figure.path}" if figure.path else "",
        compute=_computed_from_part(figure.compute, path),
        place=within.place or figure.place,
        group=figure.group or within.group,
    )
    if not key:
        return changed
    member = key if changed.place is Place.ASKED else None
    return replace(changed, member=member, tag=None, run_tag=None)


def _computed_from_part(
    compute: Callable[[Any], Any] | None, path: str
) -> Callable[[Any], Any] | None:
    """Return ``compute``, which takes a part, as a function of the record that has the part at ``path``."""
    if compute is None:
        return None
    get_part = getter(path)

    def compute_from_record(record: Any) -> Any:
        part = get_part(record)
        return None if part is None else compute(part)

    return compute_from_record


# -- lists whose rows have figures -------------------------------------------------------------------------------------


def rows_in(
    form: type[Part], parent: str = ""
) -> Iterator[tuple[str, tuple[Figure, ...]]]:
    """Yield the path and the columns of each table in the type: of each list whose items are or hold figures.

    There are two kinds of tables: a list of numbers, which is a single column, and a list of parts, with a column for
    each figure of the part. A list within the items of another one has ``[]`` in its path: ``waterfall.terms`` is a
    table, and ``waterfall.terms[].contributors`` another. ``parent`` precedes the paths of this type's fields.
    """
    for name, field in form.model_fields.items():
        description = field.json_schema_extra
        kind = _bare_type(field.annotation)
        item_kind = _item_type(kind)
        if isinstance(description, Figure) and _is_column(kind):
            yield parent + name, (replace(description, name=description.name or name),)
        elif _is_part(item_kind):
            columns = tuple(figures_in(item_kind))
            if columns:
                yield parent + name, columns
            yield from rows_in(item_kind, f"{parent}{name}[].")
        elif _is_part(kind):
            yield from rows_in(kind, f"{parent}{name}.")


# -- types -------------------------------------------------------------------------------------------------------------


def _bare_type(annotation: Any) -> Any:
    """Return the type without ``Annotated`` and ``| None``."""
    if get_origin(annotation) is Annotated:
        return _bare_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _bare_type(kinds[0])
    return annotation


def _item_type(kind: Any) -> Any:
    """Return the type of a list's items; None if ``kind`` is no list."""
    if get_origin(kind) is not list:
        return None
    return _bare_type(get_args(kind)[0])


def _is_part(kind: Any) -> TypeGuard[type[Part]]:
    # In Python 3.10 isinstance(list[int], type) is true, and issubclass(list[int], Part) raises.
    return (
        isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Part)
    )


def _is_column(kind: Any) -> bool:
    """Return whether ``kind`` is a list of numbers, which is a table of its own; a list of words is one line."""
    return _item_type(kind) in (int, float)


def _words_by_key(keys: Keys) -> dict[str, str]:
    """Return the word for each key: the key itself if none is given."""
    if isinstance(keys, Mapping):
        return dict(keys)
    return {key: key for key in keys}

"""Compares batches by their contents and shapes, so that only one batch of each kind has to be searched."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor

_MOST_ENTRIES = 64  # a longer list holds entries of one kind

# classes whose instances contain no tensors; nearly all entries of batches have one of them
_LEAVES = frozenset({Tensor, int, float, bool, str, bytes, type(None)})


def kind_of(part: Any) -> Any:
    """Return a key, never None, that is equal for batches with entries of the same classes and names.

    It runs for every batch, so it compares the entries of a usual batch with built-in functions, without a Python frame
    for each entry.
    """
    part_class = type(part)
    if part_class in _LEAVES:
        return part_class
    names: tuple[Any, ...] = ()
    if isinstance(part, (list, tuple)):
        if len(part) > _MOST_ENTRIES:
            return part_class
        values = tuple(part)
    elif isinstance(part, (dict, Mapping)):
        # dict is checked first, because checking for a Mapping takes a Python frame
        names = tuple(part)
        values = tuple(part.values())
    else:
        return part_class
    classes = tuple(map(type, values))
    if _LEAVES.issuperset(classes):
        return part_class, names, classes
    return part_class, names, tuple(map(kind_of, values))


get_shape = attrgetter("shape")


def layout_of(batch: Any) -> Any:
    """Return a key that is equal for batches of one kind whose tensors have equal shapes.

    None unless the batch is a tensor, or a list, a tuple or a mapping of tensors. It uses only built-in functions.
    """
    batch_class = type(batch)
    try:
        if isinstance(batch, Tensor):
            return batch_class, batch.shape
        if isinstance(batch, (list, tuple)):
            return (batch_class, *map(get_shape, batch))
        if isinstance(batch, (dict, Mapping)):
            return (batch_class, *batch, *map(get_shape, batch.values()))
    except AttributeError:  # something in it has no shape
        pass
    return None

"""Finds the memory of one block of a module that repeats blocks: what it saves for backward, and its gradients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lm_profiler.record.memory_timeline import Allocation, BlockMemory

LARGEST = 5  # how many saved tensors of a block are listed

# matches the path of a module in a list, such as ``model.blocks.3`` or ``model.blocks.3.norm``
_LAYER = re.compile(r"(?P<parent>(?:[A-Za-z_]\w*\.)*)(?P<position>\d+)(?:\.|\Z)")
_GRADIENT = "gradient of "


class _Layer(NamedTuple):
    """A position in a list of modules."""

    parent: str  # the path of the list, which ends with a dot
    position: int


def block_memory(
    saved: Sequence[Allocation], gradients: Iterable[Allocation]
) -> BlockMemory | None:
    """Return the memory of the middle block; None if no module is one of several in a list.

    ``saved`` is what autograd saved, with the modules that made it; ``gradients`` have the names of their parameters.
    """
    saved_by_layer: dict[_Layer, list[Allocation]] = {}
    for allocation in saved:
        layer = _layer_of(allocation.module or "")
        if layer is not None:
            saved_by_layer.setdefault(layer, []).append(allocation)
    parent = _largest_parent(saved_by_layer)
    if parent is None:
        return None
    positions = sorted(
        layer.position for layer in saved_by_layer if layer.parent == parent
    )
    if len(positions) < 2:
        return None
    # A middle one, because the first and the last may differ: they share inputs or results with other modules.
    middle = _Layer(parent, positions[len(positions) // 2])
    saved_of_block = saved_by_layer[middle]
    # by name, because a gradient may be freed and made again
    gradients_of_block: dict[str, int] = {}
    for allocation in gradients:
        name = (allocation.name or "").removeprefix(_GRADIENT)
        if _layer_of(name) == middle:
            gradients_of_block[name] = allocation.bytes
    return BlockMemory(
        module=f"{parent}*",
        count=len(positions),
        saved_bytes=sum(allocation.bytes for allocation in saved_of_block),
        saved=_merged_allocations(saved_of_block)[:LARGEST],
        gradients_bytes=sum(gradients_of_block.values()),
    )


def _layer_of(path: str) -> _Layer | None:
    """Return the position of a module, given by its ``path``, in the outermost list; None if it is not in a list.

    For example ``model.blocks.3.norm`` is at position 3 of ``model.blocks.``.
    """
    match = _LAYER.match(path)
    if match is None:
        return None
    return _Layer(match["parent"], int(match["position"]))


def _largest_parent(saved_by_layer: dict[_Layer, list[Allocation]]) -> str | None:
    """Return the list of modules whose blocks save the most bytes."""
    bytes_by_parent: defaultdict[str, int] = defaultdict(int)
    for layer, allocations in saved_by_layer.items():
        for allocation in allocations:
            bytes_by_parent[layer.parent] += allocation.bytes
    return max(bytes_by_parent, key=bytes_by_parent.__getitem__, default=None)


def _merged_allocations(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Return one row for each group of equal allocations, with their count; the most bytes first."""
    # by the text of an allocation, which cannot be hashed
    groups: dict[str, list[Allocation]] = {}
    for allocation in allocations:
        groups.setdefault(repr(allocation), []).append(allocation)
    rows = []
    for group in groups.values():
        rows.append(group[0].model_copy(update={"count": len(group)}))
    return sorted(rows, key=lambda row: row.bytes * row.count, reverse=True)

"""The memory of one block of a module that repeats blocks: what it saves for backward, and its gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lm_profiler.record.memory_timeline import Allocation, BlockMemory

LARGEST = 5  # saved tensors of a block that are kept

_LAYER = re.compile(r"(?P<parent>(?:[A-Za-z_]\w*\.)*)(?P<position>\d+)(?:\.|\Z)")
_GRADIENT = "gradient of "


class _Layer(NamedTuple):
    """The list of modules that a module is in, and its position in it."""

    parent: str
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
    # The first and the last block may differ: their inputs or results are also of their neighbours.
    middle = _Layer(parent, positions[len(positions) // 2])
    saved_of_block = saved_by_layer[middle]
    # by name: a gradient may be freed and made again
    gradients_of_block: dict[str, int] = {}
    for allocation in gradients:
        name = (allocation.name or "").removeprefix(_GRADIENT)
        if _layer_of(name) == middle:
            gradients_of_block[name] = allocation.bytes
    return BlockMemory(
        module=f"{parent}*",
        count=len(positions),
        saved_bytes=sum(allocation.bytes for allocation in saved_of_block),
        saved=_grouped(saved_of_block)[:LARGEST],
        gradients_bytes=sum(gradients_of_block.values()),
    )


def _layer_of(path: str) -> _Layer | None:
    """Return the outermost list that the module or parameter at ``path`` is in, such as ``model.blocks.`` and 3."""
    match = _LAYER.match(path)
    if match is None:
        return None
    return _Layer(match["parent"], int(match["position"]))


def _largest_parent(saved_by_layer: dict[_Layer, list[Allocation]]) -> str | None:
    """Return the list of modules whose blocks save the most bytes."""
    bytes_by_parent: dict[str, int] = {}
    for layer, allocations in saved_by_layer.items():
        saved_bytes = sum(allocation.bytes for allocation in allocations)
        bytes_by_parent[layer.parent] = (
            bytes_by_parent.get(layer.parent, 0) + saved_bytes
        )
    if not bytes_by_parent:
        return None
    return max(bytes_by_parent, key=lambda parent: bytes_by_parent[parent])


def _grouped(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Return equal allocations as one, the most bytes first."""
    groups: dict[str, list[Allocation]] = {}
    for allocation in allocations:
        groups.setdefault(repr(allocation), []).append(allocation)
    rows = []
    for group in groups.values():
        rows.append(group[0].model_copy(update={"count": len(group)}))
    return sorted(rows, key=lambda row: row.bytes * row.count, reverse=True)

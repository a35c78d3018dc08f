"""Counts the FLOPs of flex attention, whose kernel computes only the pairs of query and key that its mask allows.

A block mask lists two kinds of blocks: in a full block all pairs are allowed; in a partial block ``mask_mod`` decides
for each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from lm_profiler.measure.boundary import error_text
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.torch_names import NO_MODES

_NO_MASK = "noop_mask"  # torch's name of the function that allows all pairs
_MOST_PAIRS_AT_ONCE = 1 << 22  # more pairs together would need too much memory
_MOST_PAIRS = 1 << 30  # to evaluate more pairs would take too long


@dataclass(frozen=True)
class _Blocks:
    """Blocks of pairs; element i of each tensor belongs to block i."""

    batch: Tensor  # index of the sample
    head: Tensor  # index of the head
    query: Tensor  # index of the block of queries
    key: Tensor  # index of the block of keys

    @property
    def count(self) -> int:
        return len(self.batch)


@dataclass(frozen=True)
class _Mask:
    """A block mask, without the order in which its kernel works."""

    # [samples, heads, blocks of queries]: how many partial blocks of keys there are
    partial_counts: Tensor
    # [samples, heads, blocks of queries, blocks of keys]: the partial blocks of keys, and then unused places
    partial_indices: Tensor
    # the same two for full blocks, in which all pairs are allowed
    full_counts: Tensor | None
    full_indices: Tensor | None
    query_block_length: int  # the number of queries in a block
    key_block_length: int  # the number of keys in a block
    # takes the indices of sample, head, query and key; returns whether the pair is allowed
    allows: Callable[..., Any]
    buffers: tuple[Any, ...]  # further arguments of ``allows``

    @classmethod
    def from_block_mask(
        cls, block_mask: tuple[Any, ...], buffers: tuple[Any, ...]
    ) -> _Mask:
        """Return the mask that ``BlockMask.as_tuple`` describes."""
        _queries, _keys, *tensors = block_mask[:6]
        partial_counts, partial_indices, full_counts, full_indices = tensors
        query_block_length, key_block_length, allows = block_mask[-3:]
        return cls(
            partial_counts=partial_counts,
            partial_indices=partial_indices,
            full_counts=full_counts,
            full_indices=full_indices,
            query_block_length=query_block_length,
            key_block_length=key_block_length,
            allows=allows,
            buffers=buffers,
        )


def forward_flops(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> int:
    """Count flex attention's forward: scores of allowed pairs, and weighted sums of values."""
    return _flops(query, key, value, block_mask=arguments[1], rest=arguments[4:])


def backward_flops(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> int:
    """Count flex attention's backward: twice the forward, without the scores that a kernel may choose to recompute."""
    return 2 * _flops(query, key, value, block_mask=arguments[6], rest=arguments[9:])


def _flops(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, rest: tuple[Any, ...]
) -> int:
    """Count the forward. ``rest`` holds the buffers of the score's function and, if there are any, of the mask's."""
    mask_buffers = tuple(rest[1]) if len(rest) > 1 else ()
    return flops_of_mask(query, key, value, block_mask, mask_buffers)


def flops_of_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: tuple[Any, ...] | None,
    buffers: tuple[Any, ...] = (),
) -> int:
    """Count the forward of attention with a mask.

    Args:
        query: [samples, heads, queries, width].
        key: [samples, heads, keys, width].
        value: [samples, heads, keys, width of values].
        block_mask: what ``BlockMask.as_tuple`` returns; None allows all pairs.
        buffers: further arguments of the mask's function.

    Raises:
        UncountableError: it is unknown which pairs are allowed.
    """
    samples, heads, queries, width = query.shape
    keys = key.shape[-2]
    if block_mask is None:
        pairs = samples * heads * queries * keys
    else:
        mask = _Mask.from_block_mask(block_mask, buffers)
        with NO_MODES.find()(), torch.no_grad():
            pairs = allowed_pairs(mask, samples, heads, queries, keys)
    return 2 * pairs * (width + value.shape[-1])


def allowed_pairs(
    mask: _Mask, samples: int, heads: int, queries: int, keys: int
) -> int:
    """Return how many pairs of a query and a key the mask allows, over all samples and heads.

    Raises:
        UncountableError: the pairs depend on values that are unknown, or are too many to count.
    """
    shorter_side = min(mask.query_block_length, mask.key_block_length)
    is_one_block = shorter_side >= max(queries, keys)
    has_no_mask = getattr(mask.allows, "__name__", "") == _NO_MASK
    if is_one_block and has_no_mask:
        return samples * heads * queries * keys

    # A mask of one sample or one head holds for all of them.
    mask_samples, mask_heads = mask.partial_counts.shape[:2]
    repeats = (samples // mask_samples) * (heads // mask_heads)
    partial_blocks = _listed_blocks(mask.partial_counts, mask.partial_indices)
    if partial_blocks is None:
        # The step itself makes the mask, on tensors without values, so the lists are unknown. They would follow from
        # ``allows``, which is evaluated for all pairs instead.
        all_blocks = _all_blocks(mask, queries, keys)
        return repeats * _pairs_of_partial(all_blocks, mask, queries, keys)

    pairs = _pairs_of_partial(partial_blocks, mask, queries, keys)
    if mask.full_counts is not None and mask.full_indices is not None:
        full_blocks = _listed_blocks(mask.full_counts, mask.full_indices)
        if full_blocks is not None:
            pairs += _pairs_of_full(full_blocks, mask, queries, keys)
    return repeats * pairs


def _listed_blocks(counts: Tensor, indices: Tensor) -> _Blocks | None:
    """Return the blocks that a mask lists; None if the values of its lists are unknown.

    For each sample, head and block of queries, the first ``counts`` of ``indices`` are the listed blocks of keys.
    """
    known_counts = value_of(counts)
    known_indices = value_of(indices)
    if known_counts is None or known_indices is None:
        return None
    places = torch.arange(known_indices.shape[-1], device=known_indices.device)
    is_listed = places < known_counts.unsqueeze(-1)
    batch, head, query, place = is_listed.nonzero(as_tuple=True)
    key = known_indices[batch, head, query, place].long()
    return _Blocks(batch, head, query, key)


def _all_blocks(mask: _Mask, queries: int, keys: int) -> _Blocks:
    """Return all blocks of the scores, as if the mask left out none."""
    mask_samples, mask_heads = mask.partial_counts.shape[:2]
    query_blocks = ceil(queries / mask.query_block_length)
    key_blocks = ceil(keys / mask.key_block_length)
    shape = (mask_samples, mask_heads, query_blocks, key_blocks)
    every_block = torch.ones(shape, dtype=torch.bool)
    batch, head, query, key = every_block.nonzero(as_tuple=True)
    return _Blocks(batch, head, query, key)


def value_of(tensor: Tensor) -> Tensor | None:
    """Return ``tensor``, or the constant that it stands for if it is fake; None if its values are unknown."""
    if not hasattr(tensor, "fake_mode"):
        return tensor
    constant: Tensor | None = getattr(tensor, "constant", None)
    return constant


def _pairs_of_full(blocks: _Blocks, mask: _Mask, queries: int, keys: int) -> int:
    """Return the number of all pairs in ``blocks``."""
    queries_in_blocks = _lengths_inside(blocks.query, mask.query_block_length, queries)
    keys_in_blocks = _lengths_inside(blocks.key, mask.key_block_length, keys)
    return int((queries_in_blocks * keys_in_blocks).sum())


def _lengths_inside(blocks: Tensor, block_length: int, length: int) -> Tensor:
    """Return how much of each block lies within a sequence of ``length``; the last one may reach beyond it.

    ``blocks`` holds the positions of the blocks, counted in blocks.
    """
    begins = blocks * block_length
    ends = (begins + block_length).clamp(max=length)
    return (ends - begins).clamp(min=0)


def _pairs_of_partial(blocks: _Blocks, mask: _Mask, queries: int, keys: int) -> int:
    """Return how many pairs of a query and a key the mask allows in the partial ``blocks``."""
    if _pairs_of_full(blocks, mask, queries, keys) > _MOST_PAIRS:
        raise UncountableError(
            "the mask of flex_attention has too many pairs to be counted"
        )
    total = 0
    for indices in _pairs_in_pieces(blocks, mask, queries, keys):
        try:
            allowed = mask.allows(*indices, *mask.buffers)
        except Exception as error:  # such as a look-up in a table without data
            raise UncountableError(
                f"the mask of flex_attention cannot be evaluated: {error_text(error)}"
            ) from None
        if hasattr(allowed, "fake_mode"):
            raise UncountableError("the mask of flex_attention depends on values")
        total += int(torch.broadcast_to(allowed, indices[0].shape).sum())
    return total


def _pairs_in_pieces(
    blocks: _Blocks, mask: _Mask, queries: int, keys: int
) -> Iterator[list[Tensor]]:
    """Yield the indices of sample, head, query and key of all pairs in ``blocks``, a limited number of pairs at once.

    Arrays have the axes [block, query in the block, key in the block] until they are flattened.
    """
    device = blocks.batch.device
    query_length = min(mask.query_block_length, queries)
    key_length = min(mask.key_block_length, keys)
    query_offsets = torch.arange(query_length, device=device).view(1, -1, 1)
    key_offsets = torch.arange(key_length, device=device).view(1, 1, -1)
    pairs_of_block = query_length * key_length
    blocks_at_once = max(_MOST_PAIRS_AT_ONCE // pairs_of_block, 1)
    for begin in range(0, blocks.count, blocks_at_once):
        piece = slice(begin, begin + blocks_at_once)
        sample = blocks.batch[piece].view(-1, 1, 1)
        head = blocks.head[piece].view(-1, 1, 1)
        first_query = blocks.query[piece].view(-1, 1, 1) * mask.query_block_length
        first_key = blocks.key[piece].view(-1, 1, 1) * mask.key_block_length
        query = first_query + query_offsets
        key = first_key + key_offsets
        # The last blocks may reach beyond the sequences.
        is_inside = (query < queries) & (key < keys)
        indices = torch.broadcast_tensors(sample, head, query, key)
        yield [index[is_inside] for index in indices]

"""FLOPs of flex attention: of the pairs of query and key that its mask allows, which are all that its kernel needs.

A block mask lists full blocks, all of whose pairs are allowed, and partial ones, in which ``mask_mod`` decides.
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
_MOST_PAIRS_AT_ONCE = 1 << 22  # so that their memory stays small
_MOST_PAIRS = 1 << 30  # that are evaluated one by one


@dataclass(frozen=True)
class _Blocks:
    """Blocks of pairs, as indices: of the batch, the head, and of the block of queries and of keys."""

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor

    @property
    def count(self) -> int:
        return len(self.batch)


@dataclass(frozen=True)
class _Mask:
    """A block mask, without the order in which its kernel works."""

    partial_counts: Tensor  # of each batch, head, and block of queries
    partial_indices: Tensor  # of blocks of keys
    full_counts: Tensor | None
    full_indices: Tensor | None
    query_block: int  # length of a block
    key_block: int
    # batch, head, query and key to whether the pair is allowed
    allows: Callable[..., Any]
    buffers: tuple[Any, ...]  # further arguments of ``allows``

    @classmethod
    def from_block_mask(
        cls, block_mask: tuple[Any, ...], buffers: tuple[Any, ...]
    ) -> _Mask:
        """Return the mask that ``BlockMask.as_tuple`` describes; it begins with two lengths."""
        _, _, partial_counts, partial_indices, full_counts, full_indices, *_ = (
            block_mask
        )
        query_block, key_block, allows = block_mask[-3:]
        return cls(
            partial_counts, partial_indices, full_counts, full_indices, query_block, key_block, allows, buffers
        )  # fmt: skip


def forward_flops(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> int:
    """Count flex attention's forward: scores of allowed pairs, and weighted sums of values."""
    return _flops(query, key, value, block_mask=arguments[1], rest=arguments[4:])


def backward_flops(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> int:
    """Count its backward: twice the forward. What kernels compute again is their own choice."""
    return 2 * _flops(query, key, value, block_mask=arguments[6], rest=arguments[9:])


def _flops(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, rest: tuple[Any, ...]
) -> int:
    """``rest`` are the buffers of the score's function, and those of the mask's, if there are any."""
    buffers = tuple(rest[1]) if len(rest) > 1 else ()
    return flops_of_mask(query, key, value, block_mask, buffers)


def flops_of_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: tuple[Any, ...] | None,
    buffers: tuple[Any, ...] = (),
) -> int:
    """Count the forward for a ``BlockMask.as_tuple``; None allows all pairs.

    Raises:
        UncountableError: it is unknown which pairs are allowed.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[-2]
    if block_mask is None:
        pairs = batch * heads * queries * keys
    else:
        mask = _Mask.from_block_mask(block_mask, buffers)
        with NO_MODES.find()(), torch.no_grad():
            pairs = allowed_pairs(mask, batch, heads, queries, keys)
    return 2 * pairs * (width + value.shape[-1])


def allowed_pairs(mask: _Mask, batch: int, heads: int, queries: int, keys: int) -> int:
    """Return how many pairs the mask allows, over all samples and heads.

    Raises:
        UncountableError: it depends on values that are unknown, or has too many pairs.
    """
    covers_all = min(mask.query_block, mask.key_block) >= max(queries, keys)
    if covers_all and getattr(mask.allows, "__name__", "") == _NO_MASK:
        return batch * heads * queries * keys
    mask_batch, mask_heads = mask.partial_counts.shape[:2]
    repeats = (batch // mask_batch) * (heads // mask_heads)
    partial = _listed_blocks(mask.partial_counts, mask.partial_indices)
    if partial is None:
        # made in the step: ``create_block_mask`` lists what ``allows`` allows
        everything = _all_blocks(mask, queries, keys)
        return repeats * _pairs_of_partial(everything, mask, queries, keys)
    pairs = _pairs_of_partial(partial, mask, queries, keys)
    if mask.full_counts is not None and mask.full_indices is not None:
        full = _listed_blocks(mask.full_counts, mask.full_indices)
        if full is not None:
            pairs += _area(full, mask, queries, keys)
    return repeats * pairs


def _listed_blocks(counts: Tensor, indices: Tensor) -> _Blocks | None:
    """Return the blocks of keys that a mask lists, the first ``counts`` of ``indices``; None if they are unknown."""
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
    mask_batch, mask_heads = mask.partial_counts.shape[:2]
    counts = (
        mask_batch,
        mask_heads,
        ceil(queries / mask.query_block),
        ceil(keys / mask.key_block),
    )
    return _Blocks(*torch.ones(counts, dtype=torch.bool).nonzero(as_tuple=True))


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the value of a tensor that may be fake; None if it is unknown."""
    if not hasattr(tensor, "fake_mode"):
        return tensor
    constant: Tensor | None = getattr(tensor, "constant", None)
    return constant


def _area(blocks: _Blocks, mask: _Mask, queries: int, keys: int) -> int:
    """Return the number of pairs in ``blocks``; those at the end may reach beyond the sequences."""
    query_ends = ((blocks.query + 1) * mask.query_block).clamp(max=queries)
    key_ends = ((blocks.key + 1) * mask.key_block).clamp(max=keys)
    heights = (query_ends - blocks.query * mask.query_block).clamp(min=0)
    widths = (key_ends - blocks.key * mask.key_block).clamp(min=0)
    return int((heights * widths).sum())


def _pairs_of_partial(blocks: _Blocks, mask: _Mask, queries: int, keys: int) -> int:
    """Return how many pairs ``mask.allows`` in the partial ``blocks``."""
    if _area(blocks, mask, queries, keys) > _MOST_PAIRS:
        raise UncountableError(
            "the mask of flex_attention has too many pairs to be counted"
        )
    total = 0
    for indices in _pairs_in_pieces(blocks, mask, queries, keys):
        try:
            allowed = mask.allows(*indices, *mask.buffers)
        except Exception as error:  # such as a table without data
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
    """Yield batch, head, query and key of all pairs in ``blocks``, some of them at a time."""
    device = blocks.batch.device
    query_length = min(mask.query_block, queries)
    key_length = min(mask.key_block, keys)
    query_offsets = torch.arange(query_length, device=device).view(1, -1, 1)
    key_offsets = torch.arange(key_length, device=device).view(1, 1, -1)
    pairs_of_block = query_length * key_length
    blocks_at_once = max(_MOST_PAIRS_AT_ONCE // pairs_of_block, 1)
    for begin in range(0, blocks.count, blocks_at_once):
        piece = slice(begin, begin + blocks_at_once)
        batch = blocks.batch[piece].view(-1, 1, 1)
        head = blocks.head[piece].view(-1, 1, 1)
        query = blocks.query[piece].view(-1, 1, 1) * mask.query_block
        key = blocks.key[piece].view(-1, 1, 1) * mask.key_block
        query = query + query_offsets
        key = key + key_offsets
        is_inside = (query < queries) & (key < keys)
        indices = torch.broadcast_tensors(batch, head, query, key)
        yield [index[is_inside] for index in indices]

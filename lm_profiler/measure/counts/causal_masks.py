"""Finds causal masks by their values: masks of attention that hide all later positions, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FUSED_ATTENTION = "aten::_scaled_dot_product"
_BACKWARD = "_backward"
_INPUTS_WITH_MASK = 4  # queries, keys, values and a mask
# A score to which a mask adds this has the weight 0 after softmax. Programs add -inf, or a large negative number.
_HIDDEN = -1e4
_ROWS = 256  # rows that are searched at once, so that the search of a large mask needs little memory


def mask_of_attention(name: str, inputs: Sequence[Tensor]) -> Tensor | None:
    """Return the mask that a call of fused attention adds to its scores; None for other calls.

    ``name`` is that of the operator, and ``inputs`` are all tensors among its arguments.
    """
    is_forward = name.startswith(_FUSED_ATTENTION) and not name.endswith(_BACKWARD)
    if not is_forward or len(inputs) != _INPUTS_WITH_MASK:
        return None
    return inputs[-1]


def causal_length(mask: Tensor) -> int:
    """Return the number of positions if ``mask`` is causal, and the same for all samples and heads; else 0."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.numel() == 0:
        return 0
    while mask.dim() > 2:
        # ``expand`` makes a dimension without a stride
        is_shared = mask.shape[0] == 1 or mask.stride(0) == 0
        if not is_shared:
            return 0
        mask = mask[0]
    # Two corners exclude most other masks without a search.
    if mask[0, -1] > _HIDDEN or mask[-1, 0] != 0:
        return 0
    for first_row in range(0, len(mask), _ROWS):
        if not _are_causal(mask[first_row : first_row + _ROWS], first_row):
            return 0
    return len(mask)


def _are_causal(rows: Tensor, first_row: int) -> bool:
    """Return whether each of ``rows``, which begin at ``first_row`` of the mask, hides exactly its later positions."""
    end_row = first_row + len(rows)
    earlier = rows[:, :first_row]
    around_diagonal = rows[:, first_row:end_row]
    later = rows[:, end_row:]
    # Comparing each element would take several times as long.
    if earlier.count_nonzero() > 0:
        return False
    hides_later = later.numel() == 0 or bool(later.amax() <= _HIDDEN)
    if not hides_later:
        return False
    is_later = torch.ones_like(around_diagonal, dtype=torch.bool).triu(1)
    is_hidden = around_diagonal <= _HIDDEN
    is_visible = around_diagonal == 0
    return torch.equal(is_hidden, is_later) and torch.equal(is_visible, ~is_later)

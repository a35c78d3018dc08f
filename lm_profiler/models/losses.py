"""Computes the loss of a language model without having all of its logits in memory at one time.

Shapes: N tokens, D width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024  # tokens whose logits exist at one time: 0.6 GiB in float32 for a vocabulary of 152,000
_IGNORED = -100  # a target that has no loss: cross_entropy's own default


def chunked_cross_entropy(
    hidden_BTD: Tensor, targets_BT: Tensor, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mean cross-entropy of ``head(hidden)``, in float32 or float64.

    Tokens go through the ``head`` in chunks, and once more in the backward pass. That is a third more work of the head,
    and the memory is that of the logits and gradients of one chunk instead of N·V of each.
    """
    targets_N = targets_BT.flatten()
    chunks = zip(
        hidden_BTD.flatten(0, 1).split(CHUNK_TOKENS),
        targets_N.split(CHUNK_TOKENS),
        strict=True,
    )
    sums = []
    for hidden_ND, chunk_targets_N in chunks:
        if torch.is_grad_enabled():
            # The head draws no random numbers, so the RNG's state need not be restored.
            chunk_sum = checkpoint(
                _summed_loss,
                head,
                hidden_ND,
                chunk_targets_N,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            chunk_sum = _summed_loss(head, hidden_ND, chunk_targets_N)
        sums.append(chunk_sum)
    count = (targets_N != _IGNORED).sum()
    return torch.stack(sums).sum() / count


def _summed_loss(
    head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_N: Tensor
) -> Tensor:
    """Return the sum of the losses of ``targets_N``, computed in float32 at least."""
    logits_NV = head(hidden_ND)
    precise_dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(
        logits_NV.to(precise_dtype), targets_N, reduction="sum", ignore_index=_IGNORED
    )

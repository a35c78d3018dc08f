"""Which masks are causal, and how much memory the search takes."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_profiler.measure.counts.causal_masks import causal_length

POSITIONS = 700  # several blocks of rows, the last of them smaller


def mask_with(hidden: float = -torch.inf, changes: Mapping[tuple[int, int], float] | None = None) -> Tensor:
    """A causal mask that has ``hidden`` at later positions, and the values of ``changes`` at their rows and columns."""
    mask = torch.full((POSITIONS, POSITIONS), hidden).triu(1)
    for place, value in (changes or {}).items():
        mask[place] = value
    return mask


@pytest.mark.parametrize(
    "mask, length",
    [
        (mask_with(), POSITIONS),
        (mask_with(torch.finfo(torch.float32).min), POSITIONS),
        (mask_with().half(), POSITIONS),
        (mask_with().expand(4, 2, -1, -1), POSITIONS),
        (mask_with()[:256, :256], 256),
        (mask_with(hidden=-1.0), 0),
        (mask_with(changes={(10, 600): 0.0}), 0),
        (mask_with(changes={(10, 600): torch.nan}), 0),
        (mask_with(changes={(300, 301): 0.0}), 0),
        (mask_with(changes={(600, 10): -torch.inf}), 0),
        (mask_with(changes={(600, 10): torch.nan}), 0),
        (mask_with(changes={(600, 599): -1.0}), 0),
        (mask_with(changes={(600, 600): -torch.inf}), 0),
        (mask_with()[:, :600], 0),
        (torch.stack([mask_with(), mask_with()]), 0),
    ],
)
def test_a_causal_mask_hides_all_later_positions_and_nothing_else(mask: Tensor, length: int) -> None:
    assert causal_length(mask) == length


class LargestResult(TorchDispatchMode):
    """Keeps the size of the largest result of all operators."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_the_search_of_a_mask_makes_no_tensor_of_its_size() -> None:
    mask = torch.full((2048, 2048), -torch.inf).triu(1)
    with LargestResult() as largest:
        assert causal_length(mask) == len(mask)
    assert largest.elements <= mask.numel() / 8

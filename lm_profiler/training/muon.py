"""One optimizer that updates the matrices of a model with Muon, and its other parameters with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Updates ``matrices`` with torch's Muon, and ``other_parameters`` with AdamW.

    It is one optimizer with two groups, because Lightning steps several optimizers only in manual optimization. Both
    use the same learning rate and weight decay: Muon scales its update so that AdamW's values suit it (Liu et al. 2025,
    section 2.2).
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        other_parameters: Sequence[nn.Parameter],
        lr: float,
        weight_decay: float,
        fused: bool | None = None,
    ) -> None:
        self.muon = Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = AdamW(
            other_parameters, lr=lr, weight_decay=weight_decay, fused=fused
        )
        groups = [*self.muon.param_groups, *self.adamw.param_groups]
        super().__init__(groups, defaults={"lr": lr, "weight_decay": weight_decay})
        self._share_state()

    def _share_state(self) -> None:
        """Make both optimizers use the groups and state of this optimizer, which schedulers and checkpoints change."""
        self.muon.param_groups = self.param_groups[:1]
        self.adamw.param_groups = self.param_groups[1:]
        self.muon.state = self.state
        self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the matrices by Muon, and all other weights by AdamW."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.step()
        self.adamw.step()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share_state()


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two lists: the matrices in the blocks of ``model``, for Muon, and all other parameters, for AdamW.

    AdamW updates embeddings, the LM head, norms and biases, as Muon's author advises. It also updates the matrices of
    experts, because they are stacked and torch's Muon accepts only single matrices.
    """
    matrices: list[nn.Parameter] = []
    other_parameters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_single_matrix = parameter.ndim == 2
        if name.startswith("blocks.") and is_single_matrix:
            matrices.append(parameter)
        else:
            other_parameters.append(parameter)
    return matrices, other_parameters

"""Optimizers that take turns under manual optimization: whose parameters a backward pass is to find gradients of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


class Turns:
    """Does what LightningModule.toggle_optimizer and untoggle_optimizer do, which ask a Trainer for the optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._needed: dict[Tensor, bool] = {}

    def toggle(self, optimizer: Optimizer) -> None:
        """Of the parameters of all optimizers, those of ``optimizer`` alone need gradients."""
        self._needed = {p: p.requires_grad for each in self._optimizers for p in parameters_of(each)}
        for parameter in self._needed:
            parameter.requires_grad_(False)
        for parameter in parameters_of(optimizer):
            parameter.requires_grad_(self._needed[parameter])

    def untoggle(self, optimizer: Optimizer) -> None:
        """Those of the others need them again."""
        for parameter, needed in self._needed.items():
            parameter.requires_grad_(needed)
        self._needed = {}

    @contextmanager
    def of(self, optimizer: Optimizer) -> Iterator[None]:
        """The turn of ``optimizer``."""
        self.toggle(optimizer)
        try:
            yield
        finally:
            self.untoggle(optimizer)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Of all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

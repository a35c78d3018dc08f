"""What a run holds on its device stays there when it is over: the process ends, and Lightning would copy all of it."""

from __future__ import annotations

from functools import partial

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch.nn import Module


def leave_in_place(trainer: Trainer) -> None:
    """Have the end of ``trainer``'s run copy no optimizer states and gradients to the host (see ``Strategy.teardown``).

    They are 12 of the 16 bytes a parameter of AdamW in float32: 24 GB for xl, more than many a host has free, and that
    takes longer than the run. The module itself is copied, since its last hooks may expect it on the CPU, but for ours.
    """
    trainer.strategy.teardown = partial(_tear_down, trainer.strategy)  # type: ignore[method-assign]


def _tear_down(strategy: Strategy) -> None:
    optimizers, strategy.optimizers = strategy.optimizers, []
    try:
        if (module := strategy.lightning_module) is not None:
            Module.zero_grad(module)  # a user's own zero_grad is called by the steps alone
        type(strategy).teardown(strategy)
    finally:
        strategy.optimizers = optimizers

"""The toy module that the benchmarks of cost train: a loop that does next to nothing."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Toy(LightningModule):
    """A linear layer that notes when each step begins, in a hook that any Trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.began_ns: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began_ns.append(time.perf_counter_ns())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def tokens_in(self, batch: Any) -> int:
        """Return the number of tokens, so that the instruments count them too."""
        return int(batch[0].numel())

    def step_seconds(self, skipped: int) -> list[float]:
        """Return the seconds from step to step, without the first ``skipped``."""
        return [(b - a) * 1e-9 for a, b in pairwise(self.began_ns[skipped:])]


def loader(steps: int) -> DataLoader[Any]:
    """Return a loader of ``steps`` batches of one small row."""
    return DataLoader(TensorDataset(torch.ones(steps, 8)), batch_size=1)

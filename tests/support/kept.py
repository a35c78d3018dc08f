"""What our model logged, and what it should have."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Keeps(Callback):
    """Of each training step: the logged values, and each token's -log p, from the logits, by its definition."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.truth: list[list[float]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        whole = pl_module.forward

        def forward(*args: Any) -> Any:
            self.logits = whole(*args)
            return self.logits

        pl_module.forward = forward

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})
        weights = self.logits.detach().double().exp()
        p = weights.gather(-1, batch[1].unsqueeze(-1)).squeeze(-1) / weights.sum(-1)
        self.truth.append((-torch.log(p)).flatten().tolist())


def assert_true(logged: Sequence[dict[str, float]], truth: Sequence[Sequence[float]], rel: float = 1e-5) -> None:
    """``truth`` is each token's -log p, by steps: the loss is their mean, the perplexity exp of it."""
    means = [statistics.fmean(step) for step in truth]
    assert [step["train_loss"] for step in logged] == pytest.approx(means, rel=rel)
    assert [step["train_perplexity"] for step in logged] == pytest.approx([*map(math.exp, means)], rel=rel * 5)
    assert max(means) - min(means) > 0.01  # they distinguish the steps

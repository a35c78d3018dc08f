"""Modules whose step is sent to another process, which imports them from here."""

from typing import Any

import pytorch_lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from zoo import ROWS, WIDTH, OneLayer, Paper, product_flops


class CompiledPart(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.compile(self.layer, backend="aot_eager")


class AsksForAFloat(OneLayer):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return loss if float(loss) < 0.5 else 2 * loss


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("this is no part of a step")


class DoesMore(OneLayer):
    """Sets up what cannot be set up twice, logs, and asks its Trainer."""

    def loss(self, batch: Tensor) -> Tensor:
        self.log_dict({"loss": super().loss(batch).detach(), "step": float(self.trainer.global_step)}, prog_bar=True)
        return super().loss(batch)

    def paper(self, step: int) -> Paper:
        return 2 * product_flops(ROWS), product_flops(ROWS), 0

    setup = prepare_data = configure_model = on_fit_start = on_train_start = on_train_batch_start = _refuse
    on_before_zero_grad = on_after_backward = on_train_batch_end = on_train_epoch_end = on_train_end = teardown = (
        _refuse
    )


class Renamed(pytorch_lightning.LightningModule):
    """Of Lightning's other name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(4 * ROWS, WIDTH), batch_size=ROWS)

    def paper(self, step: int) -> Paper:
        return product_flops(ROWS), product_flops(ROWS), 0

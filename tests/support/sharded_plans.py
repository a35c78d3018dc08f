"""Modules whose shares of several ranks are counted by hand."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

WIDTH, LAYERS, BATCH = 256, 4, 8
LAYER = WIDTH * WIDTH
"""Parameters of a layer."""

ACTIVATIONS = 4 * (LAYERS + 3) * BATCH * WIDTH
"""Bytes that forward may hold at most."""


class Plain(LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(4 * BATCH, WIDTH), batch_size=BATCH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Sharded(Plain):
    """FSDP2, layer by layer."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            super().configure_model()
            for part in (*self.layers, self.layers):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


class ZeroOne(Plain):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.AdamW)

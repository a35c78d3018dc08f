"""A script that compiles a part of its module, in the way that its first argument names, and trains it."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

WAY = sys.argv[1]
ROWS, WIDTH, LAYERS = 16, 32, 3
SCALES = torch.full((WIDTH,), 0.5)  # a global that the step uses

square: Callable[[Tensor], Tensor] = lambda x: (x * SCALES).square().mean()  # noqa: E731
if WAY == "loss":
    square = torch.compile(square, backend="aot_eager")


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class Compiles(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Layers()
        if WAY == "submodule":
            self.net = torch.compile(self.net, backend="aot_eager")
        self.scale = lambda x: 2 * x  # what no pickle of Python takes
        self.lock = threading.Lock()  # what belongs to this process alone
        self.file = open(__file__)  # noqa: PTH123, SIM115

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.lock:
            return square(self.scale(self.net(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = Trainer(max_steps=15, accelerator="cpu", **dict.fromkeys(off, False))
trainer.fit(Compiles(), DataLoader([torch.randn(ROWS, WIDTH)] * 20, batch_size=None))

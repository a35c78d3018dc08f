"""A module that gives up in one phase of one batch; and a script that is ended by a signal (argument: the folder)."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.optim import SGD


class GivesUp(BoringModel):
    """Calls ``fail`` when ``where`` is reached for the ``batch``-th time, counted from 1."""

    def __init__(self, where: str, fail: Callable[[], Any], batch: int = 4) -> None:
        super().__init__()
        self.where = where
        self.fail = fail
        self.left = batch

    def at(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left == 0:
                self.fail()

    def train_dataloader(self) -> Any:
        module = self

        class Loader:
            def __len__(self) -> int:
                return 100

            def __iter__(self) -> Iterator[Tensor]:
                for _ in range(100):
                    module.at("data")
                    yield torch.ones(2, 32)

        return Loader()

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.at("transfer")
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.at("forward")
        return super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.at("zero_grad")
        super().optimizer_zero_grad(*args)

    def backward(self, loss: Tensor) -> None:
        self.at("backward")
        super().backward(loss)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.at("clip")

    def on_train_batch_end(self, *args: Any) -> None:
        self.at("end of a batch")

    def configure_optimizers(self) -> Any:
        self.at("setup")
        module = self

        class Fails(SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                module.at("optimizer")
                super().step()
                return loss

        return Fails(self.parameters(), lr=0.1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    module = GivesUp("forward", lambda: os.kill(os.getpid(), getattr(signal, sys.argv[2])))
    trainer_with([make_profiler(warmup=1, measure=50)], Path(sys.argv[1])).fit(module)

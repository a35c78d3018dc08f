"""One device with fake tensors, and the parts of a run's Trainer on which a step on one device depends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy

from lm_profiler.callbacks.instruments.work import bytes_of_batch
from lm_profiler.callbacks.marks.batches import Samples
from lm_profiler.measure.fake.world import FakeWorld

CPU = torch.device("cpu")

# precisions that Lightning refuses on the CPU (float16 needs a gradient scaler), and what is rehearsed instead
AS_WIDE = {"16-mixed": "bf16-mixed", "16": "bf16-mixed"}


@dataclass(frozen=True)
class Size:
    """The factors by which a batch's rows and columns are multiplied; columns only where they are a context."""

    batch: float = 1.0
    context: float = 1.0

    def __call__(self, shape: Sequence[int]) -> Sequence[int]:
        """Return ``shape`` with its first two dimensions resized."""
        factors = (self.batch, self.context, *[1.0] * len(shape))
        return [n and max(round(n * factor), 1) for n, factor in zip(shape, factors, strict=False)]


class FakeDevice:
    """A mixin that gives the device of a strategy fake tensors."""

    world: FakeWorld
    reduces = has_buckets = False  # whether DDP reduces all gradients, and whether its buckets hold them a second time
    ranks = 1  # the number of ranks; this is rank 0
    size = Size()
    rows = 1  # how many rows are rehearsed for each row of a batch that is made
    samples: int | None = None  # samples in a batch of the run; None where that is unknown
    batch_bytes = 0  # bytes of the last batch

    def model_to_device(self) -> None:
        """Do nothing: fake tensors stay where they are."""

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Make modules fake that are made under the strategy, as in ``configure_model``."""
        stack = ExitStack()
        stack.enter_context(super().tensor_init_context(empty_init))  # type: ignore[misc]
        stack.enter_context(self.world.inside())
        return stack

    def teardown(self) -> None:
        """Do nothing: nothing was moved."""

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Return a fake batch of the size that is rehearsed."""
        made, whole = Samples(combined=False)(batch), replace(self.size, batch=self.size.batch * self.rows)
        self.samples = None if made is None else made * self.rows
        rehearsed = self.world.faked(batch, whole)
        self.batch_bytes = bytes_of_batch(rehearsed)
        return rehearsed


class FakeStrategy(FakeDevice, SingleDeviceStrategy):
    """One device that a Trainer takes as its strategy."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(device=CPU)
        self.world = world


_BUCKET = 25 << 20  # bytes: the default ``bucket_cap_mb`` of torch.nn.parallel.DistributedDataParallel


def buckets(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buckets in which DDP reduces gradients: of 25 MiB and the rest of the last parameter, by dtype.

    Left out: DDP makes its first bucket smaller, and sparse gradients are in no bucket.
    """
    sizes: dict[torch.dtype, list[int]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            of = sizes.setdefault(parameter.dtype, [0])
            if of[-1] * parameter.itemsize >= _BUCKET:
                of.append(0)
            of[-1] += parameter.numel()
    return [torch.empty(size, dtype=dtype) for dtype, of in sizes.items() for size in of]


class BeforeSteps(Callback):
    """Runs only those hooks of ``callback`` that come before the first step, as for freezing a part of the module."""

    def __init__(self, callback: Callback, world: FakeWorld) -> None:
        self._callback, self.world = callback, world

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with self.world.inside():
            self._callback.setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.world.inside():
            self._callback.on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.world.inside():
            self._callback.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.world.inside():
            self._callback.on_train_epoch_start(trainer, pl_module)


class SilentLogger(Logger):
    """Replaces any logger: takes every call, and keeps nothing."""

    save_dir = log_dir = root_dir = "nowhere"
    name = "silent"
    version = 0

    @property
    def experiment(self) -> Any:
        """Return an object that has every attribute and method."""
        return MagicMock()

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

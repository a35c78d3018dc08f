"""The programs of `benchmarks.advice`, with their plants."""

from __future__ import annotations

import threading
import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

PAUSE_S = 0.06
"""What a plant takes, at least: of steps of 20 to 60 ms on a core of today."""


def make(
    program: str, plant: str, folder: str
) -> tuple[pl.LightningModule, list[Any], dict[str, Any], list[pl.Callback]]:
    """Module, loaders, options of the Trainer and callbacks."""
    module: pl.LightningModule = {"vision": Vision, "language": Language, "gan": Gan}[
        program
    ](plant)
    batch = {"batch of 2": 2, "batch of 1": 1}.get(plant, 8)
    count = {"short epochs": 24, **dict.fromkeys(EPOCHS_OF_SIX, 48)}.get(plant, 100_000)
    data = Samples(program, plant, count)
    loaders: list[Any] = [DataLoader(data, batch_size=batch, **workers_of(plant))]
    options: dict[str, Any] = {}
    callbacks: list[pl.Callback] = []
    if plant in ("loader made anew", "loader made once"):
        module.train_dataloader = lambda: slowly(loaders_kept[0])  # type: ignore[method-assign]
        loaders_kept, loaders = loaders, []
        options["reload_dataloaders_every_n_epochs"] = int(plant == "loader made anew")
    if plant == "validation every 25 steps":
        loaders.append(DataLoader(Samples(program, "loader sleeps", 64), batch_size=8))
        options |= {"val_check_interval": 25, "check_val_every_n_epoch": None}
    if plant == "slow hook as an epoch ends":
        callbacks.append(SlowEpochEnd())
    if plant == "validation every five steps":
        loaders.append(DataLoader(Samples(program, "", 64), batch_size=8))
        options |= {"val_check_interval": 5, "check_val_every_n_epoch": None}
    if plant == "checkpoint every two steps":
        options["enable_checkpointing"] = True
        callbacks.append(
            pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        )
        module.ballast = nn.Parameter(torch.zeros(12_000_000), requires_grad=False)
    if plant in ("histograms", "logs 300 values"):
        options |= {
            "logger": pl.loggers.TensorBoardLogger(folder),
            "log_every_n_steps": 1,
        }
    if plant == "anomalies":
        options["detect_anomaly"] = True
    if plant == "float64":
        options["precision"] = "64-true"
    by_plant = {
        "callback sleeps": Sleeping,
        "callback computes": Computing,
        "weights averaged in Python": Averaging,
        "thread that polls": Polling,
    }
    if plant in by_plant:
        callbacks.append(by_plant[plant]())
    return module, loaders, options, callbacks


# Plants of epochs that end, and their remedies, in epochs of six steps.
EPOCHS_OF_SIX = (
    *("workers start anew", "workers stay", "loader made anew", "loader made once"),
    *("slow hook as an epoch ends", "epochs of six"),
)


def workers_of(plant: str) -> dict[str, Any]:
    """Return what the loader of ``plant`` is given beside its data."""
    if plant in ("workers start anew", "workers stay"):
        return {
            "num_workers": 1,
            "worker_init_fn": start_slowly,
            "persistent_workers": plant == "workers stay",
        }
    if plant == "full queue":
        return {"num_workers": 2, "prefetch_factor": 8}
    return {"num_workers": {"one slow worker": 1, "short epochs": 2}.get(plant, 0)}


def start_slowly(number: int) -> None:
    time.sleep(0.3)


def slowly(loader: Any) -> Any:
    time.sleep(0.3)
    return loader


class SlowEpochEnd(pl.Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        time.sleep(0.3)


class Samples(Dataset[Any]):
    """Random images or tokens."""

    def __init__(self, program: str, plant: str, count: int) -> None:
        self.program, self.plant, self.count = program, plant, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.plant in ("loader sleeps", "one slow worker", "full queue"):
            time.sleep(PAUSE_S / 4)
        if self.plant == "loader computes":
            augmented(index)
        rng = np.random.default_rng(index)
        if self.program == "language":
            return torch.from_numpy(rng.integers(0, 512, 65))
        return torch.from_numpy(rng.standard_normal((3, 32, 32), dtype=np.float32))


def augmented(index: int) -> float:
    """Python that takes a quarter of a pause on a core of today."""
    return computed(250_000)


def computed(count: int) -> float:
    """So many additions."""
    total = 0.0
    for number in range(count):
        total += number % 3
    return total


class Sleeping(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(PAUSE_S)


class Computing(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        computed(1_000_000)


class Polling(pl.Callback):
    """A thread that waits for the end of training without ever giving Python's lock away by itself."""

    def on_train_start(self, *_: Any) -> None:
        self.is_over = False
        threading.Thread(target=self.poll, name="poller", daemon=True).start()

    def on_train_end(self, *_: Any) -> None:
        self.is_over = True

    def poll(self) -> None:
        while not self.is_over:
            pass


class Averaging(pl.Callback):
    """An average of the weights, a list of floats each."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for _ in range(3):
            for parameter in module.parameters():
                [
                    0.9 * value
                    for value in parameter.detach().flatten()[:20_000].tolist()
                ]


_LOCK = threading.Lock()


def wait() -> None:
    time.sleep(PAUSE_S)


def locked() -> None:
    """Somebody else has the lock for a while."""
    _LOCK.acquire()
    threading.Timer(PAUSE_S, _LOCK.release).start()
    _LOCK.acquire()
    _LOCK.release()


def slow_python() -> float:
    return computed(1_000_000)


def in_numpy() -> float:
    matrix = np.random.default_rng(0).standard_normal((60, 60))
    return sum(float(np.linalg.svd(matrix)[1][0]) for _ in range(60))


def small_operators(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for number in range(8000):
        total = total + 1e-9 * number
    return x + total


class Planted(pl.LightningModule):
    """What all programs share: the plants in the step and in hooks."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.steps = 0

    def before_forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        plants = {
            "sleep in forward": wait,
            "lock in forward": locked,
            "Python in forward": slow_python,
        }
        plants |= {"numpy in forward": in_numpy}
        if self.plant in plants:
            plants[self.plant]()
        if self.plant == "small operators in forward" and x.is_floating_point():
            x = small_operators(x)
        if self.plant == "garbage":
            for _ in range(3):
                litter()
        if self.plant == "full collections every seventh step" and self.steps % 7 == 0:
            collect_fully()
        if self.plant == "full queue" and self.steps == 1:
            time.sleep(1.5)
        if self.plant == "every fifth step sleeps" and self.steps % 5 == 0:
            time.sleep(4 * PAUSE_S)
        return x

    def after_forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.plant == "small operators in forward":
            x = small_operators(x)
        if self.plant == "sleep in backward" and x.requires_grad:
            x.register_hook(hook)
        if self.plant == "logs 300 values":
            for number in range(300):
                self.log(f"value_{number}", x.detach().mean(), on_step=True)
        return x

    def on_train_batch_end(self, *_: Any) -> None:
        if self.plant == "histograms":
            for name, parameter in self.named_parameters():
                self.logger.experiment.add_histogram(
                    name, parameter.detach(), self.steps
                )  # type: ignore[union-attr]

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss_of(batch)

    def loss_of(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        if self.plant == "sleep in the optimizer":
            return Slow(self.parameters(), lr=1e-4)
        foreach = False if self.plant == "optimizer without foreach" else None
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=foreach)


def hook(gradient: torch.Tensor) -> None:
    time.sleep(PAUSE_S)


def litter() -> None:
    """Cycles, and a full collection."""
    import gc

    class Node:
        pass

    for _ in range(2000):
        node = Node()
        node.node = node  # type: ignore[attr-defined]
    gc.collect()


_HEAP: list[Any] = []


def collect_fully() -> None:
    """Collect garbage with many objects alive, as a program does whose data are Python's lists."""
    import gc

    if not _HEAP:
        _HEAP.extend([number, {}] for number in range(500_000))
    gc.collect()


class Slow(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        time.sleep(PAUSE_S)
        return loss


class Vision(Planted):
    """A small residual net."""

    def __init__(self, plant: str) -> None:
        super().__init__(plant)
        width, depth = (64, 40) if plant == "optimizer without foreach" else (32, 4)
        self.stem = nn.Conv2d(3, width, 3, padding=1, stride=4 if depth > 4 else 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1000 if plant == "batch of 2" else 10)
        if plant == "batch of 2":
            self.wide = nn.Linear(1000, 4000)

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.before_forward(batch.to(self.stem.weight.dtype)))
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x.mean(dim=(2, 3)))
        if self.plant == "batch of 2":
            logits = self.wide(logits)
        return self.after_forward(logits).square().mean()


class Language(Planted):
    """A small Transformer."""

    def __init__(self, plant: str) -> None:
        super().__init__(plant)
        layers, width = (24, 64) if plant == "optimizer without foreach" else (4, 128)
        self.embedding = nn.Embedding(512, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, batch_first=True, dropout=0.0
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 30_000 if plant == "batch of 1" else 512)

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embedding(self.before_forward(batch[:, :-1]))
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=False)
                if self.plant == "recomputation"
                else layer(x)
            )
        logits = self.after_forward(self.head(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Gan(Planted):
    """Two networks in turns, each with an optimizer of its own."""

    def __init__(self, plant: str) -> None:
        super().__init__(plant)
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3 * 32 * 32)
        )
        self.critic = nn.Sequential(
            nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        return self.critic(batch.flatten(1)).mean()

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        real = self.before_forward(batch.flatten(1))
        fake = self.generator(torch.randn(len(batch), 64))
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        second.zero_grad()
        self.manual_backward(self.after_forward(loss))
        second.step()
        first.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        first.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-4)
            for part in (self.generator, self.critic)
        ]

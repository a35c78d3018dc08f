"""Modules of other people: what they do that tensors without data may not take, and what those cannot know."""

import copy
import math
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

IDS, WIDTH, BATCH = 1000, 256, 64


class Plain(LightningModule):
    """Ids of a batch in, ids out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(IDS, WIDTH), nn.Linear(WIDTH, IDS, bias=False)

    def train_dataloader(self) -> Any:
        return DataLoader(range(4 * BATCH), batch_size=BATCH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(batch)), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class SaysFloat(Plain):
    """Of its loss, and of the largest so far; its optimizer asks what weights are worth."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last, self.most = float(loss), max(getattr(self, "most", 0.0), loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class KeepsAll(Plain):
    """What each step has made."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.kept.append(torch.ones(WIDTH))
        return super().training_step(batch, batch_idx)


class Freezes(Callback):
    """A part, before any step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(Plain, pl_module).embedding.requires_grad_(False)


class HasNoBatches(Plain):
    def train_dataloader(self) -> Any:
        class Loader(DataLoader[int]):
            def __iter__(self) -> Any:
                raise OSError("no memory to share")

        return Loader(range(BATCH))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class Everything(Plain):
    """Tied weights, a copied part, buffers, a hook, a generator, a metric, a function of its own; logs, prints."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.norm, self.accuracy = nn.BatchNorm1d(WIDTH), MulticlassAccuracy(IDS)
        self.average = copy.deepcopy(self.norm).requires_grad_(False)
        self.norm.register_forward_hook(lambda module, inputs, output: output + 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.average.parameters(), self.norm.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        self.seen += 1
        noise = torch.rand(len(batch), WIDTH, generator=self.generator, device=batch.device)
        scores = self.head(Square.apply(self.norm(self.embedding(batch) + noise)))
        loss = F.cross_entropy(scores, batch)
        self.accuracy(scores, batch)
        self.log_dict({"accuracy": self.accuracy, "loss": loss}, prog_bar=True)
        print("loss", loss)
        return loss


class Tells(Plain):
    """Asks for values, of which some are known and none matters; logs them; schedules; does nothing in turns."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)] + torch.linspace(0, 0.5, 3).tolist()
        self.drop = nn.Dropout(rates[-1])
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx % 2:
            return None
        order = torch.randperm(len(batch)).tolist()
        ids = batch[order][batch[order] < BATCH * 4]  # all of them
        loss = F.cross_entropy(self.head(self.drop(self.embedding(ids[: int(ids.max()) + BATCH]))), ids)
        if loss.isnan() or not math.isfinite(loss.item()):
            return None
        self.losses.append(loss.item())
        self.log_dict({"loss": sum(self.losses) / len(self.losses), "accuracy": 100 * loss.item()})
        self.logger.experiment.add_scalar("loss", round(loss.item(), 3), self.global_step)
        print(f"{loss.item():.3f}", self.logger.log_metrics({"loss": float("nan")}))
        return loss

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class DecidesByValue(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() < 1.0:
            self.best = loss.item()
        return loss


class Recurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(batch))[0]), batch)


class SaysCuda(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.cuda(), batch_idx)


class LacksAFile(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(torch.load("nowhere.ckpt"))


class Exits(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        sys.exit(3)


class WritesAtTheEnd(Plain):
    def on_train_end(self) -> None:
        Path("ended").write_text("1")


class Streams(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(Repeated(self.batch()), batch_size=None)

    def batch(self) -> Tensor:
        raise NotImplementedError


class Repeated(IterableDataset[Tensor]):
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(self.value)


class SparseBatches(Streams):
    """Of 4 TB, were they dense."""

    def batch(self) -> Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([[0], [1]]), torch.ones(1), (1 << 20, 1 << 20), check_invariants=False
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.sparse.mm(batch, self.head.weight.new_zeros(1 << 20, 1)).sum() + self.head.weight.sum()

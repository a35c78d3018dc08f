"""What else people do in a step, each by itself on a small module."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

IN, OUT, BATCH = 128, 64, 32
KEPT = Path(tempfile.gettempdir(), "lm_profiler_kept_weights.pt")


def keep() -> None:
    """What ``LoadsItself`` looks for."""
    torch.save(nn.Linear(IN, 256).state_dict(), KEPT)


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(IN, 256), nn.ReLU(), nn.Linear(256, OUT))

    def train_dataloader(self) -> Any:
        made = torch.Generator().manual_seed(1)
        rows = [(torch.randn(IN, generator=made), i % OUT) for i in range(16 * BATCH)]
        return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class NoneInTurns(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx % 2 == 0 else None


class NoneAtFirst(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 else self.loss(batch)


class NoneInOtherTurns(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx % 3 == 1 else None


class MoreNowAndThen(Small):
    """A heavier term every fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return (
            loss + 0.1 * self.loss((batch[0].repeat(8, 1), batch[1].repeat(8)))
            if batch_idx % 4 == 3
            else loss
        )


class LoadsItself(Small):
    """Weights that were saved, in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].load_state_dict(torch.load(KEPT, map_location="cpu"))


class Clips(Small):
    """The loss decides how hard is clipped, and is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach().item())
        if len(self.losses) % 4 == 0:
            self.log("mean", torch.tensor(self.losses).mean())
        return {"loss": loss, "value": loss.item()}

    def on_after_backward(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        if torch.isnan(norm) or torch.isinf(norm):
            self.zero_grad()


class Best(Small):
    """Chooses by a loss: a plan cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.best = 1e9

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if loss.item() < self.best:
            self.best = loss.item()
        return loss


class HardExamples(Small):
    """As many rows as are wrong: a plan cannot know."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0])
        wrong = scores.argmax(1) != batch[1]
        return F.cross_entropy(scores[wrong], batch[1][wrong])


class FloatOfLoss(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", float(loss))
        return loss


class Packed(Small):
    """Rows of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(IN, 64, batch_first=True)
        self.head = nn.Linear(64, OUT)

    def train_dataloader(self) -> Any:
        rows = [(torch.randn(i % 7 + 2, IN), i % OUT) for i in range(16 * BATCH)]
        return DataLoader(rows, batch_size=BATCH, collate_fn=self.together)  # type: ignore[arg-type]

    def together(self, rows: Any) -> Any:
        lengths = torch.tensor([len(x) for x, _ in rows])
        return (
            nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True),
            lengths,
            torch.tensor([y for _, y in rows]),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths, y = batch
        out, _ = self.gru(
            pack_padded_sequence(
                x, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
        )
        out, lengths = pad_packed_sequence(out, batch_first=True)
        return F.cross_entropy(self.head(out[torch.arange(len(y)), lengths - 1]), y)


class Masks(Small):
    """Chooses among what came in the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        even = y % 2 == 0
        if not even.any():
            return None
        return F.cross_entropy(self.net(x[even]), y[even]) + self.loss(
            (x[: int(y.max()) // 4 + 1], y[: int(y.max()) // 4 + 1])
        )


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Tensor:
        at = torch.cdist(x, codes).argmin(1)
        ctx.save_for_backward(at)
        ctx.rows = len(codes)
        return codes[at]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (at,) = ctx.saved_tensors
        return gradients[0], torch.zeros(
            ctx.rows, gradients[0].shape[1], device=at.device
        ).index_add_(0, at, gradients[0])


class Quantized(Small):
    """Codes of a book, by a function of one's own; how many are used is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(100, IN))
        self.register_buffer("usage", torch.zeros(100))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = Straight.apply(batch[0], self.codes)
        self.usage.mul_(0.99).add_(x.detach().mean(1).sum())
        self.log("perplexity", (self.usage / (self.usage.sum() + 1e-6)).max().item())
        return self.loss((x, batch[1]))


class Rollouts(Small):
    """Acts in a world of numbers, keeps what happened, and learns from it: after the usual REINFORCE."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.memory: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state, logs, rewards = torch.zeros(4), [], []
        for _ in range(16):
            dist = torch.distributions.Categorical(logits=self.policy(state))
            action = dist.sample()
            logs.append(dist.log_prob(action))
            state, reward = torch.randn(4), random.random()
            rewards.append(reward)
            if random.random() < 0.0:
                break
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.stack(logs) * returns).sum()
        self.log("episode_reward", sum(rewards))
        return loss + self.loss(batch)


class ActsByValue(Rollouts):
    """The same, where the world wants to know the action: a plan cannot."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        action = torch.distributions.Categorical(
            logits=self.policy(torch.zeros(4))
        ).sample()
        reward = [1.0, 0.0][action.item()]
        return self.loss(batch) * reward


class LayerDrop(Small):
    """Skips its layers at random, by one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for layer in self.layers:
            if torch.rand([]) < 0.0:
                continue
            x = layer(x).relu()
        return self.loss((x, batch[1]))


class Keeps(Small):
    """Outputs of steps, until the epoch ends; uncertainty weights that were learned are told."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars, self.outputs = nn.Parameter(torch.zeros(2)), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b = self.loss(batch), self.net(batch[0]).pow(2).mean()
        loss = (torch.exp(-self.log_vars) * torch.stack([a, b]) + self.log_vars).sum()
        self.outputs.append(loss.detach())
        for i, s in enumerate(self.log_vars.exp().tolist()):
            self.log(f"sigma_{i}", s)
        self.logger.experiment.add_scalars(
            "parts", {"a": a.item(), "b": b.item()}, self.global_step
        )
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.outputs).mean())
        self.outputs.clear()

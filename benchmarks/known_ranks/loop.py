"""A module whose every phase sleeps for a known time on every rank, and longer where a delay says so."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.known_ranks.notes import Met, Notes, Span

BASE_S: Mapping[str, float] = {
    "data": 8e-3,
    "forward": 35e-3,
    "backward": 50e-3,
    "optimizer": 8e-3,
    "other": 4e-3,
}
"""What each phase sleeps; ``other`` is a hook of the module's, before its step."""

_LAYERS = 4


@dataclass(frozen=True)
class Delay:
    """``seconds`` more in ``phase`` of ``rank``, each ``every`` batches; where that is None, of the ranks in turn."""

    rank: int | None
    phase: str
    seconds: float
    every: int = 1

    def of(self, rank: int, world: int, phase: str, batch: int) -> float:
        """Seconds in ``phase`` of the batch with this number."""
        hit = phase == self.phase and batch % self.every == 0
        return (
            self.seconds
            if hit and rank == (batch % world if self.rank is None else self.rank)
            else 0.0
        )


@dataclass(eq=False)
class Sleeper:
    """Sleeps, and notes when it came to what: on a busy machine a process does not run when it should.

    Args:
        base_s: what each phase sleeps on every rank.
        delays: what is added.
        rank: of this process, of ``world``.
        accumulate: batches a step.
        delayed: whether a step with this number has the ``delays``.
        noise: standard deviation of every sleep, as a share of it.
        seed: of the noise, which differs from rank to rank.
    """

    base_s: Mapping[str, float]
    delays: Sequence[Delay]
    rank: int
    world: int
    accumulate: int = 1
    delayed: Callable[[int], bool] = lambda step: True
    noise: float = 0.0
    seed: int = 0
    batch: int = -1
    notes: Notes = field(default_factory=Notes)
    woke_ns: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(1000 * self.seed + self.rank)

    @property
    def reduces(self) -> bool:
        """Whether the running batch is its step's last."""
        return self.batch % self.accumulate == self.accumulate - 1

    def next_batch(self) -> None:
        """One is asked for."""
        self.batch += 1
        self.notes.next_batch()

    def __call__(self, phase: str, share: float = 1.0) -> None:
        """``share`` of what the running batch is to sleep in ``phase``."""
        delays = self.delays if self.delayed(self.batch // self.accumulate) else ()
        wanted_s = self.base_s[phase] + sum(
            d.of(self.rank, self.world, phase, self.batch) for d in delays
        )
        time.sleep(
            wanted_s * share * max(1 + self.noise * self._random.gauss(0, 1), 0.1)
        )
        self.woke_ns = time.perf_counter_ns()


class Batches:
    """A loader with a length: of one without, Lightning asks a batch ahead."""

    def __init__(self, sleeper: Sleeper, width: int) -> None:
        self._sleeper, self._batch = sleeper, torch.ones(1, width)

    def __len__(self) -> int:
        return 100_000

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self._sleeper.next_batch()
            with self._sleeper.notes.phase("data"):
                self._sleeper("data")
            yield self._batch


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        sleeper("forward", 1 / _LAYERS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.sleeper("backward", 1 / _LAYERS)
        return grad, None


class Sleepy(LightningModule):
    """Layers that sleep; ``train_dataloader`` is its own.

    ``reduces_behind``: whether gradients are reduced while backward goes on, as DDP does.
    """

    reduces_behind = True

    def __init__(self, sleeper: Sleeper, width: int = 64) -> None:
        super().__init__()
        self.sleeper, self.width = sleeper, width
        self.net = nn.ModuleList(nn.Linear(width, width) for _ in range(_LAYERS))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sleeper("other")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        with self.sleeper.notes.phase("forward"):
            for layer in self.net:
                x = _Asleep.apply(layer(x), self.sleeper)
            return x.sum()

    def on_before_backward(self, loss: Tensor) -> None:
        self._began_ns = time.perf_counter_ns()

    def on_after_backward(self) -> None:
        notes, now = self.sleeper.notes, time.perf_counter_ns()
        notes.spans.append(Span("backward", self._began_ns, now))
        if self.reduces_behind and self.sleeper.reduces:
            # The first layer, which is the last here, has nothing left to do.
            notes.met.append(Met("gradients", self.sleeper.woke_ns, now))

    def train_dataloader(self) -> Batches:
        return Batches(self.sleeper, self.width)

    def configure_optimizers(self) -> Any:
        sleeper = self.sleeper

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure() if closure is not None else None
                with sleeper.notes.phase("optimizer"):
                    sleeper("optimizer")
                    super().step()
                return loss

        return SGD(self.parameters(), lr=1e-6)


class Sharded(Sleepy):
    """The same, each layer a unit of FSDP2's, whose calls hold every rank on gloo."""

    reduces_behind = False

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not any(type(layer).__name__.startswith("FSDP") for layer in self.net):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

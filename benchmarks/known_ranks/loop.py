"""A module whose every phase sleeps for a known time on every rank, and longer where a delay says so."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

BASE_S: Mapping[str, float] = {"data": 5e-3, "forward": 20e-3, "backward": 35e-3, "optimizer": 5e-3, "other": 2e-3}
"""What each phase sleeps; ``other`` is a hook of the module's, before its step."""

_SPUN_S = 0.2e-3
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
        return self.seconds if hit and rank == (batch % world if self.rank is None else self.rank) else 0.0


@dataclass(eq=False)
class Sleeper:
    """Sleeps, and keeps how long it really was: on a busy machine a process does not run when it should.

    Args:
        base_s: what each phase sleeps on every rank.
        delays: what is added.
        rank: of this process, of ``world``.
        noise: standard deviation of every sleep, as a share of it.
        seed: of the noise, which differs from rank to rank.

    ``slept_s`` holds the seconds of each batch in each phase, ``held_s`` those in which collectives held it, on this
    rank's own clock; ``began_ns`` when each batch was asked for.
    """

    base_s: Mapping[str, float]
    delays: Sequence[Delay]
    rank: int
    world: int
    noise: float = 0.0
    seed: int = 0
    batch: int = -1
    slept_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    held_s: list[float] = field(default_factory=list)
    began_ns: list[int] = field(default_factory=list)
    woke: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(1000 * self.seed + self.rank)

    def next_batch(self) -> None:
        """One is asked for."""
        self.batch += 1
        self.began_ns.append(time.perf_counter_ns())
        self.held_s.append(0.0)
        for phase in self.base_s:
            self.slept_s[phase].append(0.0)

    def __call__(self, phase: str, share: float = 1.0) -> None:
        """``share`` of what the running batch is to sleep in ``phase``."""
        wanted_s = self.base_s[phase] + sum(d.of(self.rank, self.world, phase, self.batch) for d in self.delays)
        wanted_s *= share * max(1 + self.noise * self._random.gauss(0, 1), 0.1)
        began = time.perf_counter()
        if wanted_s > 2 * _SPUN_S:
            time.sleep(wanted_s - _SPUN_S)
        while time.perf_counter() < began + wanted_s:
            pass
        self.woke = time.perf_counter()
        self.slept_s[phase][self.batch] += self.woke - began

    def held_since(self, began: float) -> None:
        """A collective has let this rank go."""
        if self.batch >= 0:
            self.held_s[self.batch] += time.perf_counter() - began

    @contextmanager
    def hears_broadcasts(self) -> Iterator[None]:
        """Lightning sends a flag before every batch."""
        whole = torch.distributed.broadcast

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            sent = whole(*args, **kwargs)
            self.held_since(began)
            return sent

        torch.distributed.broadcast = timed
        try:
            yield
        finally:
            torch.distributed.broadcast = whole

    def seconds(self, batches: slice) -> tuple[dict[str, float], float, float]:
        """Means of ``batches``: slept by phase, held by collectives, and from batch to batch."""
        slept_s = {phase: statistics.mean(each[batches]) for phase, each in self.slept_s.items()}
        apart_s = [(b - a) * 1e-9 for a, b in pairwise(self.began_ns)]
        return slept_s, statistics.mean(self.held_s[batches]), statistics.mean(apart_s[batches])


class Batches:
    """A loader with a length: of one without, Lightning asks a batch ahead."""

    def __init__(self, sleeper: Sleeper, width: int) -> None:
        self._sleeper, self._batch = sleeper, torch.ones(1, width)

    def __len__(self) -> int:
        return 100_000

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self._sleeper.next_batch()
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
    """Layers that sleep; ``train_dataloader`` is its own."""

    def __init__(self, sleeper: Sleeper, width: int = 64) -> None:
        super().__init__()
        self.sleeper, self.width = sleeper, width
        self.net = nn.ModuleList(nn.Linear(width, width) for _ in range(_LAYERS))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sleeper("other")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.net:
            x = _Asleep.apply(layer(x), self.sleeper)
        return x.sum()

    def on_after_backward(self) -> None:
        self.sleeper.held_since(self.sleeper.woke)  # the first layer, which is the last here, has nothing left to do

    def train_dataloader(self) -> Batches:
        return Batches(self.sleeper, self.width)

    def configure_optimizers(self) -> Any:
        sleeper = self.sleeper

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure() if closure is not None else None
                sleeper("optimizer")
                super().step()
                return loss

        return SGD(self.parameters(), lr=1e-6)


class Sharded(Sleepy):
    """The same, each layer a unit of FSDP2's."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not any(type(layer).__name__.startswith("FSDP") for layer in self.net):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

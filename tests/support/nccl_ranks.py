"""Two ranks over NCCL, on two GPUs, whose phases take known times on the device; started by test_nccl_ranks.py.

Argument: a folder. Prints, for each way to train, what is found where one rank is slow.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.known_ranks.loop import Delay
from benchmarks.known_ranks.processes import on_ranks
from known_loop import instruments, trainer_with
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

BASE_S = {"forward": 80e-3, "backward": 120e-3, "optimizer": 20e-3}
LATE_S = 160e-3
_LAYERS = 4


def busy(seconds: float) -> None:
    """On the device; the host goes on."""
    kilohertz = torch.cuda.get_device_properties().clock_rate
    torch.cuda._sleep(round(seconds * kilohertz * 1e3))


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        busy(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        busy(ctx.backward_s)
        return grad, None, None


class Busy(LightningModule):
    """Layers that keep the device busy, longer where a delay says so."""

    def __init__(self, delays: Sequence[Delay]) -> None:
        super().__init__()
        self.delays = delays
        self.net = nn.ModuleList(nn.Linear(64, 64) for _ in range(_LAYERS))

    def seconds(self, phase: str) -> float:
        return BASE_S[phase] + sum(delay.of(self.global_rank, 2, phase, 0) for delay in self.delays)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.net:
            x = _Busy.apply(layer(x), self.seconds("forward") / _LAYERS, self.seconds("backward") / _LAYERS)
        return x.sum()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.ones(4, 64)] * 500, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        module = self

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure() if closure is not None else None
                busy(module.seconds("optimizer"))
                super().step()
                return loss

        return SGD(self.parameters(), lr=1e-6)


class Sharded(Busy):
    """Each layer is a unit of FSDP2's, which gathers ahead."""

    def configure_model(self) -> None:
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


Way = tuple[Delay, Callable[[], Any], dict[str, Any]]

WAYS: dict[str, Way] = {
    "DDP": (Delay(1, "forward", LATE_S), DDPStrategy, {}),
    "DDP, rank 0": (Delay(0, "backward", LATE_S), DDPStrategy, {}),
    "DDP, accumulating": (Delay(1, "backward", LATE_S / 2), DDPStrategy, {"accumulate_grad_batches": 2}),
    "DDP, a static graph": (Delay(1, "optimizer", LATE_S), partial(DDPStrategy, static_graph=True), {}),
    "DDP, a hook": (Delay(1, "forward", LATE_S), partial(DDPStrategy, ddp_comm_hook=allreduce_hook), {}),
    "FSDP": (Delay(1, "forward", LATE_S), partial(FSDPStrategy, auto_wrap_policy={nn.Linear}), {}),
    "FSDP2": (Delay(0, "forward", LATE_S), partial(ModelParallelStrategy, 2, 1), {}),
}


def found(way: Way, rank: int, folder: Path) -> dict[str, Any] | None:
    """What is said of it, on rank 0."""
    delay, strategy, options = way
    profiler = instruments(2, 4)
    trained = strategy()
    module = (Sharded if isinstance(trained, ModelParallelStrategy) else Busy)([delay])
    distributed = {"accelerator": "gpu", "devices": 2, "strategy": trained, "use_distributed_sampler": False}
    trainer_with([profiler], folder, **distributed, **options).fit(module)
    if rank > 0:
        return None
    ranks = profiler.record.ranks
    assert ranks is not None, profiler.record.notes
    return ranks.finding.model_dump() | {"witness": ranks.witness}


def main(folder: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        return {name: found(way, rank, Path(folder)) for name, way in WAYS.items()}

    print(json.dumps(on_ranks(2, work, limit_s=500)[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])

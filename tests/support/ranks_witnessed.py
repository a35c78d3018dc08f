"""Two ranks, of which one is late, train under DDP and with sharded weights; started by test_witness.py.

Argument: a folder. Writes what each rank's instruments
say (``timelines.pkl``), before anything is concluded from it.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.known_ranks.processes import on_ranks
from known_loop import instruments, trainer_with
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.utils.data import DataLoader

from lm_profiler.callbacks.gather import Exchange

STEPS = 20


class Late(LightningModule):
    """Rank 1 comes later to its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.004 * self.global_rank)
        loss: Tensor = self.net(batch).sum()
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([Tensor([0.1] * 8)] * 60, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=1e-3)


class Sharded(Late):
    def configure_model(self) -> None:
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def witnessed(module: Late, strategy: Any, folder: Path) -> Any:
    """What rank 0 gathers."""
    kept: list[Any] = []
    gather = Exchange.gather

    def keep(exchange: Exchange, measured: Any) -> Any:
        kept.append(gather(exchange, measured))
        return kept[-1]

    Exchange.gather = keep  # type: ignore[method-assign]
    trainer_with([instruments(2, STEPS)], folder, strategy=strategy, devices=2, use_distributed_sampler=False).fit(
        module
    )
    Exchange.gather = gather  # type: ignore[method-assign]
    (measured,) = kept
    return {"timelines": measured.timelines, "notes": measured.notes}


def main(folder: str) -> None:
    def work(rank: int) -> Any:
        warnings.simplefilter("ignore")
        return {
            "DDP": witnessed(Late(), DDPStrategy(), Path(folder)),
            "FSDP2": witnessed(Sharded(), ModelParallelStrategy(2, 1), Path(folder)),
        }

    first, _ = on_ranks(2, work, limit_s=100)
    (Path(folder) / "timelines.pkl").write_bytes(pickle.dumps(first))


if __name__ == "__main__":
    main(*sys.argv[1:])

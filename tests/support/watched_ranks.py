"""Two ranks train under DDP and are watched, of which rank 1 waits 20 ms for each batch; started by test_watching.py.

Argument: a folder for the files of the run. Prints the seconds that ``fit`` took on rank 0 once its ranks had met.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.known_ranks.processes import on_ranks
from faults import Tiny
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
    WatchOptions,
    watch_writer,
    watching,
)

STEPS, LATE_S = 60, 0.02


class Late(IterableDataset[torch.Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(self.seconds)
            yield torch.ones(2, 4)


class OfRank(Tiny):
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Late(LATE_S * self.global_rank), batch_size=None)


class Began(Callback):
    def setup(self, *_: object, **__: object) -> None:
        self.at = time.perf_counter()


def fitted(rank: int) -> float:
    """Seconds that the fit took."""
    warnings.simplefilter("ignore")
    watching._HAND_OVER_NS, watch_writer._COMPARE_RANKS_NS = 1_000_000, 200_000_000
    profiler = TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=3), MemoryOptions(steps=0), TraceOptions(steps=0),
        actions=ActionsOptions(steps=0), quiet=True, watch=WatchOptions(), log_dir=Path(sys.argv[1]),
    )  # fmt: skip
    began = Began()
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=STEPS, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[began, profiler],
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(OfRank())
    return time.perf_counter() - began.at


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"fit took {on_ranks(2, fitted, 60.0)[0]}\n")

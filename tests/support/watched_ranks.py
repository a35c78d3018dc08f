"""Two ranks train under DDP and are watched, of which rank 1 waits 20 ms for each batch; started by test_watching.py.

Argument: a folder for the files of the run. Prints the seconds that ``fit`` took on rank 0 once its ranks had met.
"""

import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.known_ranks.processes import on_ranks
from faults import Tiny
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from lm_profiler.callbacks import watch_writer, watching

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
    folder, began = Path(sys.argv[1]), Began()
    profiler = make_profiler(warmup=1, measure=3, watch=True, log_dir=folder)
    two: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    trainer_with([began, profiler], folder, max_steps=STEPS, **two).fit(OfRank())
    return time.perf_counter() - began.at


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"fit took {on_ranks(2, fitted, 60.0)[0]}\n")

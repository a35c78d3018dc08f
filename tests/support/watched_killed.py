"""A watched training of 4 ms a step that goes on until it is killed; argument: a folder for the files of the run."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from faults import Tiny, train_tiny
from known_loop import make_profiler


class Slow(Tiny):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        time.sleep(0.004)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    train_tiny(Path(sys.argv[1]), [make_profiler(warmup=1, measure=3, watch=True, log_dir=Path(sys.argv[1]))], Slow)

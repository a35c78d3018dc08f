"""A watched training of 4 ms a step that goes on until it is killed; argument: a folder for the files of the run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from faults import Tiny, train

from lm_profiler.callbacks import ActionsOptions, MemoryOptions, StageOptions, TraceOptions, TrainingProfiler


class Slow(Tiny):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        time.sleep(0.004)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    profiler = TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=3), MemoryOptions(steps=0), TraceOptions(steps=0),
        actions=ActionsOptions(steps=0), quiet=True, watch=True, log_dir=Path(sys.argv[1]),
    )  # fmt: skip
    train(Path(sys.argv[1]), [profiler], Slow)

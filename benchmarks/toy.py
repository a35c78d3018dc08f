"""Measure what the instruments add to a loop that does next to nothing else.

``selftest`` starts this program: ``python -m lm_profiler.cli.cost [accelerator]`` prints JSON with the seconds of each
step under ``Trainer(barebones=True)`` and under the instruments. Trace and memory by phase are off: in a run they come
after the timed steps. Bare and instrumented runs alternate, so that a change of the machine falls on both.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lm_profiler.callbacks import ActionsOptions, MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.cli.surroundings import quiet

# rounds of one bare and one instrumented run, the steps that count in each, and the warm-up steps before them
ROUNDS, STEPS, SKIPPED = 6, 300, 50


class Toy(LightningModule):
    """A linear layer that notes when each step begins, in a hook that any Trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.began_ns: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began_ns.append(time.perf_counter_ns())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def tokens_in(self, batch: Any) -> int:
        """Return the number of tokens, so that the instruments count them too."""
        return int(batch[0].numel())

    def step_seconds(self, skipped: int) -> list[float]:
        """Return the seconds from step to step, without the first ``skipped``."""
        return [(b - a) * 1e-9 for a, b in pairwise(self.began_ns[skipped:])]


def loader(steps: int) -> DataLoader[Any]:
    """Return a loader of ``steps`` batches of one small row."""
    return DataLoader(TensorDataset(torch.ones(steps, 8)), batch_size=1)


def _seconds(kind: str, accelerator: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        # More steps than there are: the run ends while it is being measured.
        stages = StageOptions(warmup_steps=1, measure_steps=2 * (SKIPPED + STEPS))
        off: dict[str, Any] = {
            "memory": MemoryOptions(steps=0),
            "trace": TraceOptions(steps=0),
            "actions": ActionsOptions(steps=0),
        }
        if kind == "bare":
            options: dict[str, Any] = {"barebones": True}
        else:
            options = {"callbacks": [TrainingProfiler(stages, **off, quiet=True, log_dir=folder)]}
            none = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
            options |= dict.fromkeys(none, False)
        toy = Toy()
        trainer = Trainer(accelerator=accelerator, devices=1, max_epochs=1, default_root_dir=folder, **options)
        trainer.fit(toy, loader(SKIPPED + STEPS))
        return toy.step_seconds(SKIPPED)


def main() -> None:
    """Print the seconds of each step, ``bare`` and ``instrumented``, as JSON."""
    seconds: dict[str, list[float]] = {"bare": [], "instrumented": []}
    with quiet():
        for _round in range(ROUNDS):
            for kind in seconds:
                seconds[kind] += _seconds(kind, *(sys.argv[1:] or ["auto"]))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()

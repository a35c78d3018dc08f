"""Microseconds a step that instruments add to a bare Trainer, on a toy module, interleaved in one process.

    python -m benchmarks.overhead [--rounds 15] [--steps 400]

Every contender trains the same toy for the same number of steps, in random order in each round, and is timed from the
outside: host time from one ``on_train_batch_start`` of the module to another, over all but the first steps. The
module's own hooks do the timing, so that nothing is added to the list of callbacks.
"""

from __future__ import annotations

import argparse
import gc
import logging
import platform
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger

from lm_profiler.callbacks import MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.cli.workers.cost import Toy, loader
from lm_profiler.measure.device.environment import device_name

SKIP = 50
"""Steps before the clock starts."""


def ours(steps: int, folder: str) -> Callback:
    """Everything on but the trace: marks, memory, progress, the record; every timed step is a measured one."""
    return TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=steps * 10),
        MemoryOptions(),
        TraceOptions(steps=0),
        log_dir=folder,
        quiet=True,
    )


def contenders(steps: int) -> dict[str, Callable[[str], dict[str, Any]]]:
    """Trainer options of each contender, given a folder."""

    def logged(folder: str) -> dict[str, Any]:
        return {"logger": TensorBoardLogger(folder, version=None), "log_every_n_steps": 1}

    return {
        "bare Trainer": lambda folder: {"logger": False},
        "lm_profiler, all but the trace": lambda folder: {"logger": False, "callbacks": [ours(steps, folder)]},
        "SimpleProfiler": lambda folder: {"logger": False, "profiler": "simple"},
        "DeviceStatsMonitor": lambda folder: {
            **logged(folder),
            "callbacks": [DeviceStatsMonitor(cpu_stats=True)],
        },
        "ThroughputMonitor": lambda folder: {
            **logged(folder),
            "callbacks": [ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0))],
        },
    }


def time_one(options: dict[str, Any], steps: int, accelerator: str) -> float:
    """Microseconds a step."""
    toy = Toy()
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    gc.collect()  # what an earlier contender left behind is not this one's to clear away
    trainer.fit(toy, loader(SKIP + steps + 1))
    return sum(toy.step_seconds(SKIP)) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--accelerator", default="cpu")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    order = random.Random(0)
    results: dict[str, list[float]] = {name: [] for name in contenders(arguments.steps)}
    for _ in range(arguments.rounds + 1):
        names = list(results)
        order.shuffle(names)
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                options = contenders(arguments.steps)[name](folder)
                results[name].append(time_one(options, arguments.steps, arguments.accelerator))
    device = torch.device(arguments.accelerator if arguments.accelerator != "gpu" else "cuda")
    print(
        f"{device_name(device)}, {platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{arguments.rounds} rounds of {arguments.steps} steps; the first round is not counted\n")
    bare = results["bare Trainer"][1:]
    print("| | µs a step (median) | added (median of the rounds' differences) | min ... max |")
    print("|:--|--:|--:|--:|")
    for name, values in results.items():
        added = [a - b for a, b in zip(values[1:], bare, strict=True)]
        extra = "" if name == "bare Trainer" else f"{statistics.median(added):.1f}"
        spread = "" if name == "bare Trainer" else f"{min(added):.1f} ... {max(added):.1f}"
        print(f"| {name} | {statistics.median(values[1:]):.1f} | {extra} | {spread} |")


if __name__ == "__main__":
    main()

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
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.toy import Toy, loader
from lm_profiler.callbacks import (
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
)
from lm_profiler.measure.device.environment import device_name
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import Table, text_table

SKIP = 50
"""Steps before the clock starts."""

Taken = TypeVar("Taken")


def ours(steps: int, folder: str) -> Callback:
    """Everything on that runs in or between timed steps: marks, memory, counters for the causes of slow steps,
    progress, the record. Every timed step is a measured one; the stages after them are not reached."""
    return TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=steps * 10),
        MemoryOptions(),
        TraceOptions(steps=0),
        log_dir=folder,
    )


def contenders(steps: int) -> dict[str, Callable[[str], dict[str, Any]]]:
    """Trainer options of each contender, given a folder."""

    def logged(folder: str) -> dict[str, Any]:
        return {
            "logger": TensorBoardLogger(folder, version=None),
            "log_every_n_steps": 1,
        }

    return {
        "bare Trainer": lambda folder: {"logger": False},
        "lm_profiler, all but the trace": lambda folder: {
            "logger": False,
            "callbacks": [ours(steps, folder)],
        },
        "SimpleProfiler": lambda folder: {"logger": False, "profiler": "simple"},
        "DeviceStatsMonitor": lambda folder: {
            **logged(folder),
            "callbacks": [DeviceStatsMonitor(cpu_stats=True)],
        },
        "ThroughputMonitor": lambda folder: {
            **logged(folder),
            "callbacks": [
                ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0))
            ],
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
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        trainer.fit(toy, loader(SKIP + steps + 1))
    return sum(toy.step_seconds(SKIP)) / steps * 1e6


def interleaved(
    names: Iterable[str], take: Callable[[str], Taken], more: Callable[[int], bool]
) -> dict[str, list[Taken]]:
    """What each contender took in each round, in random order within it, for as long as there are to be ``more``.

    The first round is not counted.
    """
    order = random.Random(0)
    results: dict[str, list[Taken]] = {name: [] for name in names}
    rounds = -1
    while more(rounds):
        shuffled = list(results)
        order.shuffle(shuffled)
        for name in shuffled:
            results[name].append(take(name))
        rounds += 1
    return {name: values[1:] for name, values in results.items()}


def added(results: dict[str, list[float]], name: str) -> list[float]:
    """Microseconds a step that ``name`` adds to the first contender, in each round."""
    bare = next(iter(results.values()))
    return [a - b for a, b in zip(results[name], bare, strict=True)]


def table(results: dict[str, list[float]]) -> Table:
    """Of all contenders; the first of them is what the others add to."""
    bare, *others = results
    rows = [[bare, f"{statistics.median(results[bare]):.1f}", "", ""]]
    for name in others:
        extra = added(results, name)
        spread = f"{min(extra):.1f} ... {max(extra):.1f}"
        rows.append(
            [
                name,
                f"{statistics.median(results[name]):.1f}",
                f"{statistics.median(extra):.1f}",
                spread,
            ]
        )
    titles = (
        "",
        "µs a step (median)",
        "added (median of the rounds' differences)",
        "min ... max",
    )
    return text_table(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--accelerator", default="cpu")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    given = contenders(arguments.steps)

    def microseconds(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return time_one(given[name](folder), arguments.steps, arguments.accelerator)

    results = interleaved(given, microseconds, lambda rounds: rounds < arguments.rounds)
    device = torch.device(
        arguments.accelerator if arguments.accelerator != "gpu" else "cuda"
    )
    print(
        f"{device_name(device)}, {platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(
        f"{arguments.rounds} rounds of {arguments.steps} steps; the first round is not counted\n"
    )
    print(markdown(table(results)), end="")


if __name__ == "__main__":
    main()

"""What the instruments cost several ranks (gloo, on the CPU): a step under DDP, and the end of a run.

    python -m benchmarks.known_ranks.cost [--rounds 15] [--steps 400] [--traceml VENV/bin]

Two ranks train a toy that does next to nothing, so a step is mostly Lightning's loop and the ranks' meeting. Contenders
take turns in the same processes, in random order in each round. TraceML replaces functions of torch and brings a
process of its own, so its turns are launches: ``torchrun`` and ``traceml run``, one after the other. ``--traceml`` is
where both programs are: in a virtual environment that holds ``traceml-ai`` beside what this project needs.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from benchmarks.known_ranks.processes import on_ranks
from benchmarks.known_ranks.trial import quiet_trainer, quieten
from benchmarks.overhead import SKIP, interleaved, table
from lm_profiler.callbacks import ActionsOptions, MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.cli.workers.cost import Toy, loader
from lm_profiler.measure.device.environment import device_name
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import Table, text_table

BARE, OURS, SIMPLE = "bare Trainer, DDP", "lm_profiler, all but the trace", "SimpleProfiler"
_LAUNCHES = 5
_INNER = 3
_LATER = 10
"""Steps of the stages that are not timed, at least."""


class EndingToy(Toy):
    """Notes when its last batch ended."""

    ended = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended = time.perf_counter()


def ours(steps: int, folder: str) -> TrainingProfiler:
    """Marks, memory, counters, who waits for whom, the record; and of the untimed stages all but the trace."""
    return TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=SKIP + steps),
        MemoryOptions(steps=1),
        TraceOptions(steps=0),
        actions=ActionsOptions(steps=0),
        log_dir=folder,
    )


def options(name: str, steps: int, folder: str) -> dict[str, Any]:
    """Of the Trainer, for each contender."""
    if name == OURS:
        return {"callbacks": [ours(steps, folder)]}
    return {"profiler": "simple"} if name == SIMPLE else {}


def time_one(name: str, world: int, steps: int) -> tuple[float, float]:
    """Microseconds a step, and seconds from the last batch's end to the end of ``fit``, on this rank."""
    toy = EndingToy()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        trainer = quiet_trainer(world, folder, **options(name, steps, folder))
        trainer.fit(toy, loader(SKIP + steps + _LATER))
        ended = time.perf_counter()
    return sum(toy.step_seconds(SKIP)[:steps]) / steps * 1e6, ended - toy.ended


def in_turns(world: int, names: tuple[str, ...], rounds: int, steps: int) -> list[tuple[dict[str, list[float]], Any]]:
    """Of each rank, microseconds a step and the seconds of the end, by contender and round."""

    def work(rank: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        quieten()
        ends: dict[str, list[float]] = {name: [] for name in names}

        def microseconds(name: str) -> float:
            step_us, end_s = time_one(name, world, steps)
            ends[name].append(end_s)
            return step_us

        return interleaved(names, microseconds, lambda done: done < rounds), ends

    return on_ranks(world, work)


def launched(bin_folder: Path, name: str, steps: int) -> float:
    """Microseconds a step of ``bare`` or ``traceml`` in two processes that were launched for it."""
    here = [str(Path(__file__)), name, str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(bin_folder / "python"), "-m", "torch.distributed.run", "--nproc-per-node=2", *here]
        if name == "traceml":
            command = [str(bin_folder / "traceml"), "run", "--nproc-per-node=2", here[0], "--args", *here[1:]]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("microseconds ")]
    if not said:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return float(said[0].split()[1])


def contend(name: str, steps: int) -> None:
    """In a launched process: the median of a few fits, said by rank 0."""
    quieten()
    torch.set_num_threads(1)
    callbacks = []
    if name == "traceml":
        from traceml_ai.integrations import lightning as traceml

        traceml.init()
        callbacks = [traceml.TraceMLCallback]
    taken = []
    for _ in range(1 + _INNER):
        toy = Toy()
        with tempfile.TemporaryDirectory() as folder:
            quiet_trainer(2, folder, callbacks=[each() for each in callbacks]).fit(toy, loader(SKIP + steps + 1))
        taken.append(sum(toy.step_seconds(SKIP)) / steps * 1e6)
    if os.environ["RANK"] == "0":
        print(f"\nmicroseconds {statistics.median(taken[1:]):.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--traceml", type=Path)
    given = parser.parse_args()
    quieten()
    print(f"{device_name(torch.device('cpu'))}, {platform.platform()}, torch {torch.__version__}; two ranks")
    print(f"{given.rounds} rounds of {given.steps} steps; the first round is not counted\n")
    (steps_us, _), *_ = in_turns(2, (BARE, OURS, SIMPLE), given.rounds, given.steps)
    print(markdown(table(steps_us)))
    if given.traceml is not None:
        names = {"bare": "bare Trainer, DDP, launched by torchrun", "traceml": "TraceML, launched by it"}
        order = interleaved(names, lambda name: launched(given.traceml, name, given.steps), lambda n: n < _LAUNCHES)
        print(markdown(table({title: order[name] for name, title in names.items()})))
    print(markdown(ends_table()), end="")


def ends_table() -> Table:
    """How long ``fit`` takes to end: of one rank most of it is measuring what the machine can do at best."""
    rows: list[list[str]] = []
    alone_s: float | None = None
    for world in (1, 2, 8):
        ends = [end for _, end in in_turns(world, (BARE, OURS), 3, 20)]
        first_s, *others_s = [statistics.median(end[OURS][1:]) for end in ends]
        alone_s = first_s if alone_s is None else alone_s
        bare_s = max(statistics.median(end[BARE][1:]) for end in ends)
        others = f"{max(others_s):.2f}" if others_s else ""
        rows.append([str(world), f"{bare_s:.2f}", f"{first_s:.2f}", others, f"{first_s - alone_s:+.2f}"])
    return text_table(
        ("ranks", "bare (s)", "lm_profiler, rank 0 (s)", "the slowest other rank (s)", "rank 0, more than alone (s)"),
        rows,
    )


if __name__ == "__main__":
    if sys.argv[1:2] in (["bare"], ["traceml"]):
        contend(sys.argv[1], int(sys.argv[2]))
    else:
        main()

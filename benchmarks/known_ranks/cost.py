"""What the instruments cost several ranks (gloo, on the CPU): a step under DDP, and the end of a run.

    python -m benchmarks.known_ranks.cost [--rounds 15] [--steps 400] [--traceml VENV/bin]

Two ranks train a toy that does next to nothing, so a step is mostly Lightning's loop and the ranks' meeting. Contenders
take turns in the same processes, in random order in each round. Beside the wall time of a step, which is the slower
rank's and as noisy as two ranks that wait for each other are, stand the CPU seconds of a step in one rank's process,
user and system, all of its threads: they are what the instruments take, whoever waits.

TraceML replaces functions of torch and brings a process of its own, so its turns are launches: ``torchrun`` and
``traceml run``, one after the other. Their CPU seconds are of all processes that were launched, per rank. ``--traceml``
is where both programs are: in a virtual environment that holds ``traceml-ai`` beside what this project needs.
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
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.known_ranks.processes import on_ranks
from benchmarks.known_ranks.trial import quiet_trainer, quieten
from benchmarks.overhead import SKIP, interleaved
from benchmarks.toy import Toy, loader
from lm_profiler.analysis.steps.statistics import mean_interval
from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
)
from lm_profiler.measure.device.environment import device_name
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import Table, text_table

BARE, OURS, SIMPLE = (
    "bare Trainer, DDP",
    "lm_profiler, all but the trace",
    "SimpleProfiler",
)
_LAUNCHES = 7
_INNER = 3
_LONGER = 3
"""Times as many steps there: of other processes Linux tells CPU seconds in hundredths."""

_LATER = 10
"""Steps of the stages that are not timed, at least."""


class Turn(NamedTuple):
    """A fit on one rank: microseconds a step, CPU microseconds a step, and seconds from the last batch to the end."""

    step_us: float
    cpu_us: float
    end_s: float


class CountingToy(Toy):
    """Notes the CPU seconds where the ``steps`` that count begin and end, and when its last batch ended."""

    def __init__(
        self, steps: int, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        super().__init__()
        self.steps, self.cpu_s = steps, cpu_s
        self.used_s: list[float] = []
        self.ended = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx in (SKIP, SKIP + self.steps):
            self.used_s.append(self.cpu_s())

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended = time.perf_counter()

    def turn(self) -> Turn:
        """Now that ``fit`` has ended."""
        began, ended = self.used_s
        step_us = statistics.mean(self.step_seconds(SKIP)[: self.steps]) * 1e6
        return Turn(
            step_us,
            (ended - began) / self.steps * 1e6,
            time.perf_counter() - self.ended,
        )


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


def time_one(name: str, world: int, steps: int) -> Turn:
    """One contender's, on this rank."""
    toy = CountingToy(steps)
    gc.collect()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        quiet_trainer(world, folder, **options(name, steps, folder)).fit(
            toy, loader(SKIP + steps + _LATER)
        )
        return toy.turn()


Turns = dict[str, list[Turn]]
"""By contender and round; the first round is not counted."""


def in_turns(
    world: int, names: tuple[str, ...], rounds: int, steps: int
) -> list[Turns]:
    """Of each rank."""

    def work(rank: int) -> Turns:
        quieten()
        return interleaved(
            names, lambda name: time_one(name, world, steps), lambda done: done < rounds
        )

    return on_ranks(world, work)


def costs(turns: Turns) -> Table:
    """Of all contenders; the first of them is what the others add to, with the 95 % interval of the mean."""
    bare, *others = turns
    rows = [
        [bare, *_added(turns[bare], None)],
        *([name, *_added(turns[name], turns[bare])] for name in others),
    ]
    return text_table(
        ("", "µs a step (median)", "added", "CPU µs a step and rank", "added"), rows
    )


def _added(turns: Sequence[Turn], bare: Sequence[Turn] | None) -> list[str]:
    cells = []
    for which in ("step_us", "cpu_us"):
        taken = [getattr(turn, which) for turn in turns]
        cells.append(f"{statistics.median(taken):.0f}")
        more = (
            []
            if bare is None
            else [
                own - getattr(turn, which)
                for own, turn in zip(taken, bare, strict=True)
            ]
        )
        within = mean_interval(more) if more else None
        told = "" if within is None else f" [{within.low:+.0f}, {within.high:+.0f}]"
        cells.append(f"{statistics.fmean(more):+.0f}{told}" if more else "")
    return cells


def everyone_s() -> float:
    """CPU seconds of all that the launcher has started, and its own."""
    launcher = psutil.Process().parent()
    assert launcher is not None
    times = [
        each.cpu_times() for each in (launcher, *launcher.children(recursive=True))
    ]
    return sum(each.user + each.system for each in times)


def launched(bin_folder: Path, name: str, steps: int) -> Turn:
    """``bare`` or ``traceml``, in two processes that were launched for it."""
    here = [str(Path(__file__)), name, str(steps)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(bin_folder / "python"),
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            *here,
        ]
        if name == "traceml":
            command = [
                str(bin_folder / "traceml"),
                "run",
                "--nproc-per-node=2",
                here[0],
                "--args",
                *here[1:],
            ]
        done = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    said = [
        line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith("turn ")
    ]
    if not said:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return Turn(*map(float, said[0]))


def contend(name: str, steps: int) -> None:
    """In a launched process: the medians of a few fits, said by rank 0."""
    quieten()
    torch.set_num_threads(1)
    callbacks = []
    if name == "traceml":
        from traceml_ai.integrations import lightning as traceml

        traceml.init()
        callbacks = [traceml.TraceMLCallback]
    turns = []
    for _ in range(1 + _INNER):
        toy = CountingToy(steps, everyone_s)
        with tempfile.TemporaryDirectory() as folder:
            quiet_trainer(2, folder, callbacks=[each() for each in callbacks]).fit(
                toy, loader(SKIP + steps + 1)
            )
        turns.append(toy.turn())
    if os.environ["RANK"] == "0":
        step_us, cpu_us, end_s = (
            statistics.median(values) for values in zip(*turns[1:], strict=True)
        )
        print(f"\nturn {step_us:.1f} {cpu_us / 2:.1f} {end_s:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--traceml", type=Path)
    given = parser.parse_args()
    quieten()
    print(
        f"{device_name(torch.device('cpu'))}, {platform.platform()}, torch {torch.__version__}; two ranks"
    )
    print(
        f"{given.rounds} rounds of {given.steps} steps; the first round is not counted\n"
    )
    first, *_ = in_turns(2, (BARE, OURS, SIMPLE), given.rounds, given.steps)
    print(markdown(costs(first)))
    if given.traceml is not None:
        names = {
            "bare": "bare Trainer, DDP, launched by torchrun",
            "traceml": "TraceML, launched by it",
        }
        order = interleaved(
            names,
            lambda name: launched(given.traceml, name, _LONGER * given.steps),
            lambda n: n < _LAUNCHES,
        )
        print(markdown(costs({title: order[name] for name, title in names.items()})))
    print(markdown(ends_table()), end="")


def ends_table() -> Table:
    """How long ``fit`` takes to end: of one rank most of it is measuring what the machine can do at best."""
    rows: list[list[str]] = []
    alone_s: float | None = None
    for world in (1, 2, 8):
        ranks = in_turns(world, (BARE, OURS), 3, 20)
        first_s, *others_s = [
            statistics.median(turn.end_s for turn in turns[OURS]) for turns in ranks
        ]
        alone_s = first_s if alone_s is None else alone_s
        bare_s = max(
            statistics.median(turn.end_s for turn in turns[BARE]) for turns in ranks
        )
        others = f"{max(others_s):.2f}" if others_s else ""
        rows.append(
            [
                str(world),
                f"{bare_s:.2f}",
                f"{first_s:.2f}",
                others,
                f"{first_s - alone_s:+.2f}",
            ]
        )
    return text_table(
        (
            "ranks",
            "bare (s)",
            "lm_profiler, rank 0 (s)",
            "the slowest other rank (s)",
            "rank 0, more than alone (s)",
        ),
        rows,
    )


if __name__ == "__main__":
    if sys.argv[1:2] in (["bare"], ["traceml"]):
        contend(sys.argv[1], int(sys.argv[2]))
    else:
        main()

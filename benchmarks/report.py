"""How long `report` and the list of the tab in TensorBoard take to read and tabulate many runs.

    python -m benchmarks.report [runs] [rows]

Copies of one run's record, each with figures of its own, in folders such as a run leaves; then the whole command in a
fresh process, once to warm the file cache and five times measured. The target is 1,000 runs in under 3 s. Then the
tab's list of as many runs, asked for in TensorBoard's own application (target: 2 s); one table of `rows` rows in each
format of text; and as many rows of steps.csv: CPU seconds, which other programs of the machine change little, and how
much memory the process took at most, each in a process of its own.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lm_profiler.analysis.steps.summaries import model_of, summaries
from lm_profiler.record.quantities import PARTS, TIMED
from lm_profiler.record.run_record import (
    Environment,
    MemoryFacts,
    MemoryReading,
    ModelFacts,
    RunRecord,
    Steadiness,
    Throughput,
)
from lm_profiler.record.steps import StepRow, read_steps, write_steps
from lm_profiler.report.tables import formats
from lm_profiler.report.tables.table import Heading, Table, TableCell

RUNS, ROWS, ROUNDS, STEPS = 1000, 100_000, 5, 25
FORMATS = ("terminal", "markdown", "csv_text", "json_text", "latex")
SIZES = ("small", "medium", "large", "xl", "2.7B")


def rows(rng: random.Random) -> list[StepRow]:
    """Steps whose parts add up."""
    rows = []
    for step in range(1, STEPS + 1):
        parts = tuple(rng.uniform(0.9, 1.1) * 0.01 for _ in PARTS)
        seconds = (*parts, sum(parts))
        stage = "warmup" if step <= 5 else "measure"
        rows.append(StepRow(step, stage, seconds, seconds, 2048, (2**30, 2**31, 2**30)))
    return rows


def config(size: str, batch_size: int) -> dict[str, object]:
    """As long as a resolved config is."""
    trainer: dict[str, object] = {f"option_{number}": None for number in range(40)}
    model = {
        "size": size,
        "attention": "sdpa",
        "compile": False,
        "optimizer": "adamw",
        "d_model": None,
    }
    return {
        "trainer": trainer | {"precision": "bf16-mixed"},
        "model": {
            "class_path": "lm_profiler.training.LanguageModel",
            "init_args": model,
        },
        "data": {
            "class_path": "lm_profiler.training.FakeTokens",
            "init_args": {"batch_size": batch_size},
        },
    }


def record(number: int, steps: list[StepRow]) -> RunRecord:
    """A record such as a run leaves."""
    size, batch_size = SIZES[number % len(SIZES)], 1 + number // len(SIZES) % 8
    times = summaries(steps, "device", model_of(steps))
    return RunRecord(
        name=f"run{number}",
        status="ok",
        failure=None,
        verb="fit",
        started="2026-01-01T00:00:00+00:00",
        duration_s=10.0,
        command="python -m lm_profiler fit --config configs/small_bf16.yaml",
        config=config(size, batch_size),
        environment=Environment(
            versions={"torch": "2.13.0"},
            platform="Linux",
            cpu="CPU",
            cpu_count=8,
            threads=8,
            device_type="cuda",
            device_name="NVIDIA H100",
            device_bytes=80 * 2**30,
            driver="1",
            world_size=1,
            flags={},
            git_commit=None,
        ),
        model=ModelFacts(
            class_path="lm_profiler.training.LanguageModel",
            parameters=10**8,
            parameters_without_embedding=9 * 10**7,
            trainable_parameters=10**8,
            bytes=4 * 10**8,
            precision="bf16-mixed",
            optimizers=["AdamW"],
            accumulate_grad_batches=1,
        ),
        steps={"warmup": 5, "measure": 20},
        time=times,
        host_time=times,
        memory=MemoryFacts(
            measured=MemoryReading(
                allocated_peak=2**30, reserved_peak=2**31, resident_peak=2**30
            ),
            parts={part: MemoryReading(allocated_peak=2**30) for part in TIMED},
        ),
        throughput=Throughput(
            tokens_per_step=2048, tokens_per_s=2048 / (times["step"].median or 1.0)
        ),
        steadiness=Steadiness(
            word="steady",
            cut=0,
            drift=0.0,
            lag1=0.0,
            bias_of_mean=None,
            evidence="",
            recompilations=0,
        ),
    )


def write_runs(top: Path, runs: int) -> None:
    """``runs`` folders below ``top``."""
    rng = random.Random(0)
    for number in range(runs):
        folder = top / f"run{number}" / "version_0"
        (folder / "trace").mkdir(parents=True)
        steps = rows(rng)
        write_steps(folder / "steps.csv", steps)
        record(number, steps).write(folder / "run.json")


def seconds(*arguments: str) -> float:
    """How long one call takes, Python's start included."""
    began = time.perf_counter()
    subprocess.run(
        (sys.executable, "-m", "lm_profiler", "report", *arguments),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


def large_table(count: int) -> Table:
    """A run a row, as `report` has them."""
    headings = [
        Heading("name", "run"),
        Heading("step_s", "step (ms)", figures=True),
        Heading("status", "status"),
    ]
    rows = (
        [
            TableCell(f"run{at}", f"run{at}"),
            TableCell(at * 1e-6, f"{at * 1e-3:.3f}", at * 1e-6, at * 2e-6),
            TableCell("ok", "ok"),
        ]
        for at in range(count)
    )
    return Table(headings, list(rows))


def tab(logdir: str) -> Callable[[], int]:
    """Asks the tab for its list, as a browser does, and returns how many runs it has."""
    from tensorboard.backend.application import TensorBoardWSGI
    from tensorboard.plugins.base_plugin import TBContext
    from werkzeug.test import Client

    from lm_profiler.tensorboard.tab.plugin import LMProfilerPlugin

    client = Client(TensorBoardWSGI([LMProfilerPlugin(TBContext(logdir=logdir))]))
    return lambda: len(client.get("/data/plugin/lm_profiler/runs").json["runs"])


def cost(kind: str, count: int) -> None:
    """Print what one format, reading steps, or the tab's list of runs takes in this process."""
    if kind == "tab":
        with tempfile.TemporaryDirectory() as folder:
            write_runs(Path(folder), count)
            ask = tab(folder)
            began = time.process_time()
            listed = ask()
            taken = time.process_time() - began
            assert listed == count
    elif kind == "steps.csv":
        with tempfile.TemporaryDirectory() as folder:
            path, seconds_ = Path(folder) / "steps.csv", (0.01,) * len(TIMED)
            write_steps(
                path,
                (
                    StepRow(at, "measure", seconds_, seconds_, 2048, (1, 2, 3))
                    for at in range(count)
                ),
            )
            began = time.process_time()
            read_steps(path)
            taken = time.process_time() - began
    else:
        table = large_table(count)
        began = time.process_time()
        getattr(formats, kind)(table)
        taken = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{kind:<10} {count:,} rows: {taken:.1f} CPU s, at most {peak:,.0f} MiB",
        flush=True,
    )


def main() -> None:
    """Print the median and the range for several ways to call it."""
    if sys.argv[1:2] == ["--cost"]:
        cost(sys.argv[2], int(sys.argv[3]))
        return
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    count = int(sys.argv[2]) if len(sys.argv) > 2 else ROWS
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), runs)
        print(
            f"{runs} runs, {os.cpu_count()} cores, {ROUNDS} calls each: seconds, median [lowest, highest]"
        )
        picture = f"--plot phases --output {folder}/phases.png"
        for options in (
            "",
            "--pivot size batch_size",
            "--format csv",
            "--format markdown",
            "--warmup 0 5",
            picture,
        ):
            seconds(folder, *options.split())
            times = [seconds(folder, *options.split()) for _ in range(ROUNDS)]
            called = options.partition(" --output")[0]
            print(
                f"report {called:<26} {statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}]"
            )
    for kind, size in (
        ("tab", runs),
        *((kind, count) for kind in (*FORMATS, "steps.csv")),
    ):
        subprocess.run(
            (sys.executable, "-m", "benchmarks.report", "--cost", kind, str(size)),
            check=True,
        )


if __name__ == "__main__":
    main()

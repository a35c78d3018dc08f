"""What a run of many ranks costs: its files, reading them, and bringing the ranks together at its end.

    python -m benchmarks.ranks [ranks ...]

Simulated runs of 1,024 and 16,384 ranks with 50 measured steps after 5 of warm-up. Every reader is a fresh process,
called once to warm the file cache and three times measured: medians of its seconds, Python's start included, of its CPU
seconds, which other programs of the machine change less, and of the most memory that it took. The targets are 1 s and
300 MB at 1,024 ranks, and 5 s at 16,384. Then the end of a run, all ranks in one process: what each sends through the
store, and what rank 0 does with it; and who waits for whom, of 1,024 ranks at most, because to simulate more takes
minutes. First of all, where the columnar file takes over: both formats at growing numbers
of rows.
"""

from __future__ import annotations

import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import record
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    RankFinding,
    Ranks,
    RankSpread,
    RankTimes,
    RunRecord,
)
from lm_profiler.record.steps import (
    StepTable,
    as_parquet,
    read_rows,
    write_rows,
    write_steps,
)

RANKS, WARMUP, STEPS, ROUNDS, GPUS = (1024, 16384), 5, 50, 3, 8
_SIMULATED = 1024
"""Ranks, at most: their simulation grows with the square."""

ROWS = (500, 5_000, 20_000, 56_320)
_PEAK = """
import atexit, sys
atexit.register(lambda: sys.stderr.write(next(x for x in open("/proc/self/status") if x.startswith("VmHWM"))))
"""  # a child's ru_maxrss begins with what its parent held
READERS = {
    "report": "from lm_profiler.cli.main import main; import sys; sys.argv[1:] = ['report', A]; main()",
    "report --warmup 0 5": (
        "from lm_profiler.cli.main import main; import sys; sys.argv[1:] = ['report', A, '--warmup', '0', '5']; main()"
    ),
    "compare": "from lm_profiler.cli.main import main; import sys; sys.argv[1:] = ['compare', A, B]; main()",
    "tab: all runs": "from lm_profiler.tensorboard.tab import plugin; plugin.listing(TOP)",
    "tab: a run": "from lm_profiler.tensorboard.tab import plugin; plugin.view_of('run', TOP, 'a')",
    "tab: its ranks": "from lm_profiler.tensorboard.tab import plugin; plugin.view_of('ranks', TOP, 'a')",
    "tab: compare": "from lm_profiler.tensorboard.tab import plugin; plugin.comparison(TOP, ['a'], ['b'])",
}


def table(ranks: int, steps: int = WARMUP + STEPS, seed: int = 0) -> StepTable:
    """Steps of around 100 ms whose parts add up, by step and rank."""
    rng, count = np.random.default_rng(seed), ranks * steps
    parts = rng.normal(0.1 / len(PARTS), 0.001, (count, len(PARTS)))
    seconds = np.round(np.column_stack([parts, parts.sum(axis=1)]), 9)
    step = np.repeat(np.arange(1, steps + 1), ranks)
    return StepTable(
        step=step,
        stage=np.where(step > WARMUP, "measure", "warmup"),
        seconds=seconds,
        host_seconds=np.round(seconds * rng.normal(1.0, 0.01, (count, 1)), 9),
        tokens=np.full(count, 2048.0),
        memory=np.column_stack(
            [
                np.full(count, 2.0**30),
                np.full(count, 2.0**31),
                rng.integers(2**30, 2**31, count),
            ]
        ),
        rank=np.tile(np.arange(ranks), steps),
    )


def ranks_part(ranks: int) -> Ranks:
    """As much as a record says of who waits."""
    each = dict.fromkeys(PARTS, 0.01)
    shown = sorted({0, *range(7, 15), *range(ranks - 8, ranks)})
    spread = {
        part: RankSpread(least_s=0.009, median_s=0.01, largest_s=0.011, slowest=7)
        for part in PARTS
    }
    return Ranks(
        world=ranks,
        hosts={
            f"host-{at // GPUS}": list(range(at, min(at + GPUS, ranks)))
            for at in range(0, ranks, GPUS)
        },
        steps=STEPS,
        step_s=0.1,
        own=spread,
        waiting=spread,
        waiting_share=0.1,
        by_rank=[
            RankTimes(
                rank=rank,
                host=f"host-{rank // GPUS}",
                own_s=each,
                waiting_s=each,
                own_by_column_s=[0.1] * STEPS,
            )
            for rank in shown
        ],
        columns=list(range(WARMUP + 1, WARMUP + STEPS + 1)),
        finding=RankFinding(kind="equal"),
        witness="arrivals at collectives",
    )


def run_record(number: int, rows: StepTable, ranks: int) -> RunRecord:
    """Such as a run of so many ranks leaves."""
    # of every fifth the options are alike
    plain = record(number * 5, list(rows.select(rows.rank == 0)))
    assert plain.environment is not None
    where = plain.environment.model_copy(update={"world_size": ranks})
    update = {
        "environment": where,
        "rank_step_s": [0.1 + 1e-6 * r for r in range(ranks)],
        "ranks": ranks_part(ranks),
    }
    return plain.model_copy(update=update)


def write_run(folder: Path, number: int, ranks: int) -> None:
    """A run's folder."""
    folder.mkdir()
    rows = table(ranks, seed=number)
    write_rows(folder, rows, all_ended=True)
    run_record(number, rows, ranks).write(folder / "run.json")


class Cost(NamedTuple):
    """Of a process: seconds, of them on a CPU, and the most MiB that it held."""

    seconds: float
    cpu_s: float
    mib: float


def measured(code: str) -> Cost:
    """What a fresh process takes that runs ``code``."""
    began = time.perf_counter()
    command = (sys.executable, "-c", _PEAK + code)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        last = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, code, stderr=last)
    taken = time.perf_counter() - began
    return Cost(taken, usage.ru_utime + usage.ru_stime, int(last.split()[-2]) / 1024)


def costs(code: str) -> tuple[Cost, list[float]]:
    """The median of some calls, each figure for itself, and the seconds of each."""
    measured(code)
    taken = [measured(code) for _ in range(ROUNDS)]
    return Cost(*map(statistics.median, zip(*taken, strict=True))), sorted(
        each.seconds for each in taken
    )


def readers(ranks: int) -> None:
    """Print what each reader takes of two such runs."""
    with tempfile.TemporaryDirectory() as top:
        for number, name in enumerate(("a", "b")):
            write_run(Path(top) / name, number, ranks)
        sizes = {
            path.name: path.stat().st_size
            for path in sorted((Path(top) / "a").iterdir())
        }
        told = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
        print(
            f"\n{ranks:,} ranks x {STEPS} steps ({(WARMUP + STEPS) * ranks:,} rows): {told}"
        )
        where = f"from pathlib import Path; TOP = Path({top!r}); A, B = {top + '/a'!r}, {top + '/b'!r}; "
        for name, code in READERS.items():
            cost, seconds = costs(where + code)
            span = f"[{seconds[0]:.2f}, {seconds[-1]:.2f}]"
            took = f"{cost.seconds:6.2f} s {span:<14} {cost.cpu_s:6.2f} CPU s"
            print(f"{name:<20} {took} {cost.mib:6.0f} MiB", flush=True)


def formats() -> None:
    """Print what both formats take of growing numbers of rows, in fresh processes less the start of an empty one."""
    start = "from lm_profiler.record.steps import read_rows; import sys; from pathlib import Path; "
    base, _ = costs(start)
    print("rows       CSV: CPU s, MiB, bytes a row    Parquet: CPU s, MiB, bytes a row")
    with tempfile.TemporaryDirectory() as top:
        for count in ROWS:
            rows, line = (
                table(max(count // (WARMUP + STEPS), 1))[:count],
                f"{count:>6,}  ",
            )
            for kind in ("steps.csv", "steps.parquet"):
                folder = Path(top) / f"{kind}{count}"
                folder.mkdir()
                if kind == "steps.csv":
                    write_steps(folder / kind, rows)
                else:
                    (folder / kind).write_bytes(as_parquet(rows))
                cost, _ = costs(f"{start}read_rows(Path({str(folder)!r}))")
                size = (folder / kind).stat().st_size / len(rows)
                line += f" {cost.cpu_s - base.cpu_s:12.2f} {cost.mib - base.mib:8.0f} {size:6.0f}"
            print(line, flush=True)


def end(ranks: int) -> None:
    """Print what bringing together takes at the end, all ranks in this process and the store on this machine."""
    from torch.distributed import TCPStore

    from lm_profiler.analysis.steps.summaries import (
        mean_over_ranks,
        model_of,
        rank_medians,
        step_figures,
    )
    from lm_profiler.callbacks.gather import Exchange
    from lm_profiler.callbacks.instruments.instrument import Measured

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rows = table(ranks)
    of_rank: list[NDArray[np.intp]] = np.split(
        np.argsort(rows.rank, kind="stable"), ranks
    )
    plan = {"warmup": WARMUP, "measure": STEPS}
    first = Exchange(store, 0, ranks)
    took: dict[str, float] = {}

    def step(name: str, began: float) -> float:
        took[name] = time.perf_counter() - began
        return time.perf_counter()

    own = Measured(rows=rows.select(of_rank[0]), steps_planned=plan)
    at = time.perf_counter()
    for rank in range(1, ranks):
        each = replace(first, rank=rank)
        each._run = first._run
        each.gather(Measured(rows=rows.select(of_rank[rank]), steps_planned=plan))
    at = step("all other ranks send", at)
    merged = StepTable.from_rows(first.gather(own).rows)
    at = step("rank 0 receives and joins", at)
    means = mean_over_ranks(merged.of_stages("measure").timed, ranks)
    step_figures(means, model_of(means))
    rank_medians(merged.of_stages("measure"))
    at = step("means, medians, summaries", at)
    with tempfile.TemporaryDirectory() as top:
        at = time.perf_counter()
        write_rows(Path(top), merged, all_ended=True)
        step("the file", at)
        assert len(read_rows(Path(top))) == len(rows)
    sent = len(pickle.dumps(own))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())
    print(
        f"end of {ranks:,} ranks, {sent / 1e3:.1f} kB each: {told}; at most {peak:,.0f} MiB",
        flush=True,
    )


def waiting(ranks: int) -> None:
    """Print what it takes rank 0 to find who waits for whom, under DDP with three buckets."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from simulated_ranks import simulate, usual

    from lm_profiler.analysis.ranks.ranks_summary import ranks_of

    sent = [
        pickle.dumps(timeline)
        for timeline in simulate(usual(ranks, STEPS, noise=0.05)).timelines
    ]
    began = time.process_time()
    ranks_of([pickle.loads(timeline) for timeline in sent], ranks, overlap=True)
    took_s = time.process_time() - began
    print(
        f"who waits for whom, {ranks:,} ranks: {len(sent[0]) / 1e3:.1f} kB each, {took_s:.2f} CPU s",
        flush=True,
    )


def main() -> None:
    """All of it, for each number of ranks."""
    if sys.argv[1:2] == ["--end"]:
        end(int(sys.argv[2]))
        return
    counts = [int(given) for given in sys.argv[1:]] or RANKS
    print(f"{os.cpu_count()} cores")
    if not sys.argv[1:]:
        formats()
    for ranks in counts:
        readers(ranks)
    for ranks in (8, *counts):
        subprocess.run(
            (sys.executable, "-m", "benchmarks.ranks", "--end", str(ranks)), check=True
        )
    for ranks in (8, *(ranks for ranks in counts if ranks <= _SIMULATED)):
        waiting(ranks)


if __name__ == "__main__":
    main()

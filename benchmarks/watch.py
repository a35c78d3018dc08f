"""What it costs to watch a training, and how often its events are wrong.

    python -m benchmarks.watch cost [--rounds 9] [--steps 2000]
    python -m benchmarks.watch alarms [--steps 1000000]
    python -m benchmarks.watch faults [--loops 100]

``cost``: microseconds a step above a bare Trainer, beside other instruments, as benchmarks/overhead measures them, with
the watch already running when the clock starts. ``alarms``: events of steady steps, independent, with AR(1) noise of
0.6 and with Student's t of three degrees, and how far memory and disk grow over that many steps. ``faults``: seeded
loops with one planted fault each, and whether kind and part are told right; simulated, because real ones take days.
"""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter

from benchmarks import overhead
from lm_profiler.analysis.watch.ledger import CHECKPOINTS, VALIDATION, Ledger, NamedSpan
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
    WatchOptions,
)
from lm_profiler.callbacks.watch_writer import Handed, WatchWriter
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import StepCounters
from lm_profiler.record.watch_files import WatchEvent

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])
STEP_S = 0.1


def watched(folder: str) -> dict[str, Any]:
    """Trainer options of the watch, whose stages are over before the clock starts."""
    callback = TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=3), MemoryOptions(steps=0), TraceOptions(steps=0),
        log_dir=folder, quiet=True, actions=ActionsOptions(steps=0), watch=WatchOptions(traces=False),
    )  # fmt: skip
    return {"logger": False, "callbacks": [callback]}


def cost(rounds: int, steps: int) -> None:
    """Print the table of costs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    known = overhead.contenders(steps)
    given = {name: known[name] for name in ("bare Trainer", "SimpleProfiler", "DeviceStatsMonitor")}
    given["lm_profiler, watch=True"] = watched

    def microseconds(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return overhead.time_one(given[name](folder), steps, "cpu")

    results = overhead.interleaved(given, microseconds, lambda done: done < rounds)
    print(overhead.markdown(overhead.table(results)), end="")


def noise(kind: str, n: int, seed: int, scale: float = 0.02) -> NDArray[np.float64]:
    """Logarithms of steady steps."""
    rng = np.random.default_rng(seed)
    drawn = scale * (rng.standard_t(3, n) if kind == "heavy tail" else rng.standard_normal(n))
    return np.asarray(lfilter([0.8], [1.0, -0.6], drawn) if kind == "AR(1) 0.6" else drawn)


CODES = (at.DATA, at.LEAVE, at.TRANSFER, at.LEAVE, at.FORWARD, at.LEAVE, at.BACKWARD, at.LEAVE, at.CLIP, at.CLIPPED,
         at.OPTIMIZED, at.OPTIMIZED, at.END)  # fmt: skip


def alarms(steps: int) -> None:
    """Print events of steady steps, and what memory and disk took, through the writer that a training has."""
    for kind in ("independent", "AR(1) 0.6", "heavy tail"):
        step_s = STEP_S * np.exp(noise(kind, steps, 0))
        with tempfile.TemporaryDirectory() as name:
            now_ns, folder = 0, Path(name)
            writer = WatchWriter(
                folder, 0, 1, Timeline(lambda: now_ns), WatchedRun(), Ledger(0),  # noqa: B023 - called at once
                WatchOptions(traces=False), print, torch.device("cpu"),
            )  # fmt: skip
            before = 0
            for some in np.array_split(step_s, max(steps // 1000, 1)):
                marks: list[int] = []
                for seconds in some.tolist():
                    each_ns = round(seconds * 1e9 / (len(CODES) - 1))
                    for place, code in enumerate(CODES):
                        marks += (code, now_ns + place * each_ns)
                    now_ns += (len(CODES) - 1) * each_ns
                writer.take(Handed(now_ns, marks, held_bytes=2**30))
                before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            disk = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            windows = (folder / "watch.jsonl").stat().st_size / 2**20
            events = sum(path.read_text().count("\n") for path in folder.glob("events*.jsonl"))
            sizes = f"memory +{grew:.0f} MiB, disk {disk:.1f} MiB, of it windows {windows:.1f} MiB"
            print(f"{kind}: {events} events in {steps:,} steps, {sizes}", flush=True)


FAULTS = ("slow phase", "level 2%", "level 5%", "level 20%", "leak", "validation", "checkpoint", "gc", "contention")


def one_fault(kind: str, seed: int, steps: int = 6000) -> tuple[Any, Any]:
    """Plant a fault into a loop; return what is to be told and what is, each as kind, part and cause."""
    rng = np.random.default_rng(seed)
    parts_s = STEP_S * SHARES * np.exp(0.01 * rng.standard_normal((steps, len(PARTS))))
    part, begin, every = int(rng.choice([0, 2, 4, 6])), int(rng.integers(2500, 4500)), int(rng.integers(150, 400))
    run, counters, spans, told = WatchedRun(workers=0), {}, {}, list[WatchEvent]()
    slow = range(begin, steps - 50, every)
    want: tuple[Any, ...] = ("slow step", PARTS[part], None)
    if kind.startswith("level"):
        parts_s[begin:, part] += STEP_S * float(kind[6:-1]) / 100
        want = ("level", PARTS[part], None)
    elif kind == "leak":
        held = 2**31 + 2**18 * rng.uniform(0.5, 4) * np.arange(4000)
        told = [each for s, b in enumerate(held.tolist()) for each in run.held(float(s), int(b), lambda: None)]
        want = ("memory", None, None)
    elif kind == "validation":
        for s in range(12):
            told += run.outside(VALIDATION, [float((3.0 if s < 10 else 6.0) * rng.uniform(0.95, 1.05))], float(s))
        want = ("validation", None, None)
    elif kind == "checkpoint":
        part, want = 7, ("slow step", "other", CHECKPOINTS)
    elif kind in ("gc", "contention"):
        want = ("slow step", PARTS[part], "garbage" if kind == "gc" else "waiting for a CPU")
    if want[0] == "slow step":
        excess_s = STEP_S * float(rng.uniform(0.5, 3.0))
        usual = {"wall_s": STEP_S, "between_s": 0.0, "gc_s": 0.0, "cpu_s": STEP_S, "cpu_wait_s": 0.0}
        counters = {s: StepCounters(step=s + 1, rank=0, **usual) for s in range(steps)}
        for s in slow:
            parts_s[s, part] += excess_s
            if kind == "gc":
                counters[s] = StepCounters(step=s + 1, rank=0, **usual | {"gc_s": excess_s}, gc_generation=2)
            if kind == "contention":
                counters[s] = StepCounters(step=s + 1, rank=0, **usual | {"cpu_wait_s": excess_s})
            if kind == "checkpoint":
                spans[s] = excess_s
    seconds = np.column_stack([parts_s, parts_s.sum(axis=1)])
    ends = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    ns = np.column_stack([np.concatenate([[0], ends[:-1]]), ends])
    for first in range(0, steps, 50):
        here = slice(first, first + 50)
        inside = [NamedSpan(int(ns[s, 1]) - int(spans[s] * 1e9), int(ns[s, 1]) - 1, CHECKPOINTS)
                  for s in range(first, first + 50) if s in spans]  # fmt: skip
        seen = [counters[s] for s in range(first, first + 50) if s in counters]
        told += run.add(ns[here], seconds[here], seen, inside)
    return want, {(each.kind, each.part, each.cause) for each in told}


def faults(loops: int) -> None:
    """Print how many faults are told right: the kind, the part and the cause, and nothing else."""
    right, wrong = Counter[str](), []
    for seed in range(loops):
        kind = FAULTS[seed % len(FAULTS)]
        (of, part, cause), told = one_fault(kind, seed)
        good = told and all(t[:2] == (of, part) and (cause is None or cause in (t[2] or "")) for t in told)
        right[kind] += bool(good)
        wrong += [] if good else [f"seed {seed}, {kind}: wanted {(of, part, cause)}, told {told or 'nothing'}"]
    print("\n".join([f"{right.total()} of {loops} told right: {dict(right)}", *wrong]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "alarms", "faults"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--loops", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.what == "cost":
        cost(arguments.rounds, arguments.steps or 2000)
    elif arguments.what == "alarms":
        alarms(arguments.steps or 1_000_000)
    else:
        faults(arguments.loops)


if __name__ == "__main__":
    main()

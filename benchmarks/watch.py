"""What it costs to watch a training, and how often its events are wrong.

    python -m benchmarks.watch cost [--rounds 9] [--steps 2000] [--traceml FOLDER]
    python -m benchmarks.watch alarms [--steps 1000000]
    python -m benchmarks.watch faults [--loops 100]
    python -m benchmarks.watch loops [--steps 12000]

``cost``: microseconds a step above a bare Trainer, beside other instruments, as benchmarks/overhead measures them, with
the watch already running when the clock starts. ``alarms``: events of steady steps, independent, with AR(1) noise of
0.6 and with Student's t of three degrees, how far memory and disk grow over that many steps, and whether the last
steps cost more than the first. ``faults``: seeded loops with one planted fault each, and whether kind and part are told
right; simulated, because real ones take days. ``loops``: real loops of 2 to 6 ms a step with one planted trouble each
(``watch_loops``), each also with its rows resampled: steps between the planted ones are drawn anew from their hundred
neighbours. A trouble is right if its events have the phase, the step (within 3) and the size (within 10 %). The last
line counts the changes of level that noise alone causes: the same steps with the median of every hundred made equal.

TraceML replaces functions of torch and has a process of its own, so its turns are launches of ``traceml run``, beside
those of a bare Trainer and of the watch in processes of their own. ``--traceml`` is the folder of
``pip install --target FOLDER --no-deps traceml-ai msgspec nvidia-ml-py``.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter

from benchmarks import overhead, watch_loops
from lm_profiler.analysis.watch.ledger import (
    CHECKPOINTS,
    EPOCH_TURN,
    VALIDATION,
    Ledger,
    NamedSpan,
)
from lm_profiler.analysis.watch.rank_reports import RankReports
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
    WatchOptions,
)
from lm_profiler.callbacks.watch_writer import HandOver, WatchWriter
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.counter_table import CounterTable
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import StepCounters
from lm_profiler.record.watch_files import (
    WatchEvent,
    WatchStatus,
    latest_events,
    read_events,
    read_last_steps,
)
from lm_profiler.report.run.watch_tables import event_text

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])
STEP_S = 0.1


def watched(folder: str) -> dict[str, Any]:
    """Trainer options of the watch, whose stages are over before the clock starts."""
    callback = TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=3), MemoryOptions(steps=0), TraceOptions(steps=0),
        log_dir=folder, quiet=True, actions=ActionsOptions(steps=0), watch=WatchOptions(traces=False),
    )  # fmt: skip
    return {"logger": False, "callbacks": [callback]}


LAUNCHED = {
    "bare Trainer, launched": "bare",
    "lm_profiler, watch=True, launched": "watch",
    "TraceML, launched": "traceml",
}


def launched(site: Path, name: str, steps: int) -> float:
    """Microseconds a step of a contender in a process that was launched for it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(site)]),
    }
    with tempfile.TemporaryDirectory() as folder:
        # not this file: beside it stands another `statistics`
        script = Path(folder) / "contender.py"
        script.write_text(
            f"from benchmarks.watch import one\n\none({name!r}, {steps})\n",
            encoding="utf-8",
        )
        command = [
            sys.executable,
            *([str(site / "bin" / "traceml"), "run"] if name == "traceml" else []),
            str(script),
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
        line.split()[1] for line in done.stdout.splitlines() if line.startswith("took ")
    ]
    if not said:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return float(said[0])


def one(name: str, steps: int) -> None:
    """Print what a step of the contender takes, of a process that was launched for it."""
    quieten()
    options: dict[str, Any] = {"logger": False}
    if name == "traceml":
        from traceml_ai.integrations import lightning as traceml

        traceml.init()
        options["callbacks"] = [traceml.TraceMLCallback()]
    with tempfile.TemporaryDirectory() as folder:
        took_us = overhead.time_one(
            watched(folder) if name == "watch" else options, steps, "cpu"
        )
    print(f"\ntook {took_us:.1f}", flush=True)


def quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def cost(rounds: int, steps: int, traceml: Path | None) -> None:
    """Print the table of costs."""
    quieten()
    known = overhead.contenders(steps)
    given = {
        name: known[name]
        for name in ("bare Trainer", "SimpleProfiler", "DeviceStatsMonitor")
    }
    given["lm_profiler, watch=True"] = watched

    def microseconds(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return overhead.time_one(given[name](folder), steps, "cpu")

    results = overhead.interleaved(given, microseconds, lambda done: done < rounds)
    print(overhead.markdown(overhead.table(results)), end="")
    if traceml is not None:
        results = overhead.interleaved(
            LAUNCHED,
            lambda name: launched(traceml, LAUNCHED[name], steps),
            lambda done: done < rounds,
        )
        print(overhead.markdown(overhead.table(results)), end="")


def noise(kind: str, n: int, seed: int, scale: float = 0.02) -> NDArray[np.float64]:
    """Logarithms of steady steps."""
    rng = np.random.default_rng(seed)
    drawn = scale * (
        rng.standard_t(3, n) if kind == "heavy tail" else rng.standard_normal(n)
    )
    return np.asarray(
        lfilter([0.8], [1.0, -0.6], drawn) if kind == "AR(1) 0.6" else drawn
    )


CODES = (at.DATA, at.LEAVE, at.TRANSFER, at.LEAVE, at.FORWARD, at.LEAVE, at.BACKWARD, at.LEAVE, at.CLIP, at.LEAVE,
         at.OPTIMIZER, at.OPTIMIZED, at.END)  # fmt: skip


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
            before, trains_us, thread_us = 0, [], []
            for some in np.array_split(step_s, max(steps // 1000, 1)):
                marks: list[tuple[int, int]] = []
                for seconds in some.tolist():
                    each_ns = round(seconds * 1e9 / (len(CODES) - 1))
                    marks += [
                        (code, now_ns + place * each_ns)
                        for place, code in enumerate(CODES)
                    ]
                    now_ns += (len(CODES) - 1) * each_ns
                began_ns = time.process_time_ns()
                for mark in marks:
                    writer.timeline.note(mark)
                hand_over = HandOver(
                    now_ns, writer.timeline.take_marks(), held_bytes=2**30
                )
                trained_ns = time.process_time_ns()
                writer.take(hand_over)
                trains_us.append((trained_ns - began_ns) * 1e-3 / len(some))
                thread_us.append(
                    (time.process_time_ns() - trained_ns) * 1e-3 / len(some)
                )
                before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            disk = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            windows = (folder / "watch.jsonl").stat().st_size / 2**20
            events = sum(
                path.read_text().count("\n") for path in folder.glob("events*.jsonl")
            )
            sizes = f"memory +{grew:.0f} MiB, disk {disk:.1f} MiB, of it windows {windows:.1f} MiB"
            print(f"{kind}: {events} events in {steps:,} steps, {sizes}", flush=True)
            for who, us in (
                ("marks and hand-over", trains_us),
                ("the thread", thread_us),
            ):
                early, late = (
                    np.median(us[1 : max(len(us) // 10, 2)]),
                    np.median(us[-max(len(us) // 10, 1) :]),
                )
                print(
                    f"  {who}: {early:.2f} µs of CPU a step in the first tenth, {late:.2f} in the last",
                    flush=True,
                )


FAULTS = ("slow phase", "level 2%", "level 5%", "level 20%", "leak", "validation", "checkpoint", "gc", "contention",
          "stall", "slow rank", "epoch turn")  # fmt: skip
STANDS = {
    "data": (at.DATA,),
    "forward": (at.DATA, at.LEAVE, at.FORWARD),
    "backward": (at.DATA, at.LEAVE, at.FORWARD, at.LEAVE, at.BACKWARD),
    "validation": (at.DATA, at.OUTSIDE),
}


def one_stall(rng: np.random.Generator) -> tuple[Any, list[WatchEvent]]:
    """Let training stand still somewhere for 100 s, after some steps; return what is to be told and what is."""
    where, now_ns = str(rng.choice(list(STANDS))), 0
    with tempfile.TemporaryDirectory() as name:
        timeline = Timeline(lambda: now_ns)
        writer = WatchWriter(
            Path(name),
            0,
            1,
            timeline,
            WatchedRun(),
            Ledger(0),
            WatchOptions(traces=False),
            print,
            torch.device("cpu"),
        )
        for code in (*CODES * int(rng.integers(20, 100)), *STANDS[where]):
            now_ns += round(STEP_S * 1e9 / len(CODES) * rng.uniform(0.9, 1.1))
            timeline.mark(code)
            if code == at.END:
                writer.take(HandOver(now_ns, timeline.take_marks()))
        for _ in range(100):
            now_ns += 1_000_000_000
            writer._check_for_stall()
        return ("stall", where, None), read_events(Path(name))


def one_slow_rank(rng: np.random.Generator) -> tuple[Any, list[WatchEvent]]:
    """Let one of 2 to 8 ranks be 10 to 50 % late in a phase from some minute on: the others wait in backward."""
    ranks, looks = RankReports(), 40
    number, part = (
        int(rng.integers(2, 9)),
        int(rng.choice([PARTS.index("data"), PARTS.index("forward")])),
    )
    late, begins = int(rng.integers(number)), int(rng.integers(5, 30))
    seconds, told = np.zeros((number, len(PARTS))), list[WatchEvent]()
    for look in range(looks):
        own_s = (
            STEP_S * SHARES * np.exp(0.01 * rng.standard_normal((number, len(PARTS))))
        )
        if look >= begins:
            own_s[late, part] += STEP_S * float(rng.uniform(0.1, 0.5))
        before_s = own_s[:, : PARTS.index("backward")].sum(axis=1)
        # where gradients are averaged
        own_s[:, PARTS.index("backward")] += before_s.max() - before_s
        seconds += 100 * own_s
        reports = {
            rank: WatchStatus(
                rank=rank, began_s=0.0, written_s=30.0 * look, steps=100 * (look + 1), timed=100 * (look + 1),
                seconds=dict(zip(PARTS, seconds[rank].tolist(), strict=True)),
            )
            for rank in range(number)
        }  # fmt: skip
        told += ranks.judge(30.0 * look, reports)
    right = all(each.rank == late for each in told)
    return (
        "rank late" if right else f"rank late, of rank {late}",
        PARTS[part],
        None,
    ), told


def one_fault(kind: str, seed: int, steps: int = 6000) -> tuple[Any, Any]:
    """Plant a fault into a loop; return what is to be told and what is, each as kind, part and cause."""
    rng = np.random.default_rng(seed)
    if kind in ("stall", "slow rank"):
        wanted, events = (one_stall if kind == "stall" else one_slow_rank)(rng)
        return wanted, {(each.kind, each.part, None) for each in events}
    parts_s = STEP_S * SHARES * np.exp(0.01 * rng.standard_normal((steps, len(PARTS))))
    part, begin, every = (
        int(rng.choice([0, 2, 4, 6])),
        int(rng.integers(2500, 4500)),
        int(rng.integers(150, 400)),
    )
    run, counters, spans, told = WatchedRun(workers=0), {}, {}, list[WatchEvent]()
    slow = range(begin, steps - 50, every)
    want: tuple[Any, ...] = ("slow step", PARTS[part], None)
    if kind.startswith("level"):
        parts_s[begin:, part] += STEP_S * float(kind[6:-1]) / 100
        want = ("level", PARTS[part], None)
    elif kind == "leak":
        held = 2**31 + 2**18 * rng.uniform(0.5, 4) * np.arange(4000)
        told = [
            each
            for s, b in enumerate(held.tolist())
            for each in run.add_held_bytes(float(s), int(b), lambda: None)
        ]
        want = ("memory", None, None)
    elif kind in (VALIDATION, EPOCH_TURN):
        for s in range(12):
            told += run.add_durations(
                kind,
                [float((3.0 if s < 10 else 6.0) * rng.uniform(0.95, 1.05))],
                float(s),
            )
        want = (kind, None, None)
    elif kind == "checkpoint":
        part, want = 7, ("slow step", "other", CHECKPOINTS)
    elif kind in ("gc", "contention"):
        want = (
            "slow step",
            PARTS[part],
            "garbage" if kind == "gc" else "waiting for a CPU",
        )
    if want[0] == "slow step":
        excess_s = STEP_S * float(rng.uniform(0.5, 3.0))
        usual = {
            "wall_s": STEP_S,
            "between_s": 0.0,
            "gc_s": 0.0,
            "cpu_s": STEP_S,
            "cpu_wait_s": 0.0,
        }
        counters = {s: StepCounters(step=s + 1, rank=0, **usual) for s in range(steps)}
        for s in slow:
            parts_s[s, part] += excess_s
            if kind == "gc":
                counters[s] = StepCounters(
                    step=s + 1, rank=0, **usual | {"gc_s": excess_s}, gc_generation=2
                )
            if kind == "contention":
                counters[s] = StepCounters(
                    step=s + 1, rank=0, **usual | {"cpu_wait_s": excess_s}
                )
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
        told += run.add(
            ns[here], seconds[here], CounterTable.from_counters(seen), inside
        )
    told = latest_events([*told, *run.finish()])
    return want, {(each.kind, each.part, each.cause) for each in told}


def faults(loops: int) -> None:
    """Print how many faults are told right: the kind, the part and the cause, and nothing else."""
    right, wrong = Counter[str](), []
    for seed in range(loops):
        kind = FAULTS[seed % len(FAULTS)]
        (of, part, cause), told = one_fault(kind, seed)
        good = told and all(
            t[:2] == (of, part) and (cause is None or cause in (t[2] or ""))
            for t in told
        )
        right[kind] += bool(good)
        wrong += (
            []
            if good
            else [
                f"seed {seed}, {kind}: wanted {(of, part, cause)}, told {told or 'nothing'}"
            ]
        )
    print("\n".join([f"{right.total()} of {loops} told right: {dict(right)}", *wrong]))


def loops(steps: int) -> None:
    """Print what was reported of each planted trouble in a real loop, and of the same rows resampled."""
    quieten()
    right = Counter[str]()
    noise_events = 0
    steps_without_levels = 0
    for name, plant in watch_loops.plants(steps).items():
        with tempfile.TemporaryDirectory() as folder:
            began_s = watch_loops.train(Path(folder), plant, steps)
            (run,) = [path.parent for path in Path(folder).glob("**/watch.json")]
            events = read_events(run)
            rows = read_last_steps(run)
        clocked_plant = plant.with_clocked_changes(began_s)
        noise_events += len(level_events_of_noise(rows))
        steps_without_levels += len(rows)
        reports = {"as it ran": events, "resampled": resampled_events(rows, plant)}
        for how, reported in reports.items():
            missing = watch_loops.missing(clocked_plant, reported)
            right[how] += not missing
            others = len(reported) - watch_loops.planted_events(plant)
            print(
                f"{name}, {how}: {'; '.join(missing) or 'right'}; {max(others, 0)} other events",
                flush=True,
            )
            for event in reported:
                print(f"    step {event.step:,}: {event_text(event)}", flush=True)
    print(dict(right), f"of {len(watch_loops.plants(steps))}")
    print(
        f"changes of level where there are none: {noise_events} in {steps_without_levels:,} steps"
    )


def resampled_events(
    rows: NDArray[np.void], plant: watch_loops.Plant
) -> list[WatchEvent]:
    """Return the events of the same loop in which each step without a trouble is another one near it."""
    rng = np.random.default_rng(0)
    planted = plant.planted_steps()
    order = np.arange(len(rows))
    for index, step in enumerate(rows["step"].tolist()):
        near = index // 100 * 100 + int(rng.integers(100))
        is_free = (
            step not in planted
            and near < len(rows)
            and int(rows["step"][near]) not in planted
        )
        if is_free and not plant.changes_within(index // 100 * 100, 100):
            order[index] = near
    return replayed_events(rows["seconds"][order].astype(float), int(rows["step"][0]))


def level_events_of_noise(rows: NDArray[np.void]) -> list[WatchEvent]:
    """Return the changes of level that are reported of the same steps without any: each is one of noise alone.

    Every hundred steps are scaled to the median of all.
    """
    seconds = rows["seconds"].astype(float)
    whole_hundreds = len(seconds) // 100 * 100
    seconds = seconds[:whole_hundreds]
    step_s = seconds[:, -1]
    levels_s = np.median(step_s.reshape(-1, 100), axis=1)
    scales = np.median(step_s) / np.repeat(levels_s, 100)
    events = replayed_events(seconds * scales[:, None], int(rows["step"][0]))
    return [event for event in events if event.kind == "level"]


def replayed_events(seconds: NDArray[np.float64], first_step: int) -> list[WatchEvent]:
    """Return the events of steps that take (n, TIMED) ``seconds``."""
    ends = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    ns = np.column_stack([np.concatenate([[0], ends[:-1]]), ends])
    run = WatchedRun(workers=0)
    run.skip(first_step - 1)
    events: list[WatchEvent] = []
    for first in range(0, len(seconds), 250):
        chunk = slice(first, first + 250)
        events += run.add(ns[chunk], seconds[chunk])
    return latest_events([*events, *run.finish()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "alarms", "faults", "loops"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--loops", type=int, default=100)
    parser.add_argument("--traceml", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "cost":
        cost(arguments.rounds, arguments.steps or 2000, arguments.traceml)
    elif arguments.what == "alarms":
        alarms(arguments.steps or 1_000_000)
    elif arguments.what == "loops":
        loops(arguments.steps or 12_000)
    else:
        faults(arguments.loops)


if __name__ == "__main__":
    main()

"""How far `improve` can be trusted: its search among simulated programs, whose times and best setting are known.

    python -m benchmarks.improve [--searches 400]

Prints Markdown: how often a search accepts a change that does not make the step faster, on machines of every kind; how
close to the best setting it ends, after how many cells (runs, each in a process of its own); and how often the
intervals hold the truth.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.improve.decision import NumericsCheck, TimedRun
from lm_profiler.improve.search import Searcher

Options = Mapping[str, str]
Program = Callable[[Options], float]

VALUES = {
    "precision": ("bf16-mixed",),
    "compile": ("default", "reduce-overhead"),
    "fused": ("true",),
    "attention": ("sdpa",),
    "num_workers": ("2", "4"),
    "pin_memory": ("true",),
    "batch_size": ("2", "4"),
    "zero_grad": ("to_none",),
    "clipping": ("foreach",),
}
STEPS = 30
BUDGETS = (40, 120, 400)


@dataclass(frozen=True)
class Machine:
    """Noise, as stds of logarithms.

    Attributes:
        processes: Of processes of one setting.
        steps: Of steps of one process.
        slow: Share of processes beside a neighbour: they take twice as long on average.
        drift: How far the machine goes up and down, over a hundred cells.
        uneven: By how much processes differ more under half of the changes.
    """

    processes: float = 0.01
    steps: float = 0.02
    slow: float = 0.0
    drift: float = 0.0
    uneven: float = 1.0


MACHINES = {
    "processes differ by 1 %": Machine(),
    "processes differ by 5 %": Machine(0.05, 0.05),
    "1 %, and three times that under half of the changes": Machine(uneven=3.0),
    "5 %, and three times that under half of the changes": Machine(
        0.05, 0.05, uneven=3.0
    ),
    "1 %, one process in ten is slow": Machine(slow=0.1),
    "1 %, the machine goes up and down by 10 %": Machine(drift=0.1),
}


def nothing(options: Options) -> float:
    """No change helps or harms."""
    return 1.0


def harm(options: Options) -> float:
    """What does anything makes the step slower."""
    slower = {"precision": 1.2, "compile": 1.05, "attention": 1.02}
    return math.prod(slower.get(group, 1.0) for group in options)


def independent(options: Options) -> float:
    """Each change saves its share, whatever the others do; four do nothing."""
    shares = {
        ("precision", "bf16-mixed"): 0.65,
        ("compile", "default"): 0.8,
        ("compile", "reduce-overhead"): 0.75,
        ("attention", "sdpa"): 0.9,
        ("fused", "true"): 0.95,
        ("batch_size", "2"): 0.95,
        ("batch_size", "4"): 0.92,
    }
    return math.prod(shares.get(change, 1.0) for change in options.items())


def hidden(options: Options) -> float:
    """What is hidden behind another saves nothing until that is gone: a loader, launches, arithmetic and memory."""
    size, compiled, bf16 = (
        int(options.get("batch_size", "1")),
        options.get("compile"),
        "precision" in options,
    )
    arithmetic = (
        0.7 * (0.55 if bf16 else 1.0) * (0.85 if "attention" in options else 1.0)
    )
    launches = {None: 0.45, "default": 0.22, "reduce-overhead": 0.13}[compiled] / size
    memory = 0.25 * (0.7 if compiled else 1.0) * (0.8 if bf16 else 1.0)
    optimizer = 0.1 * (0.5 if "fused" in options else 1.0) / size
    device = max(arithmetic + memory, launches) + optimizer
    workers = int(options.get("num_workers", "0"))
    return max(device, 1.1 / workers) + 0.02 if workers else device + 1.1


def together(options: Options) -> float:
    """Some changes harm alone and help on top of others."""
    bf16, compiled = "precision" in options, "compile" in options
    x = 0.8 if bf16 else 1.0
    x *= (0.8 if bf16 else 1.05) if compiled else 1.0
    sizes = {"2": 0.9, "4": 0.8} if compiled else {"2": 0.97, "4": 1.1}
    return x * sizes.get(options.get("batch_size", ""), 1.0)


PROGRAMS: dict[str, Program] = {
    "independent savings": independent,
    "one bound hides another": hidden,
    "helpful only on top of others": together,
}


@cache
def best(program: Program) -> float:
    """Seconds of the best setting of the whole grid."""
    grid = product(*[("", *values) for values in VALUES.values()])
    return min(
        program({k: v for k, v in zip(VALUES, cell, strict=True) if v}) for cell in grid
    )


def settings() -> int:
    """In the whole grid."""
    return math.prod(1 + len(values) for values in VALUES.values())


@dataclass(frozen=True)
class Searched:
    """One search against the truth."""

    useless: bool
    start: float
    end: float
    cells: int
    gain_held: bool | None
    intervals_held: int
    intervals: int


def searched(
    program: Program, machine: Machine, cells: int, seed: int, ceilings: bool = True
) -> Searched:
    """One search with a budget of ``cells``."""
    rng = np.random.default_rng(seed)
    names = [(group, value) for group, values in VALUES.items() for value in values]
    candidates = [
        _candidate(program, *names[i], rng, ceilings)
        for i in rng.permutation(len(names))
    ]
    uneven = {name: machine.uneven if rng.random() < 0.5 else 1.0 for name in names}
    end, ran = _search(
        candidates,
        cells,
        lambda options, n: program(options) * _noise(options, n, rng, machine, uneven),
    )
    truth = program(end.options) / program({})
    last = end.final.interval if end.final else None
    told = [
        (one.interval, program(one.b_options) / program(one.a_options))
        for one in end.tried
        if one.interval
    ]
    return Searched(
        useless=any(
            program(one.b_options) > program(one.a_options) * (1.0 - 1e-9)
            for one in end.tried
            if one.accepted
        ),
        start=program({}) / best(program),
        end=program(end.options) / best(program),
        cells=ran,
        gain_held=last.low <= truth <= last.high if last else None,
        intervals_held=sum(x.low <= true <= x.high for x, true in told),
        intervals=len(told),
    )


def _search(
    candidates: list[Candidate], cells: int, seconds: Callable[[Options, int], float]
) -> tuple[Searcher, int]:
    def time(options: Options, number: int) -> TimedRun:
        nonlocal ran
        ran += 1
        return TimedRun(seconds(options, ran - 1), 1.0)

    ran = 0
    searcher = Searcher(
        candidates, float(cells), time, lambda compared: NumericsCheck(True)
    )
    searcher.improve()
    return searcher, ran


def _candidate(
    program: Program, group: str, value: str, rng: np.random.Generator, ceilings: bool
) -> Candidate:
    """What it touches takes as long as it saves, and up to 0.3 s more."""
    ceiling_s = max(0.0, program({}) - program({group: value})) + 0.3 * rng.random()
    return Candidate(
        f"{group}={value}", {group: value}, group, ceiling_s if ceilings else None
    )


def _noise(
    options: Options,
    n: int,
    rng: np.random.Generator,
    machine: Machine,
    uneven: Mapping[tuple[str, str], float],
) -> float:
    of_process = (
        machine.processes
        * max([1.0, *(uneven[name] for name in options.items())])
        * rng.standard_normal()
    )
    of_steps = float(np.median(machine.steps * rng.standard_normal(STEPS)))
    neighbour = rng.exponential(0.5) if rng.random() < machine.slow else 0.0
    return math.exp(
        of_process
        + of_steps
        + neighbour
        + machine.drift * math.sin(n * 2.0 * math.pi / 100.0)
    )


@dataclass(frozen=True)
class Row:
    """Many searches of one kind."""

    program: Program
    machine: Machine
    cells: int
    ceilings: bool = True

    def searches(self, pool: ProcessPoolExecutor, number: int) -> list[Searched]:
        return list(pool.map(self.search, range(number), chunksize=10))

    def search(self, seed: int) -> Searched:
        return searched(self.program, self.machine, self.cells, seed, self.ceilings)


def useless(pool: ProcessPoolExecutor, number: int) -> Iterator[str]:
    """How often a useless change is accepted, by program, and how often an interval does not hold the truth."""
    programs = {
        "nothing helps": nothing,
        "changes harm": harm,
        "one bound hides another": hidden,
    }
    yield f"| machine | cells allowed | {' | '.join(programs)} | intervals wrong | cells used where nothing helps |"
    yield "| :-- | --: | --: | --: | --: | --: | --: |"
    for told, machine in MACHINES.items():
        for cells in (BUDGETS[0], BUDGETS[-1]):
            each = [
                Row(program, machine, cells).searches(pool, number)
                for program in programs.values()
            ]
            shares = " | ".join(_share(one.useless for one in these) for these in each)
            wrong = np.mean([_wrong(these) for these in each])
            used = np.mean([one.cells for one in each[0]])
            yield f"| {told} | {cells} | {shares} | {wrong:.2%} | {used:.0f} |"


def _wrong(these: Iterable[Searched]) -> float:
    """Share of their intervals that do not hold the truth where the comparison stopped."""
    told = list(these)
    return 1.0 - sum(one.intervals_held for one in told) / sum(
        one.intervals for one in told
    )


def found(pool: ProcessPoolExecutor, number: int) -> Iterator[str]:
    """How close to the best setting it ends."""
    yield "| program | machine | ceilings | cells allowed | begins at | ends at (nine in ten) | gain right | used |"
    yield "| :-- | :-- | :-- | --: | --: | --: | --: | --: |"
    for name, program in PROGRAMS.items():
        for told, machine in list(MACHINES.items())[:2]:
            for cells, ceilings in (
                *((cells, True) for cells in BUDGETS),
                (BUDGETS[0], False),
            ):
                these = Row(program, machine, cells, ceilings).searches(pool, number)
                ends = [one.end for one in these]
                yield (
                    f"| {name} | {told} | {'known' if ceilings else 'unknown'} | {cells} | {these[0].start:.2f} × "
                    f"| {np.median(ends):.2f} × ({np.quantile(ends, 0.9):.2f} ×) "
                    f"| {_share(one.gain_held for one in these if one.gain_held is not None)} "
                    f"| {np.mean([one.cells for one in these]):.0f} |"
                )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--searches", type=int, default=400, help="of each row")
    number, begun = parser.parse_args().searches, time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for table in (useless, found):
            print(f"\n{(table.__doc__ or '').strip()} {number} searches a row.\n")
            for line in table(pool, number):
                print(line, flush=True)
    print(
        f"\nThe whole grid has {settings()} settings. {time.perf_counter() - begun:.0f} s."
    )


def _share(these: Iterable[bool]) -> str:
    told = list(these)
    return f"{sum(told) / len(told):.1%}" if told else "–"


if __name__ == "__main__":
    main()

"""How far the statistics can be trusted, on simulated step times whose truth is known.

    python -m benchmarks.statistics [--series 200] [--against FOLDER] [--power]

Prints Markdown: each aim with the share of simulated runs in which it is met. Levels, jumps and AR(1) noise are what
thresholds were chosen on; ``HELD_OUT`` kinds of step times were only looked at. With ``--against`` (a checkout of an
older version) what that one says of the same runs stands beside it. ``--power`` prints instead how large a change must
be to be told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.simulation import (
    HELD_OUT,
    Kind,
    Simulated,
    Times,
    jump,
    level,
    repeating,
)
from benchmarks.statistics_subjects import Subject, subject

PLACES = ("first 3", "1/4", "1/2", "3/4", "last 3", "3 in the middle")
SIZES = (0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)
TARGET = 0.005
STEPS = 20


@dataclass(frozen=True)
class Row:
    """An aim: ``share`` of simulated runs, of a subject, a generator and a number of series."""

    aim: str
    case: str
    wanted: str
    share: Callable[[Subject, np.random.Generator, int], float]

    def told(self, series: int) -> float:
        return self.share(subject(), np.random.default_rng(20_261_123), series)


def at_place(
    rng: np.random.Generator,
    steps: int,
    place: str,
    by: float,
    noise: float,
    rho: float = 0.0,
) -> Times:
    """A level that is higher by the share ``by`` from ``place`` on, or there alone."""
    if place in ("1/4", "1/2", "3/4"):
        return jump(
            rng, steps, {"1/4": 0.25, "1/2": 0.5, "3/4": 0.75}[place], by, noise, rho
        ).times_s
    first = {"first 3": 0, "last 3": steps - 3, "3 in the middle": steps // 2}[place]
    slow = np.isin(np.arange(steps), np.arange(first, first + 3))
    return level(rng, steps, noise, rho).times_s * (1.0 + by * slow)


def jump_told(
    steps: int,
    sigmas: float,
    rho: float,
    place: str,
    of: Subject,
    rng: np.random.Generator,
    series: int,
) -> float:
    runs = (
        at_place(rng, steps, place, sigmas * 0.01, 0.01, rho) for _ in range(series)
    )
    return float(np.mean([of.tells_change(times) for times in runs]))


def alarmed(
    kind: Kind, steps: int, of: Subject, rng: np.random.Generator, series: int
) -> float:
    """A change or a pattern is told where there is none."""
    runs = [kind(rng, steps).times_s for _ in range(series)]
    return float(
        np.mean([of.tells_change(times) or of.period(times) > 0 for times in runs])
    )


def covered(
    kind: Kind, steps: int, of: Subject, rng: np.random.Generator, series: int
) -> float:
    """Of the runs that have an interval."""
    centre = of.centre(kind(np.random.default_rng(1), 20_000))
    held = [of.holds(kind(rng, steps), centre) for _ in range(series)]
    known = [one for one in held if one is not None]
    return float(np.mean(known)) if known else math.nan


def named(
    kind: Kind, steps: int, of: Subject, rng: np.random.Generator, series: int
) -> float:
    runs = [kind(rng, steps) for _ in range(series)]
    return float(np.mean([of.period(run.times_s) == run.period for run in runs]))


def right_word(
    kind: Kind, steps: int, of: Subject, rng: np.random.Generator, series: int
) -> float:
    runs = [kind(rng, steps) for _ in range(series)]
    return float(np.mean([of.word(run.times_s) == run.word for run in runs]))


def stopped(kind: Kind, of: Subject, rng: np.random.Generator, series: int) -> float:
    """The interval where ``until_ci`` stops holds the level."""
    centre = of.centre(kind(np.random.default_rng(1), 20_000))
    held = []
    for _ in range(max(1, series // 2)):
        run = kind(rng, 400)
        end = of.stops_at(run.times_s, TARGET)
        held.append(
            of.holds(Simulated(run.times_s[:end], 0, run.level_s, run.word), centre)
        )
    return float(np.mean([one for one in held if one is not None]))


def compared(
    words: Sequence[str],
    spread: float,
    change: Kind,
    repeats: int,
    learned: bool,
    of: Subject,
    rng: np.random.Generator,
    series: int,
) -> float:
    """``compare`` says one of ``words`` of B, made by ``change``, against A; processes differ by ``spread``."""

    def side(kind: Kind, runs: int) -> list[Times]:
        return [
            math.exp(spread * rng.standard_normal()) * kind(rng, STEPS).times_s
            for _ in range(runs)
        ]

    told = []
    for _ in range(series):
        shown = [float(x.mean()) for x in side(level, 5)] if learned else []
        told.append(
            of.compares(side(level, repeats), side(change, repeats), shown) in words
        )
    return float(np.mean(told))


def alike(kind: Kind, of: Subject, rng: np.random.Generator, series: int) -> float:
    """``compare`` calls two runs of one kind of step times, whose level may change, FASTER or SLOWER."""
    told = []
    for _ in range(series):
        a, b = kind(rng, 2 * STEPS).times_s, kind(rng, 2 * STEPS).times_s
        told.append(of.compares([a], [b], []) in ("FASTER", "SLOWER"))
    return float(np.mean(told))


def slower(rng: np.random.Generator, steps: int, by: float) -> Simulated:
    made = level(rng, steps)
    return Simulated(made.times_s * (1.0 + by), 0, None, made.word)


EVERY_FIFTH: Kind = partial(repeating, every=5, slow=(2,), by=0.5)
TWICE_FROM_60_PERCENT: Kind = partial(jump, at=0.6, by=1.0)


def rows() -> Iterator[Row]:
    """Each aim, tuned kinds first."""
    for steps, sigmas in ((20, 7), (40, 5), (100, 5)):
        for rho in (0.0, 0.6):
            for place in PLACES:
                case = f"{steps} steps, {sigmas} sigma, {place}, AR(1) {rho}"
                yield Row(
                    "a jump is told",
                    case,
                    "≥ 95 %",
                    partial(jump_told, steps, sigmas, rho, place),
                )
    for rho, wanted in ((0.0, "≤ 1 %"), (0.3, "≤ 3 %"), (0.6, "≤ 3 %")):
        for steps in (20, 40, 100):
            share = partial(alarmed, partial(level, rho=rho), steps)
            yield Row("false alarm", f"{steps} steps, AR(1) {rho}", wanted, share)
    for rho in (0.0, 0.3, 0.6):
        for steps in (20, 40, 100):
            share = partial(covered, partial(level, rho=rho), steps)
            yield Row(
                "95 % interval of the level holds it",
                f"{steps} steps, AR(1) {rho}",
                "≥ 93 %",
                share,
            )
    for rho in (0.0, 0.3, 0.6):
        share = partial(stopped, partial(level, rho=rho))
        yield Row(
            "until_ci of 0.5 %: the interval holds", f"AR(1) {rho}", "≥ 93 %", share
        )
    yield from _comparisons()
    for name, kind in HELD_OUT.items():
        example = kind(np.random.default_rng(0), 40)
        if example.period and example.word == "steady":
            yield Row(
                "held out: the pattern is named",
                f"{name}, 40 steps",
                "≥ 95 %",
                partial(named, kind, 40),
            )
        yield Row(
            "held out: the right word",
            f"{name}, 40 steps",
            "",
            partial(right_word, kind, 40),
        )
    for name, kind in HELD_OUT.items():
        if kind(np.random.default_rng(0), 40).level_s is not None:
            share = partial(covered, kind, 40)
            yield Row(
                "held out: the interval holds the level",
                f"{name}, 40 steps",
                "≥ 93 %",
                share,
            )


def _comparisons() -> Iterator[Row]:
    differ = ("FASTER", "SLOWER")
    cases = (
        (0.01, 1, False),
        (0.03, 1, False),
        (0.03, 1, True),
        (0.05, 1, False),
        (0.03, 3, False),
        (0.03, 5, False),
    )
    for spread, runs, learned in cases:
        case = f"processes differ by {spread:.0%}, {runs} a side{', after selftest' * learned}"
        share = partial(compared, differ, spread, level, runs, learned)
        yield Row("compare: equal ones called different", case, "≤ 5 %", share)
        share = partial(
            compared, ("SLOWER",), spread, partial(slower, by=0.2), runs, learned
        )
        yield Row("compare: 20 % slower is SLOWER", case, "", share)
    for spread, runs, learned in ((0.01, 1, True), (0.01, 3, False), (0.02, 5, False)):
        case = f"processes differ by {spread:.0%}, {runs} a side{', after selftest' * learned}"
        share = partial(compared, ("SLOWER",), spread, EVERY_FIFTH, runs, learned)
        yield Row("compare: every fifth step +50 % is SLOWER", case, "≥ 80 %", share)
    share = partial(compared, ("SLOWER",), 0.05, TWICE_FROM_60_PERCENT, 1, False)
    yield Row(
        "compare: twice the time from 60 % on is SLOWER",
        "processes differ by 5%, 1 a side",
        "≥ 95 %",
        share,
    )
    for spread, runs in ((0.01, 5), (0.03, 20)):
        share = partial(compared, ("SAME",), spread, level, runs, False)
        yield Row(
            "compare: equal ones are the SAME within 5 %",
            f"processes differ by {spread:.0%}, {runs} a side",
            "≥ 80 %",
            share,
        )
    for name in (
        "two levels at random",
        "bursts of others",
        "up and down every ten",
        "late throttling",
    ):
        share = partial(alike, HELD_OUT[name])
        yield Row(
            "compare: equal ones called different", f"{name}, 1 a side", "≤ 5 %", share
        )


def told(series: int, at: int) -> float:
    return list(rows())[at].told(series)


def smallest(series: int, cell: tuple[int, float, bool]) -> str:
    """Of ``SIZES`` the smallest change that is told in 95 % of runs, wherever it is (or for three steps only)."""
    steps, noise, short = cell
    places = ("last 3", "3 in the middle") if short else ("1/4", "1/2", "3/4")
    of = subject()
    for size in SIZES:
        rng = np.random.default_rng(7)
        shares = (
            np.mean(
                [
                    of.tells_change(at_place(rng, steps, place, size, noise))
                    for _ in range(series)
                ]
            )
            for place in places
        )
        if all(share >= 0.95 for share in shares):
            return f"{size:.0%}"
    return f"over {SIZES[-1]:.0%}"


def power(pool: ProcessPoolExecutor, series: int) -> Iterator[list[str]]:
    """A row for each number of steps."""
    cells = [
        (n, noise, short)
        for n in (10, 20, 40, 100)
        for short in (False, True)
        for noise in (0.01, 0.03, 0.08)
    ]
    found = iter(list(pool.map(partial(smallest, series), cells)))
    for n in (10, 20, 40, 100):
        yield [str(n), *(next(found) for _ in range(6))]


def main() -> None:
    """Print the table and the time that it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--series", type=int, default=200, help="simulated runs per row"
    )
    parser.add_argument("--against", type=Path, help="a checkout of an older version")
    parser.add_argument(
        "--power", action="store_true", help="how large a change must be to be told"
    )
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options, began = parser.parse_args(), time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if options.power:
            columns = [
                f"{what}, noise {x}"
                for what in ("level", "3 steps")
                for x in ("1 %", "3 %", "8 %")
            ]
            _table(["steps", *columns], power(pool, options.series))
            return
        shares = list(pool.map(partial(told, options.series), range(len(list(rows())))))
    if options.json:
        print(json.dumps(shares))
        return
    before = _of(options.against, options.series) if options.against else None
    header = ["aim", "case", "wanted", *(["before"] if before else []), "now"]
    _table(header, (_line(row, at, shares, before) for at, row in enumerate(rows())))
    print(
        f"{options.series} simulated runs or pairs a row; {time.perf_counter() - began:.0f} s"
    )


def _line(
    row: Row, at: int, now: Sequence[float], before: Sequence[float] | None
) -> list[str]:
    return [
        row.aim,
        row.case,
        row.wanted,
        *([_percent(before[at])] if before else []),
        _percent(now[at]),
    ]


def _of(folder: Path, series: int) -> list[float]:
    """The shares of the version in ``folder``: its lm_profiler under these benchmarks."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder.resolve())!r}); import lm_profiler, runpy; "
        f"sys.path[0] = {str(Path(__file__).resolve().parents[1])!r}; "
        f"sys.argv = ['statistics', '--json', '--series={series}']; "
        "runpy.run_module('benchmarks.statistics', run_name='__main__', alter_sys=True)"
    )
    outside = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    done = subprocess.run(
        (sys.executable, "-c", code),
        check=True,
        capture_output=True,
        text=True,
        env=outside,
        cwd="/",
    )
    return [float(share) for share in json.loads(done.stdout)]


def _table(header: list[str], lines: Iterable[list[str]]) -> None:
    for line in [header, ["---"] * len(header), *lines]:
        print("| " + " | ".join(line) + " |", flush=True)
    print()


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()

"""How far the statistics can be trusted, on simulated step times whose truth is known.

    python -m benchmarks.statistics [--series 1000]

Prints Markdown: for each kind of run the coverage of the median's 95 % interval after the cut, the words, and
the cut; the words by how noisy steps are; then what `compare` says of pairs that do not differ, one run a side and
several, and what "stop when sure" costs in coverage.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation import KINDS, Kind, autocorrelated, independent, shared_machine, spiky
from lm_profiler.analysis.compare.ratio import change, ratio_interval
from lm_profiler.analysis.steps.statistics import median_interval, precise_enough
from lm_profiler.analysis.steps.steadiness import KNOWN_TO, steadiness

LENGTHS = (15, 30, 60, 200)
COMPARED = ("independent, 2 %", "independent, 15 %", "one-sided spikes", "AR(1), 0.3", "AR(1), 0.6", "eager warm-up")
REPEATS = ((1, 1), (1, 3), (1, 5), (2, 2), (2, 5), (3, 3), (3, 5), (5, 5), (10, 10))

Times = NDArray[np.float64]


def judged(name: str, kind: Kind, steps: int, series: int) -> list[str]:
    """One row: what `steadiness` and the median's interval make of `series` runs of one kind."""
    rng = np.random.default_rng(20240607)
    words: Counter[str | None] = Counter()
    cuts, truths, covered, wrong = [], [], [], 0
    for _ in range(series):
        run = kind(rng, steps)
        verdict = steadiness(run.times_s)
        words[verdict.word] += 1
        words[verdict.also] += verdict.also is not None
        wrong += (verdict.also or verdict.word) not in ("noisy", run.word)
        cuts.append(verdict.cut)
        truths.append(run.warmup)
        interval = median_interval(run.times_s[verdict.cut :])
        if run.median_s is not None and interval is not None:
            covered.append(interval[0] <= run.median_s <= interval[1])
    shares = [_percent(words[word] / series) for word in ("noisy", "steady", "slowing", "unsettled")]
    coverage = _percent(float(np.mean(covered))) if covered else "–"
    true_cut = f"{np.mean(truths):.0f}" if truths[0] < steps else "all"
    return [name, str(steps), coverage, *shares, f"{np.mean(cuts):.1f}", true_cut, _percent(wrong / series)]


def heard(name: str, kind: Kind, steps: int, series: int) -> list[str]:
    """One row: how often runs of one kind are called noisy or steady, and steady with a median that is 5 % off."""
    rng = np.random.default_rng(20240611)
    words: Counter[str | None] = Counter()
    off = 0
    for _ in range(series):
        run = kind(rng, steps)
        verdict = steadiness(run.times_s)
        words[verdict.word] += 1
        if verdict.word == "steady" and run.median_s is not None:
            off += abs(float(np.median(run.times_s[verdict.cut :])) / run.median_s - 1.0) > KNOWN_TO
    return [name, str(steps), *(_percent(count / series) for count in (words["noisy"], words["steady"], off))]


def alarms(name: str, kind: Kind, steps: int, pairs: int) -> list[str]:
    """One row: one run against one, cut where each became steady; equal ones, then B 5 % slower than A."""
    rng = np.random.default_rng(20240608)

    def side() -> list[Times]:
        times = kind(rng, steps).times_s
        return [times[steadiness(times).cut :]]

    return [name, str(steps), *_judged_pairs([(side(), side()) for _ in range(pairs)])]


def alarms_of_repeats(repeats: tuple[int, int], spread: float, pairs: int) -> list[str]:
    """One row: `repeats` runs a side of 20 steps, whose processes differ by `spread`; equal ones, then 5 % slower."""
    rng = np.random.default_rng(20240610)

    def side(runs: int) -> list[Times]:
        levels = np.exp(spread * rng.standard_normal(runs))
        return [level * spiky(rng, 20).times_s for level in levels]

    judged = _judged_pairs([(side(repeats[0]), side(repeats[1])) for _ in range(pairs)])
    return [f"{repeats[0]} and {repeats[1]}", _percent(spread), *judged]


def _judged_pairs(pairs: list[tuple[list[Times], list[Times]]]) -> list[str]:
    """Alarms, SAME and coverage of equal pairs; SLOWER where B is made 5 % slower."""
    equal = [ratio_interval(a, b, seed=seed) for seed, (a, b) in enumerate(pairs)]
    words = Counter(change(interval) for interval in equal)
    covered = np.mean([interval.low <= 1.0 <= interval.high for interval in equal if interval is not None])
    slower = [ratio_interval(a, [1.05 * run for run in b], seed=seed) for seed, (a, b) in enumerate(pairs)]
    slower_told = sum(change(interval) == "SLOWER" for interval in slower)
    different, same = ((words["FASTER"] + words["SLOWER"]) / len(pairs), words["SAME"] / len(pairs))
    return [_percent(float(share)) for share in (different, same, covered, slower_told / len(pairs))]


def stopped(name: str, kind: Kind, series: int, cap: int = 400) -> list[str]:
    """One row: coverage and length when measuring ends at ±0.5 %, asked every five steps, at most `cap`
    steps.
    """
    rng = np.random.default_rng(20240609)
    covered, lengths = [], []
    for _ in range(series):
        run = kind(rng, cap)
        ends = range(10, cap + 1, 5)
        end = next((n for n in ends if precise_enough(run.times_s[:n], 0.005)), cap)
        interval = median_interval(run.times_s[:end])
        if interval is not None and run.median_s is not None:
            covered.append(interval[0] <= run.median_s <= interval[1])
            lengths.append(end)
    return [name, f"{np.median(lengths):.0f}", _percent(float(np.mean(covered)))]


def main() -> None:
    """Print the tables and the time that they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=1000, help="simulated runs per row")
    series = parser.parse_args().series
    began = time.perf_counter()
    columns = ["run", "steps", "coverage of 95 % interval", "noisy", "steady", "slowing", "unsettled", "mean cut"]
    rows = [judged(name, kind, steps, series) for name, kind in KINDS.items() for steps in LENGTHS]
    _table([*columns, "true warm-up", "wrong word"], rows)
    rows = [heard(name, kind, steps, series) for name, kind in _noises() for steps in (10, 20, 60, 200)]
    _table(["noise", "steps", "noisy", "steady", "steady, and the median is more than 5 % off"], rows)
    judged_columns = ["called FASTER or SLOWER", "called SAME", "coverage of 97 % interval", "5 % slower called SLOWER"]
    rows = [alarms(name, KINDS[name], steps, series) for name in COMPARED for steps in (10, 20, 50)]
    _table(["A/A, one run against one", "steps", *judged_columns], rows)
    rows = [alarms_of_repeats(repeats, spread, series) for spread in (0.005, 0.01, 0.02) for repeats in REPEATS]
    _table(["A/A, runs a side", "processes differ by (std)", *judged_columns], rows)
    pairs = [("independent, 2 %", independent), ("one-sided spikes", spiky), ("AR(1), 0.3", autocorrelated)]
    rows = [stopped(name, kind, series) for name, kind in pairs]
    _table(["stopped at ±0.5 %", "median steps", "coverage of 95 % interval"], rows)
    print(f"{series} simulated runs or pairs a row; {time.perf_counter() - began:.0f} s")


def _noises() -> Iterable[tuple[str, Kind]]:
    for noise in (0.01, 0.02, 0.05, 0.10, 0.15, 0.30, 1.0):
        yield f"independent, {_percent(noise)}", partial(independent, noise=noise)
        yield f"AR(1) of 0.6, {_percent(noise)}", partial(autocorrelated, rho=0.6, noise=noise)
    yield "others use the machine now and then", shared_machine
    yield "one-sided spikes", spiky


def _table(header: list[str], rows: Iterable[list[str]]) -> None:
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(row) + " |")
    print()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()

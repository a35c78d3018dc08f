"""How far the statistics can be trusted, on simulated step times whose truth is known.

    python -m benchmarks.statistics [--series 1000]

Prints Markdown: for each kind of run the coverage of the median's 95 % interval after the cut, the words, and
the cut; then false positives of `compare` on A/A pairs, and what "stop when sure" costs in coverage.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np

from lm_profiler.analysis import change, median_interval, precise_enough, ratio_interval, steadiness
from lm_profiler.analysis.simulation import KINDS, Kind, autocorrelated, independent, spiky

LENGTHS = (15, 30, 60, 200)


def judged(name: str, kind: Kind, steps: int, series: int) -> list[str]:
    """One row: what `steadiness` and the median's interval make of `series` runs of one kind."""
    rng = np.random.default_rng(20240607)
    words: Counter[str | None] = Counter()
    cuts, truths, covered, wrong = [], [], [], 0
    for _ in range(series):
        run = kind(rng, steps)
        verdict = steadiness(run.times_s)
        words[verdict.word] += 1
        wrong += verdict.word != run.word
        cuts.append(verdict.cut)
        truths.append(run.warmup)
        interval = median_interval(run.times_s[verdict.cut :])
        if run.median_s is not None and interval is not None:
            covered.append(interval[0] <= run.median_s <= interval[1])
    shares = [_percent(words[word] / series) for word in ("steady", "slowing", "unsettled")]
    coverage = _percent(float(np.mean(covered))) if covered else "–"
    true_cut = f"{np.mean(truths):.0f}" if truths[0] < steps else "all"
    return [name, str(steps), coverage, *shares, f"{np.mean(cuts):.1f}", true_cut, _percent(wrong / series)]


def false_alarms(name: str, kind: Kind, steps: int, pairs: int) -> list[str]:
    """One row: words of `compare` on pairs of runs that do not differ, then on B 5 % slower than A."""
    rng = np.random.default_rng(20240608)
    same: Counter[str] = Counter()
    slower: Counter[str] = Counter()
    for seed in range(pairs):
        a, b = kind(rng, steps).times_s, kind(rng, steps).times_s
        same[change(ratio_interval(a, b, resamples=1000, seed=seed))] += 1
        slower[change(ratio_interval(a, 1.05 * b, resamples=1000, seed=seed))] += 1
    wrong = (same["FASTER"] + same["SLOWER"]) / pairs
    found = slower["SLOWER"] / pairs
    return [name, str(steps), _percent(wrong), _percent(same["SAME"] / pairs), _percent(found)]


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
    """Print the three tables and the time that they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=1000, help="simulated runs per row")
    series = parser.parse_args().series
    began = time.perf_counter()
    columns = ["run", "steps", "coverage of 95 % interval", "steady", "slowing", "unsettled", "mean cut"]
    rows = [judged(name, kind, steps, series) for name, kind in KINDS.items() for steps in LENGTHS]
    _table([*columns, "true warm-up", "wrong word"], rows)
    pairs = [("independent, 2 %", independent), ("one-sided spikes", spiky), ("AR(1), 0.3", autocorrelated)]
    rows = [false_alarms(name, kind, steps, series // 2) for name, kind in pairs for steps in (10, 20, 50)]
    _table(["A/A pair", "steps", "called FASTER or SLOWER", "called SAME", "5 % slower called SLOWER"], rows)
    rows = [stopped(name, kind, series) for name, kind in pairs]
    _table(["stopped at ±0.5 %", "median steps", "coverage of 95 % interval"], rows)
    print(f"{series} simulated runs a row ({series // 2} pairs); {time.perf_counter() - began:.0f} s")


def _table(header: list[str], rows: Iterable[list[str]]) -> None:
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(row) + " |")
    print()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()

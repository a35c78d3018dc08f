"""How right it is who waits for whom, on simulated ranks whose truth is known.

    python -m benchmarks.rank_findings [--series 200]

Prints Markdown: what is said of equal ranks (naming anybody is a false alarm), then, of ranks with a delay in a place
that a seed draws, how often rank and phase are right, and how far the predicted saving is from what the same run
takes less without the delay. The simulation is that of the tests (tests/support/simulated_ranks.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.summary import ranks_of
from lm_profiler.record.run import RankFinding

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from simulated_ranks import BASE_S, DDP, SHARDED, simulate  # found only now

Work = dict[str, NDArray[np.float64]]

NOISES = ("normal 2 %", "normal 15 %", "lognormal 15 %", "AR(1) of 0.5, 15 %")
KINDS = ("equal", "unsure", "turns", "host", "several", "straggler")
DELAYS_S = (0.003, 0.01, 0.03)


def noisy(name: str, rng: np.random.Generator, ranks: int, steps: int) -> Work:
    """Seconds of each part, [rank, step]."""
    share = 0.02 if "2 %" in name else 0.15
    return {part: base_s * _ups_and_downs(name, share, rng, (ranks, steps)) for part, base_s in BASE_S.items()}


def _ups_and_downs(name: str, share: float, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    drawn = rng.standard_normal(shape)
    if name.startswith("lognormal"):
        return np.exp(share * drawn)
    if name.startswith("AR"):
        for step in range(1, shape[1]):
            drawn[:, step] = 0.5 * drawn[:, step - 1] + np.sqrt(0.75) * drawn[:, step]
    return np.maximum(1.0 + share * drawn, 0.05)


def said(work_s: Work, sharded: bool) -> tuple[RankFinding, float]:
    """The finding, and the mean step."""
    truth = simulate(work_s, SHARDED if sharded else DDP)
    found = ranks_of(truth.timelines, len(truth.timelines), overlap=not sharded)
    assert found is not None
    return found.finding, truth.step_s


def alarms(name: str, ranks: int, steps: int, series: int) -> list[str]:
    """One row: what is said of equal ranks."""
    rng = np.random.default_rng(20261122)
    words = Counter(said(noisy(name, rng, ranks, steps), run % 2 == 1)[0].kind for run in range(series))
    wrong = series - words["equal"] - words["unsure"]
    return [name, str(ranks), str(steps), *(_percent(words[kind] / series) for kind in KINDS), _percent(wrong / series)]


def delayed(name: str, ranks: int, steps: int, delay_s: float, series: int) -> list[str]:
    """One row: what is said of one rank that is ``delay_s`` longer in one phase."""
    rng = np.random.default_rng(20261123)
    named, right, off, covered = 0, 0, [], []
    for run in range(series):
        work_s, part, rank = noisy(name, rng, ranks, steps), str(rng.choice(list(BASE_S))), int(rng.integers(ranks))
        without_s = said(work_s, run % 2 == 1)[1]
        work_s[part][rank] += delay_s
        finding, step_s = said(work_s, run % 2 == 1)
        if finding.kind != "straggler" or finding.saves_s is None or finding.low_s is None or finding.high_s is None:
            continue
        named += 1
        right += (finding.rank, finding.phase) == (rank, part)
        really_s = step_s - without_s
        off.append(abs(finding.saves_s - really_s) / step_s)
        covered.append(finding.low_s <= really_s <= finding.high_s)
    told = [f"{np.median(off):.2%}", f"{np.quantile(off, 0.95):.2%}", _percent(np.mean(covered))] if off else ["–"] * 3
    of_named = _percent(right / named) if named else "–"
    return [name, str(ranks), str(steps), f"{delay_s * 1e3:.0f}", _percent(named / series), of_named, *told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=200)
    series, began = parser.parse_args().series, time.perf_counter()
    rows = [alarms(name, ranks, steps, series) for name in NOISES for ranks in (2, 4, 8) for steps in (5, 20, 50)]
    _table(["equal ranks", "ranks", "steps", *KINDS, "false alarms"], rows)
    titles = ["named", "of these right", "saving off by (median, of the step)", "95 % off by less", "in its interval"]
    rows = [
        delayed(name, ranks, 20, delay_s, series) for name in NOISES[:2] for ranks in (2, 4) for delay_s in DELAYS_S
    ]
    _table(["one slow rank", "ranks", "steps", "ms longer", *titles], rows)
    print(f"{series} simulated runs a row, DDP and sharded in turns; {time.perf_counter() - began:.0f} s")


def _table(header: list[str], rows: Iterable[list[str]]) -> None:
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()

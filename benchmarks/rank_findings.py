"""How right it is who waits for whom, on simulated ranks whose truth is known.

    python -m benchmarks.rank_findings [--series 100]

Prints Markdown: what is said of equal ranks (naming anybody is a false alarm), then of each planted fault how often
just that is named, missed (nobody is) or wrongly said (another rank or phase, more of them, or fewer), and how far the
predicted saving is from what the same run takes less without the fault. The simulation is that of the tests
(tests/support/simulated_ranks.py), under DDP and sharded in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import RankTimeline
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.record.run_record import (
    RANK_PARTS,
    Contention,
    RankFinding,
    StepCounters,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from simulated_ranks import BASE_S, DDP, SHARDED, simulate  # found only now

Work = dict[str, NDArray[np.float64]]
Cell = tuple[int, str]

KINDS = ("equal", "unsure", "turns", "host", "several", "straggler")
NOISES = (
    "normal 2 %",
    "normal 15 %",
    "lognormal 15 %",
    "AR(1) of 0.6, 2 %",
    "AR(1) of 0.6, 15 %",
)
STEP_S = sum(BASE_S.values())
BETWEEN = RANK_PARTS[-1]
UNMET = [op for op in DDP if op[1] != "gloo:broadcast"]
"""No meeting between the batch and the end of backward."""


@dataclass(frozen=True)
class Fault:
    """Seconds that each rank and phase takes longer, [step] or of all; those of ``named`` have to be told (None: all).

    ``taken``: the share of CPU time that other programs have; ``asleep``: whether the slow rank sleeps meanwhile.
    """

    what: str
    ranks: int
    steps: int
    longer_s: Mapping[Cell, Any]
    named: set[Cell] | None = None
    programs: tuple[Any, ...] = (DDP, SHARDED)
    taken: float = 0.0
    asleep: bool = True

    @property
    def told(self) -> set[Cell]:
        """What has to be named."""
        return set(self.longer_s) if self.named is None else self.named


def _in(
    steps: int, first: int, end: int, seconds: float, every: int = 1
) -> NDArray[np.float64]:
    at = np.arange(steps)
    return np.where((at >= first) & (at < end) & (at % every == 0), seconds, 0.0)


def faults() -> list[Fault]:
    """What is planted; 14.4 ms are a fifth of the step."""
    fifth_s, found = STEP_S / 5, []
    for ranks in (2, 4, 8):
        found += [
            Fault("slow throughout, +20 %", ranks, 20, {(1, "forward"): fifth_s}),
            Fault(
                "from halfway on, +20 %",
                ranks,
                20,
                {(1, "forward"): _in(20, 10, 20, fifth_s)},
            ),
            Fault(
                "in the first half, +20 %",
                ranks,
                20,
                {(1, "forward"): _in(20, 0, 10, fifth_s)},
            ),
            Fault(
                "in the last quarter, +20 %",
                ranks,
                20,
                {(1, "forward"): _in(20, 15, 20, fifth_s)},
            ),
            Fault(
                "every fifth step, +100 ms",
                ranks,
                40,
                {(1, "data"): _in(40, 0, 40, 0.1, 5)},
            ),
        ]
    phases = {"forward": 0.01, "backward": 0.02, "optimizer": 0.001}
    return [
        *found,
        Fault("2 of 3, data +40 ms", 3, 20, {(r, "data"): 0.04 for r in (0, 2)}),
        Fault("3 of 4, data +40 ms", 4, 20, {(r, "data"): 0.04 for r in (0, 2, 3)}),
        Fault(
            "two places, nobody meets",
            2,
            20,
            {(1, "data"): 0.03, (0, "forward"): 0.03},
            programs=(UNMET,),
        ),
        Fault(
            "two places, met between",
            2,
            20,
            {(1, "data"): 0.03, (0, "forward"): 0.02},
            programs=(DDP,),
        ),
        Fault("between steps, +50 ms", 4, 20, {(3, BETWEEN): _in(20, 1, 20, 0.05)}),
        Fault(
            "three phases, one +1 ms",
            4,
            20,
            {(2, part): s for part, s in phases.items()},
            named={(2, "forward"), (2, "backward")},
        ),
        Fault(
            "asleep +26 ms, 79 % of the CPUs taken",
            2,
            20,
            {(1, "data"): 0.026},
            taken=0.79,
        ),
        Fault(
            "without a CPU 26 ms, 79 % taken",
            2,
            20,
            {(1, "data"): 0.026},
            named=set(),
            taken=0.79,
            asleep=False,
        ),
    ]


def noisy(name: str, rng: np.random.Generator, ranks: int, steps: int) -> Work:
    """Seconds of each part, [rank, step]."""
    share = 0.15 if name.endswith("15 %") else 0.02
    return {
        part: base_s * _ups_and_downs(name, share, rng, (ranks, steps))
        for part, base_s in BASE_S.items()
    }


def _ups_and_downs(
    name: str, share: float, rng: np.random.Generator, shape: tuple[int, int]
) -> NDArray[np.float64]:
    drawn = rng.standard_normal(shape)
    if name.startswith("lognormal"):
        return np.exp(share * drawn)
    if name.startswith("AR"):
        for step in range(1, shape[1]):
            drawn[:, step] = 0.6 * drawn[:, step - 1] + 0.8 * drawn[:, step]
    return np.maximum(1.0 + share * drawn, 0.05)


def said(work_s: Work, program: Any, **known: Any) -> tuple[RankFinding, float]:
    """The finding, and the mean step, to the end of the last rank. What lies before a step's data is between steps."""
    truth = simulate(
        work_s, [("work", "zero_grad", 1.0), *program] if BETWEEN in known else program
    )
    timelines = (
        [_outside(each) for each in truth.timelines]
        if known.pop(BETWEEN, False)
        else truth.timelines
    )
    found = ranks_of(timelines, len(timelines), overlap=program is not SHARDED, **known)
    assert found is not None
    return found.finding, truth.step_s


def _outside(timeline: RankTimeline) -> RankTimeline:
    """Without the first part of each step, which lies before it."""
    keep = np.ones(len(timeline.codes), dtype=bool)
    keep[timeline.first[:-1]] = False
    first = timeline.first - np.arange(len(timeline.first))
    return replace(
        timeline,
        first=first,
        codes=timeline.codes[keep],
        host_ns=timeline.host_ns[keep],
    )


def alarms(name: str, ranks: int, steps: int, series: int) -> list[str]:
    """One row: what is said of equal ranks."""
    rng = np.random.default_rng(20261122)
    programs = (DDP, SHARDED)
    words = Counter(
        said(noisy(name, rng, ranks, steps), programs[run % 2])[0].kind
        for run in range(series)
    )
    wrong = series - words["equal"] - words["unsure"]
    return [
        name,
        str(ranks),
        str(steps),
        *(_percent(words[kind] / series) for kind in KINDS),
        _percent(wrong / series),
    ]


def planted(name: str, fault: Fault, series: int) -> list[str]:
    """One row: what is said of ``fault``."""
    rng = np.random.default_rng(20261123)
    counts, off, covered = Counter[str](), [], []
    for run in range(series):
        program = fault.programs[run % len(fault.programs)]
        work_s, known = noisy(name, rng, fault.ranks, fault.steps), _known(fault)
        if BETWEEN in known:
            work_s["zero_grad"] = np.zeros((fault.ranks, fault.steps))
        _, without_s = said(work_s, program, **_known(fault))
        for (rank, part), seconds in fault.longer_s.items():
            work_s["zero_grad" if part == BETWEEN else part][rank] += seconds
        finding, step_s = said(work_s, program, **known)
        told = {(one.rank, one.phase) for one in finding.slow if one.certain}
        counts[
            "right" if told == fault.told else "missed" if not told else "wrong"
        ] += 1
        if told == set(fault.longer_s) and finding.saves_s is not None:
            off.append(abs(finding.saves_s - (step_s - without_s)) / step_s)
            covered.append(
                (finding.low_s or 0.0) <= step_s - without_s <= (finding.high_s or 0.0)
            )
    shares = [_percent(counts[word] / series) for word in ("right", "missed", "wrong")]
    saving = (
        [f"{np.median(off):.2%}", _percent(float(np.mean(covered)))]
        if off
        else ["–"] * 2
    )
    return [fault.what, name, str(fault.ranks), str(fault.steps), *shares, *saving]


def _known(fault: Fault) -> dict[str, Any]:
    known: dict[str, Any] = (
        {BETWEEN: True} if any(part == BETWEEN for _, part in fault.longer_s) else {}
    )
    if fault.taken:
        late_s, wall_s = (
            max(fault.longer_s.values()),
            STEP_S + max(fault.longer_s.values()),
        )
        waits_s = [0.03, 0.03 + (0.0 if fault.asleep else late_s)]
        sleeps_s = [late_s, late_s if fault.asleep else 0.0]
        known["counters"] = [
            StepCounters(
                step=step, rank=r, wall_s=wall_s, asleep_s=sleeps_s[r], cpu_wait_s=waits_s[r],
                cpu_s=wall_s - sleeps_s[r] - waits_s[r],
            )
            for r in range(fault.ranks) for step in range(1, fault.steps + 1)
        ]  # fmt: skip
        known["contention"] = Contention(
            wall_s=9.0, cpus=2, had_s=2.0, waited_s=7.0, others_s=7.0, stolen_s=0.0, throttled_s=None, pressure=None,
            involuntary_switches=None, not_had=fault.taken,
        )  # fmt: skip
    return known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--series", type=int, default=100)
    series, began = parser.parse_args().series, time.perf_counter()
    header = ["equal ranks", "ranks", "steps", *KINDS, "false alarms"]
    shapes = [(ranks, steps) for ranks in (2, 4, 8) for steps in (5, 20, 50)]
    _table(
        header, (alarms(name, *shape, series) for name in NOISES for shape in shapes)
    )
    header = [
        "planted",
        "noise",
        "ranks",
        "steps",
        "right",
        "missed",
        "wrong",
        "saving off by (median, of the step)",
    ]
    _table(
        [*header, "in its interval"],
        (planted(name, of, series) for name in NOISES[:2] for of in faults()),
    )
    print(
        f"{series} simulated runs a row, DDP and sharded in turns; {time.perf_counter() - began:.0f} s"
    )


def _table(header: list[str], rows: Iterable[list[str]]) -> None:
    print(
        "| " + " | ".join(header) + " |\n| " + " | ".join(["---"] * len(header)) + " |",
        flush=True,
    )
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    main()

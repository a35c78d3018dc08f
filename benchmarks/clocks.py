"""How well the clocks of ranks are compared over a real store: each rank reads one that is wrong by a known amount.

python -m benchmarks.clocks --ranks=8 --busy
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed

from benchmarks.known_ranks.processes import on_ranks
from lm_profiler.measure.collectives.alignment import ClockComparison

_AHEAD_NS = 1_234_567_000
_DRIFT = 50e-6


@dataclass
class Answer:
    """Of one rank's clock: what was off and how far it may be, in seconds, by comparison; and what each comparison took
    on rank 0."""

    errors_s: list[float]
    uncertainties_s: list[float]
    took_s: list[float]


def compared(rank: int, ranks: int, began_ns: int, apart_s: float, busy: bool) -> Any:
    """Each rank's clock, as rank 0 has it after two comparisons."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)

    def truth_ns(of: int, at_ns: int) -> float:
        """What the clock of rank ``of`` is ahead where it shows ``at_ns``."""
        true_ns = (at_ns - of * _AHEAD_NS + began_ns * of * _DRIFT) / (1 + of * _DRIFT)
        return at_ns - true_ns

    def clock() -> int:
        now = time.perf_counter_ns()
        return now + rank * _AHEAD_NS + round((now - began_ns) * rank * _DRIFT)

    store = torch.distributed.distributed_c10d._get_default_store()
    comparison = ClockComparison(store, rank, ranks, 60.0, clock, f"machine {rank}")
    took_s = []
    for _ in range(2):
        before = time.perf_counter()
        comparison.compare()
        took_s.append(time.perf_counter() - before)
        until = time.perf_counter() + apart_s
        while time.perf_counter() < until:
            if not busy:
                time.sleep(0.01)
    torch.distributed.barrier()
    if rank:
        return None
    known = [comparison.of(other, 0) for other in range(1, ranks)]
    pairs = [(other, reading) for other, two in enumerate(known, 1) for reading in two or ()]
    return Answer(
        [(reading.ahead_ns - truth_ns(other, reading.at_ns)) * 1e-9 for other, reading in pairs],
        [reading.uncertainty_ns * 1e-9 for _, reading in pairs],
        took_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, default=8, help="each on a clock of its own, which gains 50 ppm by its rank"
    )
    parser.add_argument("--apart_s", type=float, default=1.0, help="from the first comparison to the second")
    parser.add_argument("--busy", action="store_true", help="the ranks compute meanwhile, and come when they come")
    given = parser.parse_args()
    ranks, began_ns = given.ranks, time.perf_counter_ns()
    answer = on_ranks(ranks, lambda rank: compared(rank, ranks, began_ns, given.apart_s, given.busy))[0]
    pairs = list(zip(answer.errors_s, answer.uncertainties_s, strict=True))
    worst_s = max(abs(error) for error, _ in pairs)
    within = all(abs(error) <= told for error, told in pairs)
    told_us = [f"{edge(answer.uncertainties_s) * 1e6:.1f}" for edge in (min, max)]
    print(f"{ranks} ranks, two comparisons {given.apart_s:g} s apart{', busy' * given.busy}")
    print(f"largest error {worst_s * 1e6:.1f} µs; told ± {' to '.join(told_us)} µs; all within: {within}")
    print(f"rank 0 took {answer.took_s[0] * 1e3:.1f} and {answer.took_s[1] * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

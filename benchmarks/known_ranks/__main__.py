"""Who waits for whom, against the truth, on two and four real ranks.

    python -m benchmarks.known_ranks [--cases TEXT] [--seeds 20]

What each rank notes of itself is the truth of own work and waiting (``truth``); what removing a delay saves is seen in
the same processes, in turns without it and with it (``trial``). Ten minutes on an idle machine; on a busy one ranks are
late by themselves, and differ from one turn to the next.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from benchmarks.known_ranks.answers import LEAST_S, SHARE, Answer, answer
from benchmarks.known_ranks.cases import SEEDS, of_four, of_two, ranks_of, seeded
from benchmarks.known_ranks.processes import on_ranks
from benchmarks.known_ranks.trial import Case, quieten, watch
from lm_profiler.measure.device.environment import device_name
from lm_profiler.record.rank_facts import RankFinding
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

_TITLES = (
    "ranks",
    "ms added",
    "found",
    "own work off (ms)",
    "waiting off (ms)",
    "saves, predicted (ms)",
    "saved, really (ms)",
    "off",
    "of the step",
)


def answers(cases: Sequence[Case], world: int) -> list[Answer]:
    """Of each case, on ``world`` ranks."""
    if not cases:
        return []

    def work(rank: int) -> list[Answer]:
        quieten()
        found = []
        for case in cases:
            everyone: list[Any] = [None] * world
            torch.distributed.all_gather_object(everyone, watch(case, rank, world))
            found.append(answer(case, everyone))
            if rank == 0:
                print(" | ".join(row(found[-1])), file=sys.stderr, flush=True)
        return found

    return on_ranks(world, work)[0]


def told(finding: RankFinding | None) -> str:
    if finding is None:
        return "nothing"
    named = [
        f"rank {finding.rank}" if finding.rank is not None else "",
        finding.phase or "",
    ]
    return " ".join([finding.kind, *filter(None, named)])


def row(each: Answer) -> list[str]:
    found, off_s = each.finding, each.off_s
    saves = ""
    if found is not None and found.saves_s is not None:
        between = [
            f"{each * 1e3:.1f}"
            for each in (found.low_s, found.high_s)
            if each is not None
        ]
        saves = f"{found.saves_s * 1e3:.1f} [{', '.join(between)}]"
    return [
        str(each.world),
        each.case.name,
        f"{told(found)}{'' if each.right else ' (WRONG)'}",
        f"{each.own_off_s * 1e3:.2f}",
        f"{each.waiting_off_s * 1e3:.2f}{'' if each.close else ' (FAR)'}",
        saves,
        f"{each.saved_s * 1e3:.1f}",
        "" if off_s is None or not each.case.delays else f"{off_s / each.saved_s:+.1%}",
        "" if off_s is None else f"{off_s / each.step_s:+.1%}",
    ]


def verdict(found: Sequence[Answer]) -> str:
    """How many of the runs are right, by each aim."""
    counts = {
        "the right rank and phase": [each.right for each in found],
        f"own work and waiting within {SHARE:.0%} or {LEAST_S * 1e3:.0f} ms": [
            each.close for each in found
        ],
        "the saving within 5 % of what it really was": [
            each.foreseen for each in found
        ],
        "the saving within 5 % of the step": [each.foreseen_of_step for each in found],
    }
    return "\n".join(
        f"- {aim}: {sum(held)} of {len(held)}" for aim, held in counts.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only those whose name holds this")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    began = time.monotonic()
    quieten()
    print(
        f"{device_name(torch.device('cpu'))}, {platform.platform()}, torch {torch.__version__}\n"
    )
    known, drawn = (
        {2: of_two(), 4: of_four()},
        [seeded(seed) for seed in range(given.seeds)],
    )
    named: list[Answer] = []
    trials: list[Answer] = []
    for world, cases in known.items():
        named += answers([case for case in cases if given.cases in case.name], world)
        trials += answers(
            [case for case in drawn if ranks_of(case.seed) == world], world
        )
    for found in (named, trials):
        if found:
            print(markdown(text_table(_TITLES, [row(each) for each in found])))
    if trials:
        print(
            f"Of {len(trials)} runs whose delays a seed chose:\n\n{verdict(trials)}\n"
        )
    for each in [*named, *trials]:
        if each.notes:
            print(f"- {each.world} ranks, {each.case.name}: {'; '.join(each.notes)}")
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

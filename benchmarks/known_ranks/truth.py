"""Own work and waiting of the same run, from what all ranks noted of themselves.

Whoever comes to a collective before the last rank waits until that one has come. A broadcast does not hold everybody:
who leaves it before the last rank has come waited for as long as the call took. What a phase lasts and is not waited in
it is own work.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.known_ranks.notes import Met, Notes


@dataclass(frozen=True)
class Truth:
    """Mean seconds a step of one rank, by phase."""

    own_s: Mapping[str, float]
    waiting_s: Mapping[str, float]


def truth_of(ranks: Sequence[Notes], steps: Iterable[int], batches: int) -> list[Truth]:
    """Of each rank in ``steps``, of ``batches`` each."""
    # training may end amid a collective's note
    met = list(zip(*(notes.met for notes in ranks), strict=False))
    assert all(len({each.name for each in together}) == 1 for together in met)
    waits = [_waits_ns(together) for together in met]
    chosen = list(steps)
    return [
        _truth(notes, [each[rank] for each in waits], chosen, batches)
        for rank, notes in enumerate(ranks)
    ]


def _waits_ns(together: Sequence[Met]) -> list[int]:
    """Of each rank at one collective."""
    last_ns = max(met.came_ns for met in together)
    return [min(last_ns, met.left_ns) - met.came_ns for met in together]


def _truth(
    notes: Notes, waits_ns: Sequence[int], steps: Sequence[int], batches: int
) -> Truth:
    began = [
        notes.asked_ns[step * batches] for step in range(len(notes.asked_ns) // batches)
    ]
    counted = {step for step in steps if step + 1 < len(began)}
    assert len(counted) == len(steps)
    lasted, waiting = Counter[str](), Counter[str]()
    for phase, since, until in notes.spans:
        if bisect_right(began, since) - 1 in counted:
            lasted[phase] += until - since
    over = [notes.over_ns[(step + 1) * batches] for step in counted]
    lasted["other"] = sum(over) - sum(began[step] for step in counted) - lasted.total()
    starts = [span.began_ns for span in notes.spans]
    for met, wait in zip(notes.met, waits_ns, strict=False):
        if bisect_right(began, met.came_ns) - 1 in counted:
            at = bisect_right(starts, met.came_ns) - 1
            inside = at >= 0 and met.came_ns < notes.spans[at].ended_ns
            waiting[notes.spans[at].phase if inside else "other"] += wait
    share = 1e-9 / len(counted)
    own = {phase: (ns - waiting[phase]) * share for phase, ns in lasted.items()}
    return Truth(own, {phase: ns * share for phase, ns in waiting.items()})


def step_s(ranks: Sequence[Notes], blocks: Iterable[range], batches: int) -> float:
    """The mean step of the ranks in a block of steps, of ``blocks`` the median: one that something else held up is not
    what a delay costs."""
    means = []
    for block in blocks:
        lasted = [
            n.asked_ns[block.stop * batches] - n.asked_ns[block.start * batches]
            for n in ranks
        ]
        means.append(statistics.mean(lasted) / len(block) * 1e-9)
    return statistics.median(means)

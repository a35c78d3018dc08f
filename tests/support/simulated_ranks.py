"""Ranks that train in step, simulated: what each one worked is given, so that every wait and every saving is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import Collective, RankTimeline
from lm_profiler.record.parts import PARTS

CALL_S = 5e-5
"""What a call itself takes, when nobody is waited for."""

ALL, TREE, NOBODY = "all", "tree", "nobody"

BASE_S = {"data": 0.005, "forward": 0.02, "backward": 0.04, "optimizer": 0.005, "other": 0.002}

FLAG = [("call", "gloo:broadcast", TREE)] * 2
"""What Lightning asks rank 0 before every batch."""

DDP = [
    *[("work", "data", 1.0), ("work", "other", 0.5), *FLAG],
    *[("work", "forward", 1.0), ("work", "backward", 0.3), ("call", "gloo:all_reduce", NOBODY)],
    *[("work", "backward", 0.5), ("call", "gloo:all_reduce", NOBODY)],
    *[("work", "backward", 0.2), ("call", "gloo:all_reduce", ALL)],
    *[("work", "optimizer", 1.0), ("work", "other", 0.5)],
]

ACCUMULATED = [
    *[("work", "data", 0.25), *FLAG, ("work", "forward", 0.25), ("work", "backward", 0.25)] * 3,
    *[("work", "data", 0.25), *FLAG, ("work", "forward", 0.25), ("work", "backward", 0.25)],
    *[("call", "gloo:all_reduce", ALL), ("work", "optimizer", 1.0), ("work", "other", 1.0)],
]

SHARDED = [
    *[("work", "data", 1.0), ("work", "other", 0.5), *FLAG],
    *[("call", "gloo:all_gather", ALL), ("work", "forward", 0.25)] * 4,
    *[("call", "gloo:all_gather", ALL), ("work", "backward", 0.25), ("call", "gloo:reduce_scatter", ALL)] * 4,
    *[("work", "optimizer", 1.0), ("work", "other", 0.5)],
]

VALIDATED = [*DDP, ("work", "validation", 1.0), ("call", "gloo:barrier", ALL)]
"""A validation after each step, at whose end the ranks meet."""

PLACES = [*PARTS, "validation"]
"""By code; what lies outside of the step comes last."""

Op = tuple[str, str, float | str]


@dataclass(frozen=True)
class Truth:
    """``own_s`` and ``waiting_s`` are [rank, step, part], ``validation_s`` the own work of validations, [rank, step].

    ``step_s`` is the mean step, to the end of the last rank.
    """

    timelines: list[RankTimeline]
    own_s: NDArray[np.float64]
    waiting_s: NDArray[np.float64]
    validation_s: NDArray[np.float64]
    step_s: float


def usual_work_s(ranks: int, steps: int, noise: float = 0.0, seed: int = 0) -> dict[str, NDArray[np.float64]]:
    """Seconds of each part, [rank, step], with a normal noise of that share of them."""
    rng = np.random.default_rng(seed)
    return {
        part: base * np.maximum(1.0 + noise * rng.standard_normal((ranks, steps)), 0.05)
        for part, base in BASE_S.items()
    }


def simulate(
    work_s: Mapping[str, NDArray[np.float64]],
    program: Sequence[Op] = tuple(DDP),
    hosts: Sequence[str] | None = None,
    groups: int = 1,
) -> Truth:
    """Run ``program`` every step. ``groups``: how many groups the ranks form in calls to all of them but broadcasts."""
    ranks, steps = next(iter(work_s.values())).shape
    now = np.linspace(0.0, 1e-4, ranks)
    own, waiting = np.zeros((ranks, steps, len(PLACES))), np.zeros((ranks, steps, len(PLACES)))
    marks: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]
    first = [0]
    came: list[list[float]] = [[] for _ in range(ranks)]
    calls: list[list[Collective]] = [[] for _ in range(ranks)]
    for step in range(steps):
        part = None
        for kind, what, how in program:
            if kind == "work":
                if what != part:
                    part = what
                    for rank in range(ranks):
                        marks[rank].append((PLACES.index(part), now[rank]))
                worked = work_s[part][:, step] * how
                own[:, step, PLACES.index(part)] += worked
                now = now + worked
                continue
            for rank in range(ranks):
                group = rank % groups if how != TREE else 0
                whose = f"{group} of {groups}" if how != TREE else "everyone"
                calls[rank].append(Collective(whose, len(calls[rank]), what))
                came[rank].append(now[rank])
            left = now.copy()
            for group in range(groups if how == ALL else 1):
                if how == ALL:
                    left[group::groups] = now[group::groups].max()
            if how == TREE:
                left = np.array([_left_tree(v, now) for v in range(ranks)])
            waiting[:, step, PLACES.index(part)] += left - now
            now = left + CALL_S
            own[:, step, PLACES.index(part)] += CALL_S
        for rank in range(ranks):
            marks[rank].append((PLACES.index("other"), now[rank]))
        first.append(len(marks[0]))
    names = hosts or ["here"] * ranks
    timelines = [_timeline(r, names[r], steps, first, marks[r], came[r], calls[r]) for r in range(ranks)]
    inside = len(PARTS)
    validation_s = own[:, :, inside]
    return Truth(timelines, own[:, :, :inside], waiting[:, :, :inside], validation_s, float(now.max()) / steps)


def _parent(v: int) -> int:
    return v - (1 << (v.bit_length() - 1))


def _has(v: int, came: NDArray[np.float64]) -> float:
    return float(came[v]) if v == 0 else max(float(came[v]), _has(_parent(v), came))


def _left_tree(v: int, came: NDArray[np.float64]) -> float:
    below = [float(came[c]) for c in range(1, len(came)) if _parent(c) == v]
    return max([_has(v, came), *below])


def _timeline(
    rank: int,
    host: str,
    steps: int,
    first: list[int],
    marks: list[tuple[int, float]],
    came: list[float],
    calls: list[Collective],
) -> RankTimeline:
    boot_ns = 3_600_000_000_000

    def clock(at_s: float) -> int:
        return boot_ns + round(at_s * 1e9)

    return RankTimeline(
        rank,
        host,
        np.arange(1, steps + 1, dtype=np.int64),
        np.array(first, dtype=np.int64),
        np.array([code for code, _ in marks], dtype=np.uint8),
        np.array([clock(at) for _, at in marks], dtype=np.int64),
        np.array([clock(at) for at in came], dtype=np.int64),
        calls,
        "here",
    )

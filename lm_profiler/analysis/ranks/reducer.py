"""Exposed communication and waiting from what each rank's DDP timed itself: the second witness.

Its communication ends for all ranks together. On the rank that begins it last nobody is waited for, so what its
computing does not hide is communication; what another rank has more is waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean


@dataclass(frozen=True)
class ReducerTimes:
    """Of one rank: seconds of each backward's communication that no computing hid, by the backward's number."""

    rank: int
    exposed_s: Mapping[int, float]


@dataclass(frozen=True)
class BackwardCommunication:
    """Means over ``backwards``: seconds of communication that no computing hides, and what each rank waits there."""

    exposed_s: float
    waiting_s: Mapping[int, float]
    backwards: int


def backward_communication(ranks: Sequence[ReducerTimes]) -> BackwardCommunication | None:
    """From the backwards that all ``ranks`` know of; None where there are none, or only one rank knows."""
    if len(ranks) < 2:
        return None
    common = sorted(set.intersection(*(set(each.exposed_s) for each in ranks)))
    if not common:
        return None
    least = {number: min(each.exposed_s[number] for each in ranks) for number in common}
    waiting = {each.rank: mean(each.exposed_s[number] - least[number] for number in common) for each in ranks}
    return BackwardCommunication(mean(least.values()), waiting, len(common))

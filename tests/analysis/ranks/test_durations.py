"""Waits of simulated ranks, from nothing but how long each was in each collective."""

from __future__ import annotations

import numpy as np
import pytest

from lm_profiler.analysis.ranks.durations import with_waits
from lm_profiler.analysis.ranks.timeline import ClockOffset, Collective, RankTimeline


def timeline(rank: int, calls: list[Collective], took_ns: list[int] | None) -> RankTimeline:
    nothing = np.array([], dtype=np.int64)
    waited = None if took_ns is None else np.array(took_ns, dtype=np.int64)
    codes = nothing.astype(np.uint8)
    return RankTimeline(rank, "host", nothing, nothing, codes, nothing, nothing, calls, ClockOffset(), waited)


def test_a_rank_waits_from_when_it_comes_until_the_last_does() -> None:
    draw = np.random.default_rng(5)
    came = draw.integers(0, 10**7, (30, 4))
    ends = came.max(axis=1) + draw.integers(10**4, 10**5, 30)
    calls = [Collective("0", number, "nccl:all_reduce") for number in range(30)]
    waiting = with_waits([timeline(rank, calls, (ends - came[:, rank]).tolist()) for rank in range(4)])
    for rank in range(4):
        assert waiting[rank].waited_ns == pytest.approx(came.max(axis=1) - came[:, rank])


def test_groups_of_some_ranks_are_compared_with_their_own() -> None:
    calls = {0: ("a", 1), 1: ("a", 1), 2: ("b", 1), 3: ("b", 1)}
    took = {0: 5, 1: 9, 2: 100, 3: 90}
    ranks = [timeline(r, [Collective(*calls[r], "nccl:all_gather")], [took[r]]) for r in range(4)]
    waits = [0 if each.waited_ns is None else int(each.waited_ns[0]) for each in with_waits(ranks)]
    assert waits == [0, 4, 10, 0]


def test_what_one_rank_has_not_timed_is_unknown_on_all() -> None:
    calls = [Collective("0", number, "nccl:all_reduce") for number in range(2)]
    first, second = with_waits([timeline(0, calls, [7, 7]), timeline(1, calls, [-1, 5])])
    assert first.waited_ns is not None
    assert second.waited_ns is not None
    assert first.waited_ns.tolist() == [-1, 2]
    assert second.waited_ns.tolist() == [-1, 0]


def test_arrivals_on_compared_clocks_stay_as_they_are() -> None:
    alone = timeline(0, [], None)
    assert with_waits([alone]) == [alone]

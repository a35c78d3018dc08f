"""Waits of simulated ranks, from nothing but how long each was in each collective."""

from collections.abc import Sequence

import numpy as np
import pytest

from lm_profiler.analysis.ranks.rank_timeline import Collective, RankTimeline, stream_instants_ns, with_waits


def timeline(rank: int, calls: list[Collective], took_ns: list[int] | None) -> RankTimeline:
    nothing = np.array([], dtype=np.int64)
    waited = None if took_ns is None else np.array(took_ns, dtype=np.int64)
    codes = nothing.astype(np.uint8)
    return RankTimeline(rank, "host", nothing, nothing, codes, nothing, nothing, calls, str(rank), waited)


def test_a_rank_waits_in_its_group_until_the_last_one_comes() -> None:
    draw = np.random.default_rng(5)
    came = draw.integers(0, 10**7, (30, 4))
    ends = came.max(axis=1) + draw.integers(10**4, 10**5, 30)
    calls = [Collective("0", number, "nccl:all_reduce") for number in range(30)]
    waiting = with_waits([timeline(rank, calls, (ends - came[:, rank]).tolist()) for rank in range(4)])
    for rank in range(4):
        assert waiting[rank].waited_ns == pytest.approx(came.max(axis=1) - came[:, rank])
    # Groups of some ranks are compared with their own.
    calls = {0: ("a", 1), 1: ("a", 1), 2: ("b", 1), 3: ("b", 1)}
    took = {0: 5, 1: 9, 2: 100, 3: 90}
    ranks = [timeline(r, [Collective(*calls[r], "nccl:all_gather")], [took[r]]) for r in range(4)]
    waits = [0 if each.waited_ns is None else int(each.waited_ns[0]) for each in with_waits(ranks)]
    assert waits == [0, 4, 10, 0]
    # What one rank has not timed is unknown on all.
    calls = [Collective("0", number, "nccl:all_reduce") for number in range(2)]
    first, second = with_waits([timeline(0, calls, [7, 7]), timeline(1, calls, [-1, 5])])
    assert first.waited_ns.tolist() == [-1, 2]
    assert second.waited_ns.tolist() == [-1, 0]
    # Arrivals on compared clocks stay as they are.
    alone = timeline(0, [], None)
    assert with_waits([alone]) == [alone]


def reduced_behind(own: int, shares: Sequence[float], took: Sequence[int]) -> tuple[list[int], int]:
    """When DDP's buckets are ready in ``own`` work, and when backward ends: one begins when the last one has ended."""
    ready, free = [round(share * own) for share in shares], 0
    for at, long in zip(ready, took, strict=True):
        free = max(at, free) + long
    return ready, free


def put(shares: Sequence[float], took: Sequence[int], lasts: int, behind: bool, host: int = 1000) -> list[int]:
    """In the second of three parts; the host, which called at ``shares`` of it, is done before the stream begins."""
    marks, stream = np.array([0, 10, 10 + host, 20 + host]), 5000 + np.cumsum([0, 700, lasts, 100])
    called = np.array([10 + round(share * host) for share in shares])
    found = stream_instants_ns(called, np.array(took), marks, stream, np.array([False, behind, False, False]))
    return (found - 5700).tolist()


@pytest.mark.parametrize(
    "took", [[20_000, 20_000, 30_000], [1000, 90_000, 40_000], [90_000, 1000, 1000], [0, 0, 0], [500, 500, 50_000]]
)
def test_of_reductions_behind_a_backward_each_stands_where_its_gradients_are_ready(took: list[int]) -> None:
    shares = [0.3, 0.6, 0.9]  # the host then waits for the threads of autograd, the stream for nothing
    ready, ends = reduced_behind(60_000, [share / 0.9 for share in shares], took)
    assert put(shares, took, ends, behind=True) == pytest.approx(ready, abs=2)


def test_the_last_reduction_ends_backward_and_calls_that_are_waited_for_stand_in_their_place() -> None:
    assert put([0.8], [20_000], 35_000, behind=True) == [15_000]
    assert put([0.1], [20_000], 35_000, behind=True) == [15_000]
    # A stream stands in calls that it waits for in their place.
    own, took = 40_000, [5000, 15_000]
    assert put([0.25, 0.5], took, own + sum(took), behind=False) == [10_000, 20_000 + 5000]
    # What takes longer than its part begins with it at the earliest.
    assert put([0.5], [9000], 4000, behind=True) == [0]
    assert put([0.5], [9000], 4000, behind=False) == [0]

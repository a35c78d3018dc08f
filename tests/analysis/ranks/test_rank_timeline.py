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


def test_a_rank_waits_until_the_last_rank_of_its_group_arrives() -> None:
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
    waits = [0 if rank.waited_ns is None else int(rank.waited_ns[0]) for rank in with_waits(ranks)]
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


def placed_arrivals(shares: list[float], took: list[int], lasts: int, behind: bool, host: int = 1000) -> list[int]:
    """In the second of three parts; the host, which called at ``shares`` of it, is done before the stream begins."""
    marks, stream = np.array([0, 10, 10 + host, 20 + host]), 5000 + np.cumsum([0, 700, lasts, 100])
    called = np.array([10 + round(share * host) for share in shares])
    found = stream_instants_ns(called, np.array(took), marks, stream, np.array([False, behind, False, False]))
    return (found - 5700).tolist()


@pytest.mark.parametrize(
    "took", [[20_000, 20_000, 30_000], [1000, 90_000, 40_000], [90_000, 1000, 1000], [0, 0, 0], [500, 500, 50_000]]
)
def test_each_reduction_stands_where_its_gradients_are_ready(took: list[int]) -> None:
    shares = [0.3, 0.6, 0.9]  # the host then waits for the threads of autograd, the stream for nothing
    ready, ends = reduced_behind(60_000, [share / 0.9 for share in shares], took)
    assert placed_arrivals(shares, took, ends, behind=True) == pytest.approx(ready, abs=2)


def test_the_last_reduction_ends_backward() -> None:
    for share in (0.8, 0.1):
        assert placed_arrivals([share], took=[20_000], lasts=35_000, behind=True) == [35_000 - 20_000]


def test_calls_that_the_stream_waits_for_keep_their_place() -> None:
    own_ns, took = 40_000, [5000, 15_000]
    found = placed_arrivals([0.25, 0.5], took, lasts=own_ns + sum(took), behind=False)
    assert found == [0.25 * own_ns, 0.5 * own_ns + took[0]]


@pytest.mark.parametrize("behind", [True, False])
def test_a_call_longer_than_its_part_begins_with_it(behind: bool) -> None:
    assert placed_arrivals([0.5], took=[9000], lasts=4000, behind=behind) == [0]

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


def reduction(number: int, group: str = "0") -> Collective:
    return Collective(group, number, "nccl:all_reduce")


def test_a_rank_waits_until_the_last_rank_arrives() -> None:
    """Four ranks come to 30 calls at random times, each of which ends for all of them at the same time."""
    draw = np.random.default_rng(5)
    came_ns = draw.integers(0, 10**7, (30, 4))
    last_came_ns = came_ns.max(axis=1)
    ended_ns = last_came_ns + draw.integers(10**4, 10**5, 30)
    calls = [reduction(number) for number in range(30)]
    ranks = [timeline(rank, calls, (ended_ns - came_ns[:, rank]).tolist()) for rank in range(4)]
    for number, rank in enumerate(with_waits(ranks)):
        assert rank.waited_ns == pytest.approx(last_came_ns - came_ns[:, number])


def test_ranks_are_compared_with_those_of_their_group() -> None:
    """In each of two groups the rank that was in the call for the shortest time came last."""
    ranks = [
        timeline(0, [reduction(1, group="a")], [5]),
        timeline(1, [reduction(1, group="a")], [9]),
        timeline(2, [reduction(1, group="b")], [100]),
        timeline(3, [reduction(1, group="b")], [90]),
    ]
    assert [rank.waited_ns.tolist() for rank in with_waits(ranks)] == [[0], [9 - 5], [100 - 90], [0]]


def test_a_call_that_one_rank_has_not_timed_is_unknown_on_all() -> None:
    calls = [reduction(0), reduction(1)]
    first, second = with_waits([timeline(0, calls, [7, 7]), timeline(1, calls, [-1, 5])])
    assert first.waited_ns.tolist() == [-1, 7 - 5]
    assert second.waited_ns.tolist() == [-1, 0]


def test_arrivals_on_compared_clocks_stay_as_they_are() -> None:
    alone = timeline(0, [], None)
    assert with_waits([alone]) == [alone]


def buckets_of_backward(own_ns: int, shares: Sequence[float], took_ns: Sequence[int]) -> tuple[list[int], int]:
    """When DDP's buckets are ready in ``own_ns`` of work, and when backward ends: they are reduced one by one."""
    ready_ns, end_ns = [round(share * own_ns) for share in shares], 0
    for bucket_ready_ns, length_ns in zip(ready_ns, took_ns, strict=True):
        end_ns = max(bucket_ready_ns, end_ns) + length_ns
    return ready_ns, end_ns


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
    ready, ends = buckets_of_backward(60_000, [share / 0.9 for share in shares], took)
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

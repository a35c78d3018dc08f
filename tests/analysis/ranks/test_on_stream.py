"""Calls that a host makes ahead of its stream, put where a stream of known work comes to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lm_profiler.analysis.ranks.on_stream import comes_ns


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
    found = comes_ns(called, np.array(took), marks, stream, np.array([False, behind, False, False]))
    return (found - 5700).tolist()


@pytest.mark.parametrize(
    "took",
    [[20_000, 20_000, 30_000], [1000, 90_000, 40_000], [90_000, 1000, 1000], [0, 0, 0], [500, 500, 50_000]],
)
def test_of_reductions_behind_a_backward_each_stands_where_its_gradients_are_ready(took: list[int]) -> None:
    shares = [0.3, 0.6, 0.9]  # the host then waits for the threads of autograd, the stream for nothing
    ready, ends = reduced_behind(60_000, [share / 0.9 for share in shares], took)
    assert put(shares, took, ends, behind=True) == pytest.approx(ready, abs=2)


def test_the_last_reduction_ends_backward_however_far_the_host_had_come_when_it_called() -> None:
    assert put([0.8], [20_000], 35_000, behind=True) == [15_000]
    assert put([0.1], [20_000], 35_000, behind=True) == [15_000]


def test_a_stream_stands_in_calls_that_it_waits_for_in_their_place() -> None:
    own, took = 40_000, [5000, 15_000]
    assert put([0.25, 0.5], took, own + sum(took), behind=False) == [10_000, 20_000 + 5000]


def test_what_takes_longer_than_its_part_begins_with_it_at_the_earliest() -> None:
    assert put([0.5], [9000], 4000, behind=True) == [0]
    assert put([0.5], [9000], 4000, behind=False) == [0]

"""Arrivals at collectives, from a ring like torch's."""

from __future__ import annotations

import pytest
from flight_ring import Ring

from lm_profiler.measure.collectives.recorder import ring_size


def test_every_call_is_kept_once_at_its_instant_on_the_clock_of_the_marks() -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    for at in range(0, 12, 3):
        for each in range(at, at + 3):
            ring.call(each * 1000)
        assert arrivals.drain() == 3
    assert arrivals.drain() == 0
    assert arrivals.at_ns == [each * 1000 for each in range(12)]
    assert [call.number for call in arrivals.calls] == list(range(1, 13))
    assert not arrivals.lost


def test_a_ring_that_came_round_since_it_was_read_is_told() -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    for each in range(9):
        ring.call(each)
    arrivals.drain()
    assert not arrivals.lost  # what was before the first reading is nobody's
    for each in range(9, 14):
        ring.call(each)
    arrivals.drain()
    assert arrivals.lost


def test_a_ring_that_was_empty_at_first_and_came_round_is_told() -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    arrivals.drain()
    for each in range(5):
        ring.call(each)
    arrivals.drain()
    assert arrivals.lost


def test_calls_to_one_rank_only_are_no_collectives_but_take_room() -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    ring.call(1)
    ring.call(2, "gloo:send", p2p=True)
    assert arrivals.drain() == 2
    assert arrivals.at_ns == [1]


@pytest.mark.parametrize("by_ns, was_set", [(50_000, False), (-3_000_000, True)])
def test_a_wall_clock_that_is_set_meanwhile_is_noticed(by_ns: int, was_set: bool) -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    arrivals.drain()
    ring.ahead += by_ns
    ring.call(1_000_000)
    arrivals.drain()
    assert arrivals.clock_was_set is was_set


def test_the_ring_is_as_long_as_torch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    assert ring_size() == 2000
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "300")
    assert ring_size() == 300
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    assert ring_size() == 50

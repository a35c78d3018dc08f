"""Clocks that are wrong on purpose, compared through a store by one thread a rank.

What is asserted holds however long a message takes: the true offset is within the uncertainty that is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from lm_profiler.measure.collectives.alignment import ClockComparison, clock_id

AHEAD_NS = [0, 1_234_567_000, 1_234_567_000, -9_876_543_210]
DRIFT = [0.0, 50e-6, 50e-6, -20e-6]
MACHINES = ["a", "b", "b", "c"]


def clock(rank: int, began_ns: int) -> Callable[[], int]:
    def now() -> int:
        true_ns = time.perf_counter_ns()
        return true_ns + AHEAD_NS[rank] + round((true_ns - began_ns) * DRIFT[rank])

    return now


def comparisons(ranks: int = 4, patience_s: float = 20.0) -> list[ClockComparison]:
    store, began_ns = torch.distributed.HashStore(), time.perf_counter_ns()
    return [
        ClockComparison(store, rank, ranks, patience_s, clock(rank, began_ns), MACHINES[rank]) for rank in range(ranks)
    ]


def compare(all_ranks: list[ClockComparison]) -> None:
    threads = [threading.Thread(target=each.compare) for each in all_ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_clock_that_is_ahead_and_drifts_is_known_at_two_instants() -> None:
    every = comparisons()
    compare(every)
    time.sleep(0.2)
    compare(every)
    for rank in range(1, 4):
        first, last = every[0].of(rank, 0) or pytest.fail("unknown")
        assert last.at_ns - first.at_ns >= 0.2e9
        for reading in (first, last):
            # What it was ahead at that instant: DRIFT since it began, which is within the test's seconds.
            assert abs(reading.ahead_ns - AHEAD_NS[rank]) <= reading.uncertainty_ns + 20e9 * abs(DRIFT[rank])
        gained_ns = (last.at_ns - first.at_ns) * DRIFT[rank]
        unsure_ns = first.uncertainty_ns + last.uncertainty_ns + 1
        assert abs(last.ahead_ns - first.ahead_ns - gained_ns) <= unsure_ns + abs(gained_ns * DRIFT[rank])


def test_one_rank_of_each_other_machine_is_asked() -> None:
    every = comparisons()
    compare(every)
    assert sorted(every[0].readings) == ["b", "c"]
    assert every[0].of(1, 0) == every[0].of(2, 0)
    assert every[0].of(0, 0) == ((0, 0, 0), (0, 0, 0))


def test_what_was_compared_once_is_less_sure_later() -> None:
    every = comparisons()
    compare(every)
    first, last = every[0].of(3, 0) or pytest.fail("unknown")
    assert first == last
    first, last = every[0].of(3, first.at_ns + 10**10) or pytest.fail("unknown")
    assert last.uncertainty_ns == pytest.approx(first.uncertainty_ns + 500_000)


def test_a_rank_that_never_comes_is_unknown_and_keeps_nobody_waiting_for_ever() -> None:
    every = comparisons(4, patience_s=4.0)  # of which half is waited for the last
    compare(every[:3])  # the last says nothing
    assert every[0].of(3, 0) is None
    assert every[0].of(2, 0) is not None


def test_a_rank_that_ends_between_two_comparisons_is_known_from_the_first() -> None:
    every = comparisons(2)
    compare(every)
    every[0].patience_s = 0.1
    every[0].compare()
    first, last = every[0].of(1, 0) or pytest.fail("unknown")
    assert first.at_ns == last.at_ns


def test_without_rank_0_the_others_are_told() -> None:
    with pytest.raises(RuntimeError):
        comparisons(2, patience_s=0.1)[1].compare()


def test_two_processes_of_a_machine_read_one_clock() -> None:
    assert clock_id() == clock_id()

"""How long a thread ran: told apart from sleep, in spans that are shorter than the kernel's tick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from lm_profiler.measure.counts.step_reader import thread_times

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts how long a thread waits for a CPU")


def spans(work: Callable[[], None], times: int = 20) -> list[tuple[int, int]]:
    """Nanoseconds of the wall and of running, for each of several short spans."""
    seen = []
    for _ in range(times):
        began_ns, before = time.perf_counter_ns(), thread_times()
        work()
        after = thread_times()
        assert before is not None
        assert after is not None
        seen.append((time.perf_counter_ns() - began_ns, after.ran_ns - before.ran_ns))
    return seen


def spin() -> None:
    until_ns = time.perf_counter_ns() + 300_000
    while time.perf_counter_ns() < until_ns:
        pass


def test_thread_that_computes_is_seen_to_run_in_each_span() -> None:
    # Counters that are as old as the last tick stand still in most spans of 0.3 ms.
    assert all(0 < ran_ns <= wall_ns for wall_ns, ran_ns in spans(spin))


def test_thread_that_sleeps_is_not_seen_to_run() -> None:
    wall_ns, ran_ns = map(sum, zip(*spans(lambda: time.sleep(0.003)), strict=True))
    assert ran_ns < 0.5 * wall_ns

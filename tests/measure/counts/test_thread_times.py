"""How long a thread ran: told apart from sleep, in spans that are shorter than the kernel's tick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from lm_profiler.measure.counts.thread_times import thread_times

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts how long a thread waits for a CPU")


def spin() -> None:
    until_ns = time.perf_counter_ns() + 300_000
    while time.perf_counter_ns() < until_ns:
        pass


def shares(work: Callable[[], None], times: int = 20) -> float:
    """The share of the wall time in which the thread ran, or was ready to, over short spans."""
    wall_ns = busy_ns = 0
    for _ in range(times):
        began_ns, before = time.perf_counter_ns(), thread_times()
        work()
        after = thread_times()
        wall_ns += time.perf_counter_ns() - began_ns
        assert before is not None
        assert after is not None
        busy_ns += sum(after) - sum(before)
    return busy_ns / wall_ns


def test_thread_that_computes_is_seen_to_run_or_to_be_ready() -> None:
    # A thread that computes is never asleep, whatever else the machine does: its two times add up to the wall's.
    assert shares(spin) == pytest.approx(1.0, abs=0.15)


def test_thread_that_sleeps_is_seen_to_do_neither() -> None:
    assert shares(lambda: time.sleep(0.003)) < 0.5

"""Exposed communication of a trace that was reckoned by hand, and of what DDP timed."""

from __future__ import annotations

import pytest
from cuda_trace import cuda_step

from lm_profiler.analysis.ranks.exposed import exposed_communication
from lm_profiler.analysis.ranks.reducer import ReducerTimes
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.analysis.trace.walk import Packed
from lm_profiler.analysis.why.traced import Traced, traced_of

REDUCERS = [ReducerTimes(0, {1: 0.031, 2: 0.029}), ReducerTimes(1, {1: 0.001, 2: 0.003})]
DDPS = "DDP's own timings of 2 backwards, by which rank 0 waits there for 28 ms"


def traced() -> Traced:
    return traced_of(traced_work(Packed(cuda_step())))


def test_on_a_device_it_is_what_no_other_kernel_runs_beside() -> None:
    exposed = exposed_communication([], traced())
    # The all-reduce runs from 100 to 130 µs of the step, a matrix product until 110.
    assert exposed.seconds == pytest.approx({"backward": 20e-6})
    assert exposed.source is not None
    assert exposed.source.startswith("rank 0's trace of ")


def test_ddps_own_timings_have_no_waiting_in_them_and_go_first() -> None:
    exposed = exposed_communication(REDUCERS, traced())
    assert exposed.seconds == pytest.approx({"backward": 0.002})
    assert exposed.source == DDPS


def test_the_trace_of_the_host_says_nothing() -> None:
    fall = Traced([], [], 2, 1000, on_device=False)
    assert exposed_communication([], fall) == ({}, None)
    assert exposed_communication(REDUCERS, fall).source == DDPS
    assert exposed_communication([], None) == ({}, None)

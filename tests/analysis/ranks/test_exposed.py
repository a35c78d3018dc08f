"""What DDP timed on each rank, simulated: all end together, and each begins when its own backward gets there."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_trace import cuda_step

from lm_profiler.analysis.ranks.exposed import backward_communication, exposed_communication
from lm_profiler.analysis.ranks.rank_timeline import ReducerTimes
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.analysis.trace.walk import Packed
from lm_profiler.analysis.why.traced import Traced, traced_of


def test_what_the_last_to_come_takes_is_communication_and_the_rest_is_waiting() -> None:
    draw = np.random.default_rng(14)
    late_s = draw.uniform(0, 0.05, (20, 4))  # when each rank's compute ends
    takes_s = draw.uniform(0.001, 0.003, 20)
    ends_s = late_s.max(axis=1) + takes_s
    ranks = [
        ReducerTimes(rank, {number: ends_s[number] - late_s[number, rank] for number in range(20)}) for rank in range(4)
    ]
    found = backward_communication(ranks)
    assert found is not None
    assert found.exposed_s == pytest.approx(takes_s.mean())
    assert found.waiting_s == pytest.approx(dict(enumerate((late_s.max(axis=1, keepdims=True) - late_s).mean(axis=0))))
    assert found.backwards == 20


def test_only_backwards_that_all_ranks_know_of_count() -> None:
    found = backward_communication([ReducerTimes(0, {7: 0.5, 8: 0.1}), ReducerTimes(1, {8: 0.3, 9: 0.5})])
    assert found is not None
    assert (found.exposed_s, found.backwards) == (pytest.approx(0.1), 1)


@pytest.mark.parametrize("ranks", [[], [{1: 0.1}], [{1: 0.1}, {2: 0.1}], [{1: 0.1}, {}]])
def test_what_nobody_else_knows_of_is_unknown(ranks: list[dict[int, float]]) -> None:
    assert backward_communication([ReducerTimes(rank, known) for rank, known in enumerate(ranks)]) is None


REDUCERS = [ReducerTimes(0, {1: 0.031, 2: 0.029}), ReducerTimes(1, {1: 0.001, 2: 0.003})]
DDPS = "DDP's own timings of 2 backwards, by which rank 0 waits there for 28 ms"


def traced() -> Traced:
    return traced_of(traced_work(Packed(cuda_step())))


def test_on_a_device_it_is_what_no_other_kernel_runs_beside() -> None:
    exposed = exposed_communication([], traced())
    # The all-reduce runs from 100 to 130 µs of the step, a matrix product until 110.
    assert exposed.seconds == pytest.approx({"backward": 20e-6})
    assert exposed.source is not None
    assert exposed.source.startswith("rank 0's")


def test_ddps_own_timings_have_no_waiting_in_them_and_go_first() -> None:
    exposed = exposed_communication(REDUCERS, traced())
    assert exposed.seconds == pytest.approx({"backward": 0.002})
    assert exposed.source == DDPS


def test_the_trace_of_the_host_says_nothing() -> None:
    fall = Traced([], [], 2, on_device=False)
    assert exposed_communication([], fall) == ({}, None)
    assert exposed_communication(REDUCERS, fall).source == DDPS
    assert exposed_communication([], None) == ({}, None)

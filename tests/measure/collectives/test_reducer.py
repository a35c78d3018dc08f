"""DDP's own timings, from one that takes them in where the next forward begins, as torch's does."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.measure.collectives.reducer import ReducerTimer


class Sampling:
    """Iterations are of one nanosecond of communication more each; of every ``rate``-th it keeps what it took."""

    def __init__(self) -> None:
        self.rate, self.iterations = 100, 0
        self.timed: dict[str, int] = {}
        self.known: dict[str, int] = {}

    def step(self) -> None:
        if self.iterations and self.iterations % self.rate == 0:
            self.known = {**self.timed, "iteration": self.iterations}
        self.iterations += 1
        if self.iterations % self.rate == 0:
            self.timed = {
                "backward_comm_time": 1_000 + self.iterations,
                "backward_compute_comm_overlap_time": 400,
                "backward_comm_time_start": 10**18 + self.iterations,
            }

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.known

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate


@pytest.mark.parametrize("before", [3, 100, 101, 250])
def test_every_backward_from_the_first_to_the_last_but_one_is_read_once(before: int) -> None:
    ddp = Sampling()
    for _ in range(before):
        ddp.step()
    timer = ReducerTimer(cast("DistributedDataParallel", ddp))
    timer.start()
    for step in range(6):
        if step:
            timer.read()
        ddp.step()
    timer.read()
    timer.stop()
    sampled = [reading for reading in timer.readings if reading.backward > before]
    assert [reading.backward for reading in sampled] == list(range(before + 1, before + 6))
    assert [reading.communication_s for reading in sampled] == pytest.approx(
        [(1_000 + number) * 1e-9 for number in range(before + 1, before + 6)]
    )
    assert all(reading.hidden_s == pytest.approx(400e-9) for reading in timer.readings)
    assert ddp.rate == 100

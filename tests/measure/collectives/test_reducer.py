"""DDP's own timings, from one that takes them in where the next forward begins, as torch's does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.measure.collectives.recorder import collectives, flight_recorder
from lm_profiler.measure.collectives.reducer import ReducerTimer, bucket_bytes, reduces_in_backward


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


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


def test_the_buckets_that_ddp_tells_are_what_it_sends(alone: None) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.004)
    for _ in range(3):
        ddp(torch.ones(1, 32)).sum().backward()
    dump = flight_recorder("cpu")
    assert dump is not None
    sent = [call.sent_bytes for call in collectives(dump()) if call.name == "gloo:all_reduce"]
    buckets = bucket_bytes(ddp)
    assert buckets is not None
    assert len(buckets) > 1
    assert sum(buckets) == 4 * sum(each.numel() for each in ddp.parameters())
    assert sent[-len(buckets) :] == buckets
    assert bucket_bytes(layers) is None
    ddp.register_comm_hook(None, allreduce_hook)  # whatever it sends
    assert bucket_bytes(ddp) is None


@pytest.mark.parametrize(
    "said, expected",
    [({}, False), ({"finish_gradient_synchronization": print}, True)]
    + [({"finish_gradient_synchronization": print, "reduces_in_backward": says}, says) for says in (True, False)],
)
def test_a_wrapper_that_can_finish_is_taken_to_begin_amid_backward_unless_it_says_otherwise(
    said: dict[str, object], expected: bool
) -> None:
    assert reduces_in_backward(SimpleNamespace(**said)) is expected

"""How long collectives take on the stream, which is known a while after they end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flight_ring import Ring

from lm_profiler.measure.collectives.durations import drain_timed, time_collectives
from lm_profiler.measure.collectives.recorder import Arrivals, flight_recorder


class Watchdog:
    """Times one more call whenever it is slept."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.now = ring, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        untimed = [entry for entry in self.ring.entries if "duration_ms" not in entry]
        if untimed:
            untimed[0]["duration_ms"] = 2.5

    def clock(self) -> float:
        return self.now


def test_the_ring_is_read_when_all_that_is_new_is_timed() -> None:
    ring = Ring(100)
    arrivals, watchdog = ring.arrivals(), Watchdog(ring)
    ring.call(1)
    arrivals.drain()  # what was before may stay untimed
    for at in range(2, 7):
        ring.call(at)
    ring.entries.pop(0)
    drain_timed(arrivals, watchdog.sleep, watchdog.clock)
    assert [call.duration_ns for call in arrivals.calls[1:]] == [2_500_000] * 5


def test_what_is_never_timed_is_waited_for_two_seconds() -> None:
    ring = Ring(100)
    arrivals, watchdog = ring.arrivals(), Watchdog(ring)
    for at in range(1, 60):
        ring.call(at)
    drain_timed(arrivals, watchdog.sleep, watchdog.clock)
    assert 2.0 <= watchdog.now < 2.1
    assert {call.duration_ns for call in arrivals.calls} == {2_500_000, None}


@pytest.mark.gpu
def test_nccl_times_its_collectives_from_when_it_is_asked_to(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    where = f"file://{tmp_path / 'meet'}"
    torch.distributed.init_process_group("nccl", init_method=where, rank=0, world_size=1, device_id=device)
    try:
        dump = flight_recorder("cuda") or pytest.fail("no recorder")
        arrivals, values = Arrivals(dump), torch.ones(1 << 20, device=device)
        gathered = torch.empty_like(values)
        torch.distributed.all_reduce(values)
        time_collectives()
        arrivals.drain()
        for _ in range(3):
            torch.cuda._sleep(1_000_000)  # of what is over when its call returns torch 2.15 tells no duration
            torch.distributed.all_gather([gathered], values)  # of one rank a copy, where a reduction is nothing
        torch.cuda.synchronize()
        drain_timed(arrivals)
        assert all("all_gather" in call.name for call in arrivals.calls[-3:])
        assert all(call.duration_ns is not None and call.duration_ns > 0 for call in arrivals.calls[-3:])
    finally:
        torch.distributed.destroy_process_group()

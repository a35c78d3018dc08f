"""Arrivals at collectives, from a ring like torch's."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flight_ring import Ring
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.measure.collective_calls import (
    Arrivals,
    StreamWaits,
    collectives,
    flight_recorder,
    most_reductions,
    oldest_pending_call,
    read_timed_ring,
    reduces_in_backward,
    ring_size,
    time_collectives,
)


def test_every_call_is_kept_once() -> None:
    """Twelve calls, read after every third; a call from rank to rank takes a place in the ring and is not kept."""
    ring = Ring(4)
    arrivals = ring.arrivals()
    for first in range(0, 12, 3):
        for number in range(first, first + 3):
            ring.call(number * 1000)
        assert arrivals.read_ring() == 3
    assert arrivals.read_ring() == 0
    assert arrivals.at_ns == [number * 1000 for number in range(12)]
    assert [call.number for call in arrivals.calls] == list(range(1, 13))
    ring.call(12_000, "gloo:send", p2p=True)
    assert arrivals.read_ring() == 1
    assert len(arrivals.calls) == 12


@pytest.mark.parametrize(
    "calls, lost",
    [
        ([3, 3, 3, 3], False),
        ([9], False),  # what was before the first reading is nobody's
        ([9, 5], True),
        ([0, 5], True),  # the ring was empty at first
    ],
)
def test_a_ring_that_wrapped_between_two_readings_is_reported(calls: list[int], lost: bool) -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    for count in calls:
        for _ in range(count):
            ring.call(ring.made)
        arrivals.read_ring()
    assert arrivals.lost is lost


@pytest.mark.parametrize("by_ns, was_set", [(50_000, False), (-3_000_000, True)])
def test_a_wall_clock_that_is_set_meanwhile_is_noticed(by_ns: int, was_set: bool) -> None:
    ring = Ring(4)
    arrivals = ring.arrivals()
    arrivals.read_ring()
    ring.ahead += by_ns
    ring.call(1_000_000)
    arrivals.read_ring()
    assert arrivals.clock_was_set is was_set


def test_the_ring_has_the_configured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    assert ring_size() == 2000
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "300")
    assert ring_size() == 300
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    assert ring_size() == 50


def test_the_oldest_pending_call_is_named() -> None:
    """As gloo's ring has the calls while another rank does not come (torch 2.13)."""
    ended = {"profiling_name": "gloo:all_reduce", "collective_seq_id": 1, "state": "scheduled", "retired": True}
    waits = {"profiling_name": "gloo:broadcast", "collective_seq_id": 2, "state": "scheduled", "retired": False}
    later = {"profiling_name": "gloo:all_reduce", "collective_seq_id": 3, "state": "scheduled", "retired": False}
    assert oldest_pending_call([ended, waits, later]) == "gloo:broadcast number 2"
    assert oldest_pending_call([ended]) is None


class Watchdog:
    """Times one more call whenever it is slept."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.now = ring, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        untimed = [entry for entry in self.ring.entries if "duration_ms" not in entry]
        if untimed:
            untimed[0]["duration_ms"] = 2.5


def test_the_ring_is_read_when_new_calls_are_timed() -> None:
    """The call of the first reading may stay untimed."""
    ring = Ring(100)
    arrivals, watchdog = ring.arrivals(), Watchdog(ring)
    ring.call(1)
    arrivals.read_ring()
    for at_ns in range(2, 7):
        ring.call(at_ns)
    ring.entries.pop(0)
    read_timed_ring(arrivals, watchdog.sleep)
    assert [call.duration_ns for call in arrivals.calls[1:]] == [2_500_000] * 5


def test_the_ring_is_read_after_two_seconds_at_the_latest() -> None:
    """Then not all of 59 calls are timed."""
    ring = Ring(100)
    arrivals, watchdog = ring.arrivals(), Watchdog(ring)
    for at_ns in range(1, 60):
        ring.call(at_ns)
    read_timed_ring(arrivals, watchdog.sleep)
    assert watchdog.now == pytest.approx(2.0)
    assert {call.duration_ns for call in arrivals.calls} == {2_500_000, None}


@pytest.mark.gpu
def test_nccl_times_its_collectives_after_a_request(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    where = f"file://{tmp_path / 'meet'}"
    torch.distributed.init_process_group("nccl", init_method=where, rank=0, world_size=1, device_id=device)
    try:
        dump = flight_recorder("cuda") or pytest.fail("no recorder")
        arrivals, values = Arrivals(dump), torch.ones(1 << 20, device=device)
        gathered = torch.empty_like(values)
        torch.distributed.all_reduce(values)
        time_collectives()
        arrivals.read_ring()
        for _ in range(3):
            torch.cuda._sleep(1_000_000)  # torch 2.15 gives no duration of a call that is over when it returns
            torch.distributed.all_gather([gathered], values)  # of one rank a copy, where a reduction is nothing
        torch.cuda.synchronize()
        read_timed_ring(arrivals)
        assert all("all_gather" in call.name for call in arrivals.calls[-3:])
        assert all(call.duration_ns is not None and call.duration_ns > 0 for call in arrivals.calls[-3:])
    finally:
        torch.distributed.destroy_process_group()


class FakeCuda:
    """Streams that note what they wait for; every look at the clock takes 1 ns, and so does what a stream waits for."""

    class Stream:
        def __init__(self) -> None:
            self.waited: list[str] = []

        def wait_event(self, event: str) -> None:
            self.waited.append(event)

    def __init__(self) -> None:
        self.now = 0
        self.own = self.current = self.Stream()

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream | None) -> None:
        self.current = stream or self.current

    def clock(self) -> int:
        self.now += 1
        return self.now

    def record(self) -> Any:
        return len(self.current.waited)


def test_waits_of_the_computing_stream_are_noted() -> None:
    """Only the first: of the others there is no instant, for another stream was the current one, or noting was over."""
    cuda = FakeCuda()
    other, waits = FakeCuda.Stream(), StreamWaits(cuda.record, cuda.clock, cuda)
    wait_event = FakeCuda.Stream.wait_event
    waits.start()
    cuda.own.wait_event("gathered")
    other.wait_event("computed")
    cuda.set_stream(other)
    cuda.own.wait_event("while the other stream is current")
    cuda.set_stream(cuda.own)
    waits.stop()
    waits.stop()
    cuda.own.wait_event("after it")
    assert cuda.own.waited == ["gathered", "while the other stream is current", "after it"]
    assert other.waited == ["computed"]
    (wait,) = waits.waits
    assert (wait.at_ns, wait.begin, wait.end) == (1, 0, 1)
    assert FakeCuda.Stream.wait_event is wait_event


def test_the_time_on_other_streams_is_noted() -> None:
    """From 10 ns on; setting no stream changes nothing, and at 30 ns the computing stream is the current one again."""
    cuda = FakeCuda()
    waits = StreamWaits(cuda.record, cuda.clock, cuda)
    waits.start()
    cuda.now = 10
    cuda.set_stream(FakeCuda.Stream())
    cuda.now = 20
    cuda.set_stream(None)
    cuda.now = 30
    cuda.set_stream(cuda.own)
    waits.stop()
    assert [waits.is_on_other_stream(at_ns) for at_ns in (5, 15, 25, 35)] == [False, True, True, False]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("unused", [False, True])
def test_ddp_reduces_as_often_as_it_reports(alone: None, unused: bool) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.004, find_unused_parameters=unused)
    dump = flight_recorder("cpu")
    for _ in range(3):
        before = len(dump())
        ddp(torch.ones(1, 32)).sum().backward()
    sent = [call for call in collectives(dump()[before:]) if call.name == "gloo:all_reduce"]
    assert most_reductions(ddp) == len(sent) > 1
    assert most_reductions(layers) is None
    ddp.register_comm_hook(None, allreduce_hook)  # whatever it sends
    assert most_reductions(ddp) is None


@pytest.mark.parametrize(
    "attributes, expected",
    [({}, False), ({"finish_gradient_synchronization": print}, True)]
    + [
        ({"finish_gradient_synchronization": print, "reduces_in_backward": reduces}, reduces)
        for reduces in (True, False)
    ],
)
def test_a_wrapper_that_can_finish_reduces_in_backward(attributes: dict[str, object], expected: bool):
    assert reduces_in_backward(SimpleNamespace(**attributes)) is expected

"""Delays on a device's stream: calibrated, and timed each by itself."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from fake_device import Clock, FakeStream

from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.delays.device import DeviceDelays


def test_a_delay_is_as_long_as_asked_and_says_how_long_it_was() -> None:
    clock = Clock()
    stream = FakeStream(clock, slowness=1.0)
    megahertz = 1000.0

    def sleep(cycles: int) -> None:
        clock.pass_ms(cycles / megahertz * 1e-3)

    delays = DeviceDelays(cast(EventStream, stream), sleep)
    delays.take(0.02, 3)
    delays.take(0.03, None)
    megahertz = 500.0  # hotter: the same cycles take twice as long
    delays.take(0.01, 4)
    assert delays.taken() == [(3, pytest.approx(0.02)), (4, pytest.approx(0.02))]
    assert delays.taken() == []
    assert stream.made == len(stream.free)  # every instant was handed back


def test_a_capture_is_neither_delayed_nor_waited_in(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    stream = FakeStream(clock, slowness=1.0)
    delays = DeviceDelays(cast(EventStream, stream), lambda cycles: clock.pass_ms(cycles * 1e-6))
    with monkeypatch.context() as capture:
        capture.setattr(stream, "capturing", lambda: True)
        capture.setattr(stream, "wait", lambda: pytest.fail("waited"))
        before = clock()
        delays.take(0.02, 3)
        delays.settle()
        assert clock() == before
    assert delays.taken() == []


@pytest.mark.gpu
def test_a_graph_that_is_captured_meanwhile_is_replayed_without_a_delay() -> None:
    stream = EventStream(torch.device("cuda", torch.cuda.current_device()))
    delays, graph, x = DeviceDelays(stream), torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        delays.take(0.2, 0)
        delays.settle()
        x + 1
    graph.replay()
    stream.wait()
    start = stream.record()
    graph.replay()
    end = stream.record()
    stream.wait()
    assert (stream.seconds(start, end) or 1.0) < 0.1
    assert delays.taken() == []


@pytest.mark.gpu
def test_on_a_gpu_a_delay_takes_about_as_long_as_asked() -> None:
    stream = EventStream(torch.device("cuda", torch.cuda.current_device()))
    delays = DeviceDelays(stream)
    for n in range(5):
        delays.take(0.02, n)
    assert [n for n, _ in delays.taken()] == [0, 1, 2, 3, 4]
    for _ in range(5):
        delays.take(0.02, 0)
    assert [seconds for _, seconds in delays.taken()] == pytest.approx([0.02] * 5, rel=0.3)  # clocks change

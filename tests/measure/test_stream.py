"""The device's clock."""

from __future__ import annotations

import time

import pytest
import torch

from lm_profiler.measure.stream import stream_of


def test_the_cpu_has_none() -> None:
    assert stream_of(torch.device("cpu")) is None


@pytest.mark.gpu
def test_it_agrees_with_an_independent_pair_of_events() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = stream_of(device)
    assert stream is not None
    for cycles in (10_000_000, 40_000_000):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        start = stream.record()
        torch.cuda._sleep(cycles)
        end = stream.record()
        last.record()
        torch.cuda.synchronize()
        theirs = first.elapsed_time(last) * 1e-3
        assert stream.seconds(start, end) == pytest.approx(theirs, rel=0.01, abs=20e-6)
        stream.release((start, end))


@pytest.mark.gpu
def test_marking_waits_for_nothing() -> None:
    stream = stream_of(torch.device("cuda", torch.cuda.current_device()))
    assert stream is not None
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)  # about a second
    instant = stream.record()
    assert not stream.reached(instant)
    assert time.perf_counter() - began < 0.2
    stream.wait()
    assert stream.reached(instant)

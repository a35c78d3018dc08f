"""The device's clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from lm_profiler.measure.clocks.stream import EventStream, stream_of
from lm_profiler.measure.clocks.tape import DATA, END, FORWARD, LEAVE
from lm_profiler.measure.clocks.timeline import Timeline


class Event:
    """An event of a device whose calls raise ``error`` if it is set; it keeps what it is recorded on."""

    error: Exception | None = None
    recorded: ClassVar[list[object]] = []

    def __init__(self, **options: Any) -> None:
        self.done = False

    def _ask(self) -> None:
        if Event.error is not None:
            raise Event.error

    def record(self, stream: object = None) -> None:
        self._ask()
        self.done = True
        Event.recorded.append(stream)

    def query(self) -> bool:
        self._ask()
        return True

    def elapsed_time(self, end: Event) -> float:
        self._ask()
        if not (self.done and end.done):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 2.0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventStream]:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch._C, "_accelerator_getStream", lambda index: f"current stream of device {index}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "recorded", [])
    yield EventStream(torch.device("cuda", 1))
    Event.error = None


def test_events_are_recorded_on_the_current_stream(stream: EventStream) -> None:
    stream.record()
    (recorded,) = Event.recorded
    assert recorded.endswith("device 1")
    assert stream_of(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted when stream is capturing"), ValueError("no GPU")]
)
def test_an_instant_that_cannot_be_taken_or_read_is_unknown(stream: EventStream, error: Exception) -> None:
    timeline = Timeline(lambda: 0, stream)
    for step in range(3):
        timeline.mark(DATA)
        Event.error = error if step == 1 else None  # one mark of the second step
        timeline.mark(FORWARD)
        Event.error = None
        timeline.mark(LEAVE)
        timeline.mark(END)
        marks = timeline.reading().finished.popleft()
        seconds = marks.stream_seconds(stream)
        if step == 1:
            assert seconds is None
        else:
            assert seconds[-1] == pytest.approx(3 * 2e-3)  # from each of four marks to the next, 2 ms pass
    first, last = stream.record(), stream.record()
    Event.error = error
    assert stream.seconds(first, last) is None
    assert not stream.reached(last)


def test_within_a_capture_no_event_is_touched(stream: EventStream, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stream.record()
    with monkeypatch.context() as capture:
        capture.setattr(stream, "capturing", lambda: True)
        capture.setattr(Event, "error", AssertionError("touched"))
        assert not stream.reached(before)
        within = stream.record()
    assert stream.seconds(before, within) is None


@pytest.mark.parametrize("error", [NotImplementedError("timing events"), AssertionError("no backend")])
def test_a_device_that_times_no_events_has_the_hosts_clock(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(**options: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "Event", refuse)
    assert stream_of(torch.device("mps", 0)) is None


@pytest.mark.gpu
def test_it_agrees_with_an_independent_pair_of_events() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = stream_of(device)
    for cycles in (10_000_000, 40_000_000):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # the host is ahead of what is recorded
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
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    instant = stream.record()
    assert not stream.reached(instant)  # the device still sleeps, so recording has not waited for it
    stream.wait()
    assert stream.reached(instant)


@pytest.mark.gpu
def test_marks_within_a_capture_do_not_disturb_it() -> None:
    stream = stream_of(torch.device("cuda", torch.cuda.current_device()))
    timeline, graph = Timeline(stream=stream), torch.cuda.CUDAGraph()
    timeline.mark(DATA)
    with torch.cuda.graph(graph):
        timeline.mark(FORWARD)
        torch.cuda._sleep(10_000_000)
        timeline.mark(LEAVE)
    timeline.mark(END)
    start = stream.record()
    graph.replay()
    end = stream.record()
    stream.wait()
    seconds = stream.seconds(start, end)
    assert seconds > 10_000_000 / 3e9  # no GPU's clock is that fast
    assert timeline.reading().finished.popleft().stream_seconds(stream) is None

"""Who waits on a device whose stream runs behind the host, with durations as NCCL has them."""

from __future__ import annotations

from typing import Any, cast

from flight_ring import Ring

from lm_profiler.callbacks.instruments.communication import STEPS
from lm_profiler.callbacks.instruments.stream_ranks import StreamRanksWatch
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.steps import BACKWARD, DATA, OTHER, StepMarks
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.collectives.streams import Stand, StreamWaits

HOST_NS, DEVICE_NS = 1_000_000, 4_000_000


class Stream:
    """Its events are their instants, in nanoseconds."""

    def seconds(self, start: int, end: int) -> float:
        return (end - start) * 1e-9


class Waits:
    """In every step the computing stream stands for 0.5 ms; the host asks for that right after its call on another."""

    def __init__(self) -> None:
        self.stands = []
        for step in range(1, 100):
            since = step * DEVICE_NS + 1_200_000  # of a backward from 1 to 3 ms
            self.stands.append(Stand(step * HOST_NS + 600_001, cast("Any", since), cast("Any", since + 500_000)))
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def beside(self, at_ns: int) -> bool:
        return at_ns % HOST_NS == 600_000


def watch_of(steps: int, waits: Waits | None = None) -> tuple[StreamRanksWatch, list[str]]:
    """Steps of 1 ms on the host and 4 ms on the device, with a collective in the middle of backward on the host."""
    ring, told = Ring(1000), []
    stream = cast("EventStream", Stream())
    watch = StreamRanksWatch(ring.arrivals(), 1, stream=stream, waits=cast("StreamWaits | None", waits))
    watch.part = Guard("who waits for whom", told.append)
    ring.call(5)
    watch.begin("measure")
    watch.keep("measure", 1, StepMarks([DATA, OTHER], [0, 9], [0, 9]))
    watch.end("measure")
    watch.begin("collectives")
    for step in range(1, steps + 1):
        host, device = step * HOST_NS, step * DEVICE_NS
        ring.call(host + 600_000)
        ring.entries[-1]["duration_ms"] = 0.25 * step
        marks = StepMarks(
            [DATA, BACKWARD, OTHER],
            [host, host + 400_000, host + 800_000],
            [device, device + 1_000_000, device + 3_000_000],
        )
        watch.look(step)
        watch.keep("collectives", step, marks)
    watch.end("collectives")
    return watch, told


def test_marks_and_calls_stand_where_the_stream_comes_to_them() -> None:
    watch, told = watch_of(2)
    (timeline,) = watch.facts["timelines"]
    assert told == []
    assert timeline.steps.tolist() == [1, 2]
    # The second step cannot begin on the stream before the first has ended there, at 4 ms.
    assert timeline.host_ns.tolist() == [1_000_000, 2_000_000, 4_000_000, 4_000_000, 5_000_000, 7_000_000]
    # Half of backward's own work, which is 2 ms less the collective, lies before it.
    assert timeline.arrivals_ns.tolist()[-2:] == [2_875_000, 5_750_000]
    assert timeline.waited_ns is not None
    assert timeline.waited_ns.tolist()[-2:] == [250_000, 500_000]


def test_of_calls_on_another_stream_the_computing_ones_waits_hold_the_rank() -> None:
    waits = Waits()
    watch, told = watch_of(STEPS + 1, waits)
    (timeline,) = watch.facts["timelines"]
    assert told == []
    assert not waits.running
    held = [(c.group, c.number, c.name) for c in timeline.collectives if c.name != "gloo:all_reduce"]
    assert held == [(f"streams, step {step}", 0, "wait_event") for step in range(1, STEPS + 1)]
    # What was called in the steps is left out; the one before them is not.
    assert len(timeline.collectives) == STEPS + 1
    assert timeline.waited_ns is not None
    assert timeline.waited_ns.tolist()[1:] == [500_000] * STEPS
    begins = timeline.host_ns[timeline.first[:-1]]
    assert (timeline.arrivals_ns[1:] - begins).tolist() == [1_200_000] * STEPS


def test_ranks_that_talk_past_nccl_on_gpus_are_told_so() -> None:
    told: list[str] = []
    watch = StreamRanksWatch(Ring(1000).arrivals(), 0, stream=cast("EventStream", Stream()), backend=lambda: "gloo")
    watch.part = Guard("who waits for whom", told.append)
    watch.keep("collectives", 1, StepMarks([DATA, OTHER], [0, 9], [0, 9]))
    watch.end("collectives")
    (said,) = told
    assert "NCCL" in said
    assert "gloo" in said


def test_steps_in_which_the_reducer_is_read_do_not_count() -> None:
    (timeline,) = watch_of(2 * STEPS)[0].facts["timelines"]
    assert timeline.steps.tolist() == list(range(1, STEPS + 1))

"""Marks and arrivals of a rank, from simulated steps that make a known number of collective calls."""

import pickle
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from flight_ring import Ring
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.callbacks.instruments import ranks
from lm_profiler.callbacks.instruments.ranks import STEPS, RanksWatch, StreamRanksWatch
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import BACKWARD, DATA, OTHER, StepMarks
from lm_profiler.measure.collective_calls import StreamWait, StreamWaits
from lm_profiler.torch_names import DDP_FACTS

STEP_NS = 1_000_000
WARMUP = 3


class Rank:
    """A rank whose watch reads the ring of collective calls as the session does."""

    def __init__(self, ring_size: int) -> None:
        self.ring = Ring(ring_size)
        self.notes: list[str] = []
        self.arrivals = arrivals = self.ring.arrivals()
        self.watch = RanksWatch(arrivals, 5)
        self.watch.guard = Guard("who waits for whom", self.notes.append)
        self.read = 0
        read_ring = arrivals.read_ring

        def counted() -> int:
            self.read += 1
            return read_ring()

        arrivals.read_ring = counted

    def train(self, calls: Sequence[int]) -> None:
        """Make ``calls[k]`` collective calls in the k-th step, of which the first three are the warm-up."""
        for before in range(30):
            self.ring.call(before)
        self.watch.begin("warmup")
        for step, count in enumerate(calls, 1):
            began = step * STEP_NS
            for call in range(count):
                self.ring.call(began + 100 + call)
            self.ring.now = began + STEP_NS - 1
            self.watch.read_if_due(step)
            if step > WARMUP:
                marks = [began, began + 50, began + STEP_NS - 10]
                self.watch.keep("measure", step, StepMarks([DATA, BACKWARD, OTHER], marks, []))
        self.watch.begin("measure")
        self.watch.end("measure")


@pytest.mark.parametrize("count, ring_size", [(1, 2000), (19, 40), (40, 60)])
def test_every_call_of_the_measured_steps_is_kept(count: int, ring_size: int) -> None:
    rank, steps = Rank(ring_size), 60
    rank.train([count] * (WARMUP + steps))
    (timeline,) = rank.watch.facts["timelines"]
    measured = range(WARMUP + 1, WARMUP + steps + 1)
    called = [step * STEP_NS + 100 + call for step in measured for call in range(count)]
    assert timeline.arrivals_ns.tolist()[1:] == called  # the first is the last of the warm-up
    assert timeline.arrivals_ns[0] == WARMUP * STEP_NS + 100 + count - 1
    numbers = [collective.number for collective in timeline.collectives]
    assert numbers == list(range(numbers[0], numbers[0] + len(called) + 1))
    assert rank.notes == []
    assert rank.read <= 4 + count * (steps + WARMUP) / max(ring_size / 2 - count, count)


def test_the_marks_of_each_step_are_found_by_its_number() -> None:
    rank = Rank(ring_size=100)
    rank.train([2] * 8)
    (timeline,) = rank.watch.facts["timelines"]
    assert timeline.rank == 5
    assert timeline.steps.tolist() == [4, 5, 6, 7, 8]
    assert timeline.first.tolist() == [0, 3, 6, 9, 12, 15]
    assert timeline.codes.dtype == np.uint8
    assert timeline.codes.tolist() == [DATA, BACKWARD, OTHER] * 5
    for place, step in enumerate(timeline.steps):
        at = timeline.host_ns[timeline.first[place] : timeline.first[place + 1]]
        assert at.tolist() == [step * STEP_NS, step * STEP_NS + 50, step * STEP_NS + STEP_NS - 10]


def test_only_the_calls_of_the_last_steps_are_sent_if_there_are_many() -> None:
    calls_per_step = ranks.MOST_CALLS * 3 // 10  # so that three steps fit, and a fourth does not
    rank = Rank(ring_size=4 * calls_per_step)
    rank.train([calls_per_step] * 20)
    (timeline,) = rank.watch.facts["timelines"]
    assert timeline.steps.tolist() == [18, 19, 20]
    assert timeline.first.tolist() == [0, 3, 6, 9]
    assert timeline.host_ns[0] == 18 * STEP_NS
    assert len(timeline.arrivals_ns) == len(timeline.collectives) == 1 + 3 * calls_per_step
    assert timeline.collectives[-1].number == rank.ring.made
    bytes_per_call = len(pickle.dumps(timeline)) / (3 * calls_per_step)
    assert bytes_per_call < 30


@pytest.mark.parametrize(
    "number, calls_per_step, words",
    [
        (0, [0] * 6, ["recorder"]),  # no step has a collective, which rank 0 alone notes
        (5, [5, 5, 5, 5, 100, 5], ["40 calls", "TORCH_FR_BUFFER_SIZE"]),  # a step has more than the ring holds
    ],
)
def test_if_calls_are_missing_the_waiting_is_unknown(number: int, calls_per_step: list[int], words: list[str]) -> None:
    rank = Rank(ring_size=40)
    rank.watch.rank = number
    rank.train(calls_per_step)
    (note,) = rank.notes
    assert all(word in note for word in words)
    assert rank.watch.facts == {}


@pytest.mark.parametrize(
    "capacity, words",
    [(None, "flight recorder"), (0, "TORCH_FR_BUFFER_SIZE=2000"), (40, "TORCH_FR_BUFFER_SIZE=2000")],
    ids=["no recorder", "switched off", "on, and without an entry"],
)
def test_a_note_names_what_the_recorder_lacks(capacity: int | None, words: str) -> None:
    rank = Rank(ring_size=40)
    rank.watch.rank = 0
    if capacity is None:
        rank.watch = RanksWatch(None, 0)
        rank.watch.guard = Guard("", rank.notes.append)
    else:
        rank.arrivals.capacity = capacity
        rank.arrivals.dump = list
    rank.train([5] * 6)
    (note,) = rank.notes
    assert words in note
    assert rank.watch.facts == {}


class Wrapped(DistributedDataParallel):
    """Reports so many ``buckets``, and is in no group."""

    def __init__(self, buckets: int) -> None:
        torch.nn.Module.__init__(self)
        self.find_unused_parameters = True  # which costs one more collective
        setattr(self, DDP_FACTS.name, lambda: {"bucket_sizes": ", ".join(["4"] * buckets)})


@pytest.mark.parametrize("buckets, is_known, notes", [(9, True, 0), (8, False, 1)])
def test_collectives_beside_those_of_ddp_make_the_waiting_unknown(buckets: int, is_known: bool, notes: int) -> None:
    """Each step has ten, all amid backward. DDP makes one for each bucket, and one for unused parameters."""
    rank = Rank(ring_size=400)
    rank.watch.rank = 0
    rank.watch.wrapped_module = lambda: Wrapped(buckets)
    rank.train([10] * 8)
    assert bool(rank.watch.facts) is is_known
    assert len(rank.notes) == notes


HOST_NS, DEVICE_NS = 1_000_000, 4_000_000


class Stream:
    """Its events are their instants, in nanoseconds."""

    def seconds(self, start: int, end: int) -> float:
        return (end - start) * 1e-9


class Waits:
    """In every step the computing stream stands for 0.5 ms; the host asks for that right after its call on another."""

    def __init__(self) -> None:
        self.waits = []
        for step in range(1, 100):
            since = step * DEVICE_NS + 1_200_000  # of a backward from 1 to 3 ms
            self.waits.append(StreamWait(step * HOST_NS + 600_001, cast("Any", since), cast("Any", since + 500_000)))
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def is_on_other_stream(self, at_ns: int) -> bool:
        return at_ns % HOST_NS == 600_000


def watch_of(steps: int, waits: Waits | None = None) -> tuple[StreamRanksWatch, list[str]]:
    """Watch steps of 1 ms on the host and 4 ms on the device; return the watch and its notes.

    A collective is called in the middle of backward on the host. In the k-th step it takes k quarters of 1 ms.
    """
    ring, notes = Ring(1000), []
    stream = cast("EventStream", Stream())
    watch = StreamRanksWatch(ring.arrivals(), 1, stream=stream, waits=cast("StreamWaits | None", waits))
    watch.guard = Guard("who waits for whom", notes.append)
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
        watch.read_if_due(step)
        watch.keep("collectives", step, marks)
    watch.end("collectives")
    return watch, notes


def test_marks_and_calls_have_times_of_the_stream() -> None:
    watch, notes = watch_of(2)
    (timeline,) = watch.facts["timelines"]
    assert notes == []
    assert timeline.steps.tolist() == [1, 2]
    # The second step cannot begin on the stream before the first has ended there.
    first_ms, second_ms = [0, 1, 3], [3, 4, 6]
    assert (timeline.host_ns / 1e6).tolist() == first_ms + second_ms
    # Half of backward's own work, which is 2 ms less the collective, lies before it.
    assert (timeline.arrivals_ns[-2:] / 1e6).tolist() == [1 + (2 - 0.25) / 2, 4 + (2 - 0.5) / 2]
    assert (timeline.waited_ns[-2:] / 1e6).tolist() == [0.25, 0.5]


def test_waits_of_the_computing_stream_hold_the_rank() -> None:
    waits = Waits()
    watch, notes = watch_of(STEPS, waits)
    (timeline,) = watch.facts["timelines"]
    assert notes == []
    assert not waits.running
    held = [(c.group, c.number, c.name) for c in timeline.collectives if c.name != "gloo:all_reduce"]
    assert held == [(f"streams, step {step}", 0, "wait_event") for step in range(1, STEPS + 1)]
    # What was called in the steps is left out; the one before them is not.
    assert len(timeline.collectives) == STEPS + 1
    assert timeline.waited_ns.tolist()[1:] == [500_000] * STEPS
    begins = timeline.host_ns[timeline.first[:-1]]
    assert (timeline.arrivals_ns[1:] - begins).tolist() == [1_200_000] * STEPS

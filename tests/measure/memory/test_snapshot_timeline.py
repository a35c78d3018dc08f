"""A history of the allocator, made by hand in torch's format, as a memory timeline."""

from typing import Any

import pytest

from lm_profiler.measure.clocks.tape import BACKWARD, DATA, END, FORWARD, OPTIMIZER, OTHER
from lm_profiler.measure.counts import flops
from lm_profiler.measure.memory.storage_notes import MarkLog, SeenTensor, timeline_from_snapshot
from lm_profiler.record.memory_timeline import Allocation, MemoryTimeline

WEIGHT, GRADIENT, STATE, HIDDEN, SCRATCH, OLD = (n << 20 for n in range(1, 7))
"""Addresses."""
FRAMES = [
    {"filename": "/site-packages/torch/nn/functional.py", "line": 7, "name": "linear"},
    {"filename": "/home/me/model.py", "line": 42, "name": "forward"},
]


def entry(action: str, address: int, size: int, at_us: int, frames: list[Any] | None = None) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": at_us, "frames": frames or [], "stream": 0}


def seen_tensor(address: int, cause: str, name: str | None, *shape: int) -> SeenTensor:
    return SeenTensor(address, cause, name, shape, "float32")


@pytest.fixture
def mark_log() -> MarkLog:
    """Marks 100 µs apart: data, forward, other, backward, other, optimizer, and the end."""
    clock = iter(range(100, 1000, 100))
    log = MarkLog(lambda: next(clock))
    at_rest = [
        seen_tensor(WEIGHT, "parameters", "weight", 256),
        seen_tensor(STATE, "optimizer_states", "exp_avg of weight", 256),
    ]
    marks: list[tuple[int, list[SeenTensor], list[SeenTensor] | None]] = [
        (DATA, at_rest, None),
        (FORWARD, [], None),
        (OTHER, [], [seen_tensor(HIDDEN, "activations", None, 10, 25), seen_tensor(WEIGHT, "activations", None, 256)]),
        (BACKWARD, [], None),
        (OTHER, [seen_tensor(GRADIENT, "gradients", "gradient of weight", 256)], None),
        (OPTIMIZER, [], None),
        (END, [], None),
    ]
    for mark in marks:
        log(*mark)
    return log


def made_snapshot(frames_of_hidden: list[Any] = FRAMES, frames_of_scratch: list[Any] | None = None) -> dict[str, Any]:
    """In the step, 1000 bytes of activations and 4000 of scratch are allocated in forward, a gradient in backward."""
    history = [
        entry("alloc", OLD, 100, 50),
        entry("free_requested", OLD, 100, 60),
        entry("free_completed", OLD, 100, 61),  # before the step
        entry("segment_alloc", HIDDEN, 2 << 20, 240),
        entry("alloc", HIDDEN, 1000, 250, frames_of_hidden),
        entry("alloc", SCRATCH, 4000, 260, frames_of_scratch),
        entry("free_requested", SCRATCH, 4000, 270),
        entry("free_completed", SCRATCH, 4000, 280),
        entry("alloc", GRADIENT, 1024, 410),
        entry("free_completed", HIDDEN, 1000, 420),
        entry("alloc", OLD, 999, 900),  # after it
    ]
    blocks = [
        {"address": address, "size": 1024, "requested_size": 1000, "state": state}
        for address, state in ((WEIGHT, "active_allocated"), (STATE, "active_pending_free"), (HIDDEN, "inactive"))
    ]
    blocks += [{"address": GRADIENT, "size": 1024, "requested_size": 1024, "state": "active_allocated"}]
    blocks += [{"address": OLD, "size": 1024, "requested_size": 999, "state": "active_allocated"}]
    return {"device_traces": [history], "segments": [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [{}]}]}


def largest_of(timeline: MemoryTimeline, cause: str) -> Allocation:
    return next(allocation for allocation in timeline.largest if allocation.cause == cause)


def test_a_history_has_causes(mark_log: MarkLog) -> None:
    """In whole blocks of 512 bytes: a weight and its state of 1024 each, 1024 of activations, 4096 of scratch."""
    timeline = timeline_from_snapshot(made_snapshot(), 0, mark_log)
    at_rest = dict.fromkeys(timeline.causes, 0) | {"parameters": 1024, "optimizer_states": 1024}
    assert timeline.bytes_after(0) == at_rest
    with_hidden, with_scratch, with_gradient = 2048 + 1024, 2048 + 1024 + 4096, 2048 + 1024 + 1024
    assert timeline.totals == [2048, with_hidden, with_scratch, with_hidden, with_gradient, 2048 + 1024]
    assert timeline.peak == with_scratch
    assert timeline.bytes_after(timeline.peak_at)["rest"] == 4096
    assert timeline.bytes_after(5) == at_rest | {"gradients": 1024}
    assert timeline.phase_spans() == [("forward", 0, 3), ("backward", 3, 5)]
    assert [allocation.bytes for allocation in timeline.saved] == [1024]  # the weight is saved too, and is a parameter
    moments = timeline.moments()
    assert moments["before_optimizer"] == moments["after_optimizer"]
    assert moments["before_optimizer"].gradients == 1024


def test_an_allocation_has_shape_and_line(mark_log: MarkLog) -> None:
    timeline = timeline_from_snapshot(made_snapshot(), 0, mark_log)
    hidden = largest_of(timeline, "activations")
    assert (hidden.shape, hidden.dtype) == ([10, 25], "float32")
    assert (hidden.line, hidden.name) == ("model.py:42", "linear")
    scratch = largest_of(timeline, "rest")
    assert (scratch.bytes, scratch.shape, scratch.line) == (4096, None, None)


def test_our_own_frames_are_not_the_origin_of_a_tensor(mark_log: MarkLog) -> None:
    counting = [("/site-packages/torch/_ops.py", "__call__"), (flops.__file__, "__torch_dispatch__")] * 2
    our_frames = [{"filename": file, "line": 1, "name": name} for file, name in counting]
    # Of backward's thread there are no other frames.
    snapshot = made_snapshot(frames_of_hidden=our_frames + FRAMES, frames_of_scratch=our_frames)
    timeline = timeline_from_snapshot(snapshot, 0, mark_log)
    hidden = largest_of(timeline, "activations")
    assert (hidden.line, hidden.name) == ("model.py:42", "linear")
    assert largest_of(timeline, "rest").name is None


def test_a_history_without_a_marked_step_is_refused(mark_log: MarkLog) -> None:
    without_history = made_snapshot() | {"device_traces": [[]]}
    for snapshot, marks in ((made_snapshot(), MarkLog()), (without_history, mark_log)):
        with pytest.raises(ValueError, match="no history of a marked step"):
            timeline_from_snapshot(snapshot, 0, marks)

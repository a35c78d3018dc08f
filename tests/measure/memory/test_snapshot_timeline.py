"""A history of the allocator, made by hand in torch's format, as a memory timeline."""

from typing import Any

import pytest

from lm_profiler.measure.clocks.tape import BACKWARD, DATA, END, FORWARD, OPTIMIZER, OTHER
from lm_profiler.measure.counts import flops
from lm_profiler.measure.memory.storage_notes import MarkLog, SeenTensor, timeline_from_snapshot

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


def made_snapshot() -> dict[str, Any]:
    history = [
        entry("alloc", OLD, 100, 50),
        entry("free_requested", OLD, 100, 60),
        entry("free_completed", OLD, 100, 61),  # before the step
        entry("segment_alloc", HIDDEN, 2 << 20, 240),
        entry("alloc", HIDDEN, 1000, 250, FRAMES),
        entry("alloc", SCRATCH, 4000, 260),
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


def test_a_history_has_causes_and_lines(mark_log: MarkLog) -> None:
    timeline = timeline_from_snapshot(made_snapshot(), 0, mark_log)
    held = dict.fromkeys(timeline.causes, 0)
    assert timeline.bytes_after(0) == held | {"parameters": 1024, "optimizer_states": 1024}
    assert timeline.totals == [2048, 3072, 7168, 3072, 4096, 3072]  # whole blocks of 512 bytes
    assert timeline.peak == 7168
    assert timeline.bytes_after(timeline.peak_at)["rest"] == 4096
    assert timeline.bytes_after(5) == held | {"parameters": 1024, "optimizer_states": 1024, "gradients": 1024}
    assert timeline.shaded() == [("forward", 0, 3), ("backward", 3, 5)]
    scratch, *others = timeline.largest
    hidden = next(allocation for allocation in others if allocation.cause == "activations")
    assert (scratch.bytes, scratch.shape, scratch.line) == (4096, None, None)
    assert (hidden.shape, hidden.dtype, hidden.line, hidden.name) == ([10, 25], "float32", "model.py:42", "linear")
    assert [allocation.bytes for allocation in timeline.saved] == [1024]  # the weight is saved too, and is a parameter
    moments = timeline.moments()
    assert moments["before_optimizer"] == moments["after_optimizer"]
    assert moments["before_optimizer"].gradients == 1024


def test_our_own_frames_are_not_the_origin_of_a_tensor(mark_log: MarkLog) -> None:
    counting = [("/site-packages/torch/_ops.py", "__call__"), (flops.__file__, "__torch_dispatch__")] * 2
    ours = [{"filename": file, "line": 1, "name": name} for file, name in counting]
    snapshot = made_snapshot()
    history = snapshot["device_traces"][0]
    history[4]["frames"], history[5]["frames"] = ours + FRAMES, ours  # of backward's thread there is no more
    scratch, *others = timeline_from_snapshot(snapshot, 0, mark_log).largest
    hidden = next(allocation for allocation in others if allocation.cause == "activations")
    assert (hidden.line, hidden.name, scratch.name) == ("model.py:42", "linear", None)
    snapshot = made_snapshot()
    with pytest.raises(ValueError, match="no history of a marked step"):
        timeline_from_snapshot(snapshot, 0, MarkLog())
    with pytest.raises(ValueError, match="no history of a marked step"):
        timeline_from_snapshot(snapshot | {"device_traces": [[]]}, 0, mark_log)

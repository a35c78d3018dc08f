"""The memory timeline of a step from the history of CUDA's allocator, and from what was seen at its marks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_profiler.measure.clocks.steps import END
from lm_profiler.measure.memory.storage_notes import SeenTensor, Site, StorageNotes
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.text import short_path

# bytes to which the allocator rounds up (``kMinBlockSize``); the history has the sizes that were asked for
_BLOCK = 512

# parts of the files' names whose lines do not tell for what memory was asked
_NOBODYS = ("/torch/", "/lightning", "/lm_profiler/callbacks/", "/lm_profiler/measure/", "??", "<")


def _now_us() -> int:
    return time.time_ns() // 1000


@dataclass(eq=False)
class MarksHeard:
    """Keeps what ``TensorsSeen`` tells in a step, with the instant of each mark; storages are told by their address."""

    clock_us: Callable[[], int] = _now_us  # the clock of the allocator's history, in microseconds since 1970
    # the marks of the last step that ended
    step: list[tuple[int, int, list[SeenTensor], list[SeenTensor] | None]] = field(default_factory=list)
    _now: list[Any] = field(default_factory=list)

    def __call__(self, code: int, known: list[SeenTensor], saved: list[SeenTensor] | None) -> None:
        self._now.append((self.clock_us(), code, known, saved))
        if code == END:
            self.step, self._now = self._now, []


def timeline_of(snapshot: Mapping[str, Any], device: int, heard: MarksHeard) -> MemoryTimeline:
    """Return the timeline of the last step of ``heard`` from torch's ``_snapshot``.

    Memory counts as in use until its last kernel has run (``free_completed``). Sizes are rounded up to the allocator's
    blocks; what is left of a block that is not split is not in them.

    Raises:
        KeyError: the snapshot is of another format.
        ValueError: no step was heard, or the history does not reach back to its beginning.
    """
    history = [each for each in snapshot["device_traces"][device] if each["action"] in ("alloc", "free_completed")]
    if not heard.step or not history:
        raise ValueError("expected a step and its history, given none")
    alive = _alive_before(snapshot["segments"], device, history)
    begins_us, ends_us = heard.step[0][0], heard.step[-1][0]
    within = []
    for entry in history:
        if entry["time_us"] < begins_us:
            if entry["action"] == "alloc":
                alive[entry["addr"]] = _size(entry)
            else:
                alive.pop(entry["addr"], None)
        elif entry["time_us"] <= ends_us:
            within.append(entry)
    notes, marks = StorageNotes(alive), iter(heard.step)
    due = next(marks, None)
    for entry in within:
        while due is not None and due[0] <= entry["time_us"]:
            notes.told(*due[1:])
            due = next(marks, None)
        if entry["action"] == "alloc":
            notes.made(entry["addr"], _size(entry), _site(entry["frames"]))
        else:
            notes.freed(entry["addr"])
    for rest in () if due is None else (due, *marks):
        notes.told(*rest[1:])
    return notes.timeline("measured")


def _alive_before(segments: Iterable[Any], device: int, history: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return the bytes by address of what was alive before the first entry: what is alive now, with all undone."""
    blocks = [block for segment in segments if segment["device"] == device for block in segment["blocks"]]
    # A block that waits for a stream was requested to be freed, and is still in use.
    alive = {of["address"]: _up(of.get("requested_size", of["size"])) for of in blocks if of["state"] != "inactive"}
    for entry in reversed([*history]):
        if entry["action"] == "alloc":
            alive.pop(entry["addr"], None)
        else:
            alive[entry["addr"]] = _size(entry)
    return alive


def _size(entry: Mapping[str, Any]) -> int:
    return _up(entry["size"])


def _up(size: int) -> int:
    return size + -size % _BLOCK


def _site(frames: Iterable[Mapping[str, Any]]) -> Site:
    """Return the innermost function as the operator, and the innermost line of the user's code."""
    known = [frame for frame in frames if frame["filename"] != "??"]
    line = next((of for of in known if not any(part in of["filename"] for part in _NOBODYS)), None)
    return Site(
        operator=known[0]["name"] if known else None,
        line=None if line is None else f"{short_path(line['filename'])}:{line['line']}",
    )

"""Marks on two clocks, cut into steps.

A mark says which part of the step begins at its instant, so the parts of a step add up to the step by construction,
on each clock. Parts nest (a backward inside a manual training_step): the time belongs to the innermost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lm_profiler.record.quantities import PARTS

DATA, TRANSFER, FORWARD, ZERO_GRAD, BACKWARD, CLIP, OPTIMIZER, OTHER = range(len(PARTS))
OUTSIDE = len(PARTS)
"""Code of what lies between two marks of a step and yet is not part of it (validation amid accumulation)."""


class Stream(Protocol):
    """A device's clock: instants in the order of its stream, known only once the stream has got there."""

    def record(self) -> Any:
        """An instant at the end of what has been enqueued so far; costs a microsecond and waits for nothing."""

    def reached(self, instant: Any) -> bool:
        """Whether the stream has got there."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two instants that were reached."""

    def release(self, instants: Sequence[Any]) -> None:
        """Hand instants back for reuse."""


class StepMarks:
    """The marks of one finished step: ``codes[k]`` is the part that begins at ``host_ns[k]``; the last one ends it."""

    __slots__ = ("codes", "host_ns", "instants")

    def __init__(self, codes: list[int], host_ns: list[int], instants: list[Any]) -> None:
        self.codes = codes
        self.host_ns = host_ns
        self.instants = instants

    def host_seconds(self) -> tuple[float, ...]:
        """Seconds of each of ``TIMED`` on the host's clock."""
        ns = self.host_ns
        return _per_part(self.codes, [(b - a) * 1e-9 for a, b in zip(ns, ns[1:], strict=False)])

    def stream_seconds(self, stream: Stream) -> tuple[float, ...]:
        """Seconds of each of ``TIMED`` on the device's stream; every instant must have been reached."""
        at = self.instants
        return _per_part(self.codes, [stream.seconds(a, b) for a, b in zip(at, at[1:], strict=False)])


def _per_part(codes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    parts = [0.0] * (len(PARTS) + 1)
    for code, duration in zip(codes, seconds, strict=False):
        parts[code] += duration
    parts[OUTSIDE] = sum(parts[:OUTSIDE])  # the slot of what lies outside becomes the step
    return tuple(parts)


class Timeline:
    """Takes the marks. Its methods are the hot path: a mark is two appends and two clock reads.

    Args:
        clock: the host's clock, in nanoseconds.
        stream: the device's clock, or None where the host's is the only one.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, stream: Stream | None = None) -> None:
        self._clock = clock
        self._record = stream.record if stream is not None else None
        self._stack = [OTHER]
        self._codes: list[int] = []
        self._host_ns: list[int] = []
        self._instants: list[Any] = []
        self.running = False
        self.failed_in: int | None = None
        self.observers: tuple[Callable[[int], None], ...] = ()
        """Called at each mark, after its instant was taken, with the code of the part that begins."""

    @property
    def current(self) -> int:
        """Code of the innermost part that is open."""
        return self._stack[-1]

    def _mark(self, code: int) -> None:
        self._codes.append(code)
        self._host_ns.append(self._clock())
        if self._record is not None:
            self._instants.append(self._record())
        for observer in self.observers:
            observer(code)

    def begin_step(self) -> None:
        """Start a step at this instant."""
        self.running = True
        self.failed_in = None
        self._mark(self._stack[-1])

    def end_step(self) -> StepMarks:
        """End the step at this instant and hand its marks out."""
        self._mark(OTHER)
        self.running = False
        marks = StepMarks(self._codes, self._host_ns, self._instants)
        self._codes, self._host_ns, self._instants = [], [], []
        return marks

    def enter(self, code: int) -> None:
        """``code`` begins inside what is open. Inside ``OUTSIDE`` everything is."""
        stack = self._stack
        if stack[-1] == OUTSIDE:
            code = OUTSIDE
        stack.append(code)
        if self.running:
            self._mark(code)

    def leave(self) -> None:
        """The innermost part ends; the one around it goes on."""
        stack = self._stack
        if len(stack) > 1:
            stack.pop()
        if self.running:
            self._mark(stack[-1])

    def return_inside(self) -> None:
        """Drop ``OUTSIDE`` and all that was left open in it: the loop is back at the step."""
        if OUTSIDE in self._stack:
            del self._stack[self._stack.index(OUTSIDE) :]

    def fail(self) -> None:
        """Remember the innermost open part as the one in which the run died, unless one is remembered already."""
        if self.failed_in is None:
            self.failed_in = self._stack[-1]

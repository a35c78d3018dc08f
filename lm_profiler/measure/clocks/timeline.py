"""Marks on two clocks, cut into steps.

A mark says which part of the step begins at its instant, so the parts of a step add up to the step by construction,
on each clock. Parts nest (a backward inside a manual training_step): the time belongs to the innermost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.record.quantities import PARTS

DATA, TRANSFER, FORWARD, ZERO_GRAD, BACKWARD, CLIP, OPTIMIZER, OTHER = range(len(PARTS))
OUTSIDE = len(PARTS)
"""Code of what lies between two marks of a step and yet is not part of it (validation amid accumulation)."""


@dataclass(slots=True)
class StepMarks:
    """The marks of one finished step: ``codes[k]`` is the part that begins at ``host_ns[k]``; the last one ends it.

    ``asked`` counts the phases at whose beginning the device was asked whether it had finished what came before, and
    ``idle`` those at which it had: there it waits for the host.
    """

    codes: list[int]
    host_ns: list[int]
    instants: list[Any]
    asked: int = 0
    idle: int = 0

    def host_seconds(self) -> tuple[float, ...]:
        """Seconds of each of ``TIMED`` on the host's clock."""
        return _per_part(self.codes, [(b - a) * 1e-9 for a, b in pairwise(self.host_ns)])

    def stream_seconds(self, stream: EventStream) -> tuple[float, ...] | None:
        """Seconds of each of ``TIMED`` on the device's stream, whose every instant must have been reached.

        None where one of them cannot be read.
        """
        seconds = [stream.seconds(a, b) for a, b in pairwise(self.instants)]
        known = [value for value in seconds if value is not None]
        return _per_part(self.codes, known) if len(known) == len(self.codes) - 1 else None


def _per_part(codes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    parts = [0.0] * (len(PARTS) + 1)
    for code, duration in zip(codes, seconds, strict=False):
        parts[code] += duration
    parts[OUTSIDE] = sum(parts[:OUTSIDE])  # the slot of what lies outside becomes the step
    return tuple(parts)


@dataclass(eq=False)
class Timeline:
    """Takes the marks. It and ``Span`` are the hot path, flat on purpose: between a model's own work every further
    Python frame costs a microsecond and more, several times what it costs in a tight loop.

    Args:
        clock: the host's clock, in nanoseconds.
        stream: the device's clock, or None where the host's is the only one.
        part: answers for what fails while training is in here.
    """

    clock: Callable[[], int] = time.perf_counter_ns
    stream: EventStream | None = None
    part: Guard = UNGUARDED

    def __post_init__(self) -> None:
        self.stack = [OTHER]
        self.codes: list[int] = []
        self.host_ns: list[int] = []
        self.running = False
        """Whether a step is open."""
        self.live = False
        """Whether a step is open and the loop is inside of it, so that marks are taken."""
        self.failed_in: int | None = None
        self._instants: list[Any] = []
        self._asked = self._idle = 0
        self.observers = ()

    @property
    def observers(self) -> tuple[Callable[[int], None], ...]:
        """Called at each mark, after its instant was taken, with the code of the part that begins."""
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[Callable[[int], None], ...]) -> None:
        self._observers = observers
        self.after = self._after if observers or self.stream is not None else None

    def unobserve(self, *observers: Callable[[int], None]) -> None:
        """Call these no more; it may be done twice."""
        self.observers = tuple(each for each in self.observers if each not in observers)

    @property
    def current(self) -> int:
        """Code of the innermost part that is open."""
        return self.stack[-1]

    def mark(self, code: int) -> None:
        """``code`` begins at this instant."""
        self.codes.append(code)
        self.host_ns.append(self.clock())
        if self.after is not None:
            self.after(code)

    def _after(self, code: int) -> None:
        if self.stream is not None:
            if code < OTHER and self._instants and self.codes[-2] == OTHER:
                self._asked += 1
                self._idle += self.stream.reached(self._instants[-1])
            self._instants.append(self.stream.record())
        for observer in self._observers:
            observer(code)

    def begin_step(self) -> None:
        """Start a step at this instant, in the part that is open."""
        self.running = self.live = True
        self.failed_in = None
        self.codes.append(self.stack[-1])
        self.host_ns.append(self.clock())
        if self.after is not None:
            self.after(self.stack[-1])

    def end_step(self) -> StepMarks:
        """End the step at this instant and hand its marks out."""
        self.codes.append(OTHER)
        self.host_ns.append(self.clock())
        if self.after is not None:
            self.after(OTHER)
        self.running = self.live = False
        marks = StepMarks(self.codes, self.host_ns, self._instants, self._asked, self._idle)
        self.codes, self.host_ns, self._instants = [], [], []
        self._asked = self._idle = 0
        return marks

    def enter(self, code: int) -> None:
        """``code`` begins inside what is open."""
        self.stack.append(code)
        if self.live:
            self.mark(code)

    def leave(self) -> None:
        """The innermost part ends; the one around it goes on."""
        stack = self.stack
        if len(stack) > 1:
            stack.pop()
        if self.live:
            self.codes.append(stack[-1])
            self.host_ns.append(self.clock())
            if self.after is not None:
                self.after(stack[-1])

    def close(self, code: int) -> None:
        """``code`` ends, if it is what is open, however often it was entered."""
        stack = self.stack
        if stack[-1] != code:
            return
        while stack[-1] == code:
            stack.pop()
        if self.live:
            self.codes.append(stack[-1])
            self.host_ns.append(self.clock())
            if self.after is not None:
                self.after(stack[-1])

    def go_outside(self) -> None:
        """What follows, until ``come_inside``, is in no part of the step, and is not marked."""
        if OUTSIDE not in self.stack:
            self.enter(OUTSIDE)
            self.live = False

    def come_inside(self) -> None:
        """The loop is back at the step; whatever was left open outside is dropped. The next mark ends the gap."""
        if OUTSIDE in self.stack:
            del self.stack[self.stack.index(OUTSIDE) :]
            self.live = self.running

    def stop(self) -> None:
        """Take no more marks."""
        self.running = self.live = False
        self.after = None

    def fail(self) -> None:
        """Remember the innermost open part as the one in which the run died, unless one is remembered already."""
        if self.failed_in is None:
            self.failed_in = self.stack[-1]


@dataclass(eq=False, slots=True)
class Span:
    """A part as a context manager; reusable and reentrant, so that a step allocates none.

    It does what ``Timeline.enter`` and ``leave`` do, in one frame.
    """

    _timeline: Timeline
    _code: int

    def __enter__(self) -> None:
        timeline, code = self._timeline, self._code
        try:
            timeline.stack.append(code)
            if timeline.live:
                timeline.codes.append(code)
                timeline.host_ns.append(timeline.clock())
                if timeline.after is not None:
                    timeline.after(code)
        except BaseException as error:
            timeline.part.failed(error)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        timeline = self._timeline
        try:
            if kind is not None:
                timeline.fail()
            stack = timeline.stack
            if len(stack) > 1:
                stack.pop()
            if timeline.live:
                timeline.codes.append(stack[-1])
                timeline.host_ns.append(timeline.clock())
                if timeline.after is not None:
                    timeline.after(stack[-1])
        except BaseException as error:
            timeline.part.failed(error)

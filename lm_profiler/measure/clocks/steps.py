"""From a tape of marks to steps: which part each instant belongs to, and for how long.

Parts nest (a backward inside a manual training_step): the time belongs to the innermost. None of this runs in a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.record.quantities import PARTS

DATA, TRANSFER, FORWARD, ZERO_GRAD, BACKWARD, CLIP, OPTIMIZER, OTHER = range(len(PARTS))
OUTSIDE = len(PARTS)
"""Code of what lies between two marks of a step and yet is not part of it (validation amid accumulation), until the
next mark."""

LEAVE, CLIPPED, OPTIMIZED, FAIL, END = range(OUTSIDE + 1, OUTSIDE + 6)
"""What a mark may say beside the part that begins: the innermost part ends; clipping does, and the optimizer's
arithmetic begins; that ends, however often it began; an error passed; the step ends."""


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


@dataclass(slots=True)
class TapeReading:
    """What the tape says, as far as it was read.

    ``stack`` are the parts that are open, ``failed_in`` the innermost when an error first passed, ``finished`` the
    steps that nobody took yet. ``step`` are the marks of the one that runs or was last, ``began`` the part that began
    with the last mark, None if none did.
    """

    stack: list[int] = field(default_factory=lambda: [OTHER])
    running: bool = False
    failed_in: int | None = None
    began: int | None = None
    finished: deque[StepMarks] = field(default_factory=deque)
    step: StepMarks = field(default_factory=lambda: StepMarks([], [], []))

    def after(self, tape: Sequence[Any]) -> TapeReading:
        """What it says ``tape`` later, which alternates between what is marked and when. This one stays as it is."""
        step = self.step
        step = StepMarks([*step.codes], [*step.host_ns], [*step.instants], step.asked, step.idle)
        read = TapeReading(self.stack.copy(), self.running, self.failed_in, None, self.finished.copy(), step)
        for code, instant in zip(tape[::2], tape[1::2], strict=True):
            read.read(code, instant)
        return read

    def read(self, code: int, instant: Any) -> None:
        """One mark more."""
        stack = self.stack
        self.began = None
        if code == FAIL:
            if self.failed_in is None:
                self.failed_in = stack[-1]
            return
        if stack[-1] == OUTSIDE:
            stack.pop()
        if code < END:
            self._open_or_close(code)
        # Whoever has its batches fetched by the loop asks for one first; training_step(dataloader_iter) does so inside.
        if code in (DATA, FORWARD) and not self.running:
            self.running, self.failed_in, self.step = True, None, StepMarks([], [], [])
        if self.running:
            self._mark(OTHER if code == END else stack[-1], instant)
        if code == END and self.running:
            self.running = False
            self.finished.append(self.step)

    def _open_or_close(self, code: int) -> None:
        stack = self.stack
        if code <= OUTSIDE:
            stack.append(code)
        elif code == CLIPPED:
            stack[-1] = OPTIMIZER
        elif code == OPTIMIZED:
            while stack[-1] == OPTIMIZER:
                stack.pop()
        elif len(stack) > 1:
            stack.pop()

    def _mark(self, code: int, instant: Any) -> None:
        step = self.step
        if type(instant) is tuple:
            instant, event, reached = instant
            if reached is not None and code < OTHER and step.codes and step.codes[-1] == OTHER:
                step.asked += 1
                step.idle += reached
            step.instants.append(event)
        step.codes.append(code)
        step.host_ns.append(instant)
        self.began = code

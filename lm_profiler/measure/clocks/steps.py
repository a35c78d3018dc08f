"""Reads a tape of marks into steps: which part of the step each stretch of time belongs to.

Parts nest (a backward inside a manual training_step); the time belongs to the innermost. None of this runs within a
timed step.
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
# code of a stretch between two marks that is not part of the step, such as validation during accumulation
OUTSIDE = len(PARTS)

# codes of marks that begin no part: the innermost part ends; clipping ends and the optimizer's arithmetic begins; the
# optimizer's arithmetic ends, however often it began; an error passed; the step ends
LEAVE, CLIPPED, OPTIMIZED, FAIL, END = range(OUTSIDE + 1, OUTSIDE + 6)


@dataclass(slots=True)
class StepMarks:
    """The marks of one finished step: ``codes[k]`` is the part that begins at ``host_ns[k]``; the last mark ends the
    step.

    ``asked`` counts the phases at whose start the device was asked whether it had finished what came before, and
    ``idle`` those at which it had: there it waits for the host.
    """

    codes: list[int]
    host_ns: list[int]
    instants: list[Any]
    asked: int = 0
    idle: int = 0

    def host_seconds(self) -> tuple[float, ...]:
        """Return the seconds of each of ``TIMED`` on the host's clock."""
        return _per_part(self.codes, [(b - a) * 1e-9 for a, b in pairwise(self.host_ns)])

    def stream_seconds(self, stream: EventStream) -> tuple[float, ...] | None:
        """Return the seconds of each of ``TIMED`` on the device's stream; None where an instant cannot be read.

        The device must have reached every instant.
        """
        seconds = [stream.seconds(a, b) for a, b in pairwise(self.instants)]
        known = [value for value in seconds if value is not None]
        return _per_part(self.codes, known) if len(known) == len(self.codes) - 1 else None


def _per_part(codes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    parts = [0.0] * (len(PARTS) + 1)
    for code, duration in zip(codes, seconds, strict=False):
        parts[code] += duration
    parts[OUTSIDE] = sum(parts[:OUTSIDE])  # time outside is dropped; its slot holds the sum, which is the step
    return tuple(parts)


@dataclass(slots=True)
class TapeReading:
    """The state after the marks that were read.

    ``stack`` holds the open parts, ``failed_in`` the innermost part when an error first passed, ``finished`` the steps
    that nobody took yet. ``step`` holds the marks of the current or last step, ``began`` the part that the last mark
    began, or None.
    """

    stack: list[int] = field(default_factory=lambda: [OTHER])
    running: bool = False
    failed_in: int | None = None
    began: int | None = None
    finished: deque[StepMarks] = field(default_factory=deque)
    step: StepMarks = field(default_factory=lambda: StepMarks([], [], []))

    def after(self, tape: Sequence[Any]) -> TapeReading:
        """Return the state after ``tape``, which alternates between codes and instants; this one stays unchanged."""
        step = self.step
        step = StepMarks([*step.codes], [*step.host_ns], [*step.instants], step.asked, step.idle)
        read = TapeReading(self.stack.copy(), self.running, self.failed_in, None, self.finished.copy(), step)
        for code, instant in zip(tape[::2], tape[1::2], strict=True):
            read.read(code, instant)
        return read

    def read(self, code: int, instant: Any) -> None:
        """Read one mark."""
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
        # A step begins with data, which the loop fetches; training_step(dataloader_iter) fetches inside forward.
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

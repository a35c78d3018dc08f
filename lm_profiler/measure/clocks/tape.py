"""Reads a tape of marks into steps: which part of the step each stretch of time belongs to.

Parts nest (a backward inside a manual training_step); the time belongs to the innermost. None of this runs within a
timed step. ``TapeReading`` reads mark by mark. ``ChunkReader`` computes steps whose marks have the same codes together:
reading takes tens of microseconds a step, which a run that is watched for days would pay in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.record.quantities import PARTS, TIMED

DATA, TRANSFER, FORWARD, ZERO_GRAD, BACKWARD, CLIP, OPTIMIZER, OTHER = range(len(PARTS))
# code of a stretch between two marks that is not part of the step, such as validation during accumulation
OUTSIDE = len(PARTS)

# codes of marks that begin no part: the innermost part ends; the optimizer's arithmetic ends, however often it began;
# an error passed; the step ends
LEAVE, OPTIMIZED, FAIL, END = range(OUTSIDE + 1, OUTSIDE + 5)


@dataclass(slots=True)
class StepMarks:
    """The marks of one finished step; the last mark ends it."""

    codes: list[int]  # the part that begins at each mark
    host_ns: list[int]
    instants: list[Any]  # on the device's clock
    asked: int = 0  # phases at whose start the device was asked whether it was idle
    idle: int = 0  # phases at whose start it was: there it waits for the host

    def host_seconds(self) -> tuple[float, ...]:
        return _per_part(self.codes, [(b - a) * 1e-9 for a, b in pairwise(self.host_ns)])

    def stream_seconds(self, stream: EventStream) -> tuple[float, ...] | None:
        """Return the same on the device's stream, which has reached every instant; None where one cannot be read."""
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
    stack: list[int] = field(default_factory=lambda: [OTHER])  # the open parts
    running: bool = False
    failed_in: int | None = None  # the innermost part when an error first passed
    began: int | None = None  # the part that the last mark began
    finished: deque[StepMarks] = field(default_factory=deque)  # finished steps that were not taken yet
    step: StepMarks = field(default_factory=lambda: StepMarks([], [], []))  # the current or last one

    def after(self, tape: Sequence[Any]) -> TapeReading:
        """Return the state after ``tape``, which alternates between codes and instants; this one stays unchanged."""
        step = self.step
        step = StepMarks([*step.codes], [*step.host_ns], [*step.instants], step.asked, step.idle)
        read = TapeReading(self.stack.copy(), self.running, self.failed_in, None, self.finished.copy(), step)
        for code, instant in zip(tape[::2], tape[1::2], strict=True):
            read.read(code, instant)
        return read

    def read(self, code: int, instant: Any) -> None:
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


_MOST_LAYOUTS = 512  # a loop whose marks never repeat must not fill the memory


class TimedSteps(NamedTuple):
    """The times of n finished steps, in their order."""

    begin_ns: NDArray[np.int64]  # (n,) on the host's clock
    end_ns: NDArray[np.int64]
    host_s: NDArray[np.float64]  # (n, TIMED) seconds of each part and of the step on the host's clock
    seconds: NDArray[np.float64]  # the same on the device's, NaN where unknown; ``host_s`` without a device


class _Layout(NamedTuple):
    """The meaning of the marks of one sequence of codes."""

    marks: NDArray[np.intp]  # where the step's marks stand
    codes: list[int]
    parts: NDArray[np.float64]
    after: tuple[int, ...]  # the open parts at the end


@dataclass(eq=False)
class ChunkReader:
    """Reads one tape, a chunk after the other."""

    stream: EventStream | None = None  # the device's clock of the timeline; None where there is only the host's
    _stack: tuple[int, ...] = tuple(TapeReading().stack)
    _rest: list[Any] = field(default_factory=list)
    _layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], _Layout | None] = field(default_factory=dict)
    _unread: deque[tuple[_Layout, Sequence[Any]]] = field(default_factory=deque)

    def read(self, tape: Sequence[Any], wait: bool = False) -> TimedSteps:
        """Return the steps that end in ``tape`` or in earlier chunks, as far as the device has reached their ends.

        With ``wait`` the device has done all that it was given.
        """
        tape = [*self._rest, *tape]
        codes, instants, begin = tape[::2], tape[1::2], 0
        for end in (at + 1 for at, code in enumerate(codes) if code == END):
            layout = self._layout(tuple(codes[begin:end]))
            if layout is not None:
                self._unread.append((layout, instants[begin:end]))
            begin = end
        self._rest = tape[2 * begin :]
        return self._times([self._unread.popleft() for _ in range(self._ready(wait))])

    def _ready(self, wait: bool) -> int:
        if self.stream is None or wait:
            return len(self._unread)
        late = (at for at, (_, instants) in enumerate(self._unread) if not self.stream.reached(instants[-1][1]))
        return next(late, len(self._unread))

    def _layout(self, codes: tuple[int, ...]) -> _Layout | None:
        """Return what ``codes`` up to a step's end mean here; None where no step ran."""
        key = self._stack, codes
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._laid_out(codes)
        layout = self._layouts[key]
        self._stack = self._stack if layout is None else layout.after
        return layout

    def _laid_out(self, codes: tuple[int, ...]) -> _Layout | None:
        reading = TapeReading(stack=list(self._stack))
        for at, code in enumerate(codes):  # the place of each mark stands for its instant
            reading.read(code, at)
        if not reading.finished:
            return None
        step = reading.finished[0]
        parts = np.zeros((len(step.codes) - 1, len(TIMED)))
        for at, code in enumerate(step.codes[:-1]):
            if code < len(PARTS):
                parts[at, [code, -1]] = 1.0
        return _Layout(np.array(step.host_ns), step.codes, parts, tuple(reading.stack))

    def _times(self, segments: Sequence[tuple[_Layout, Sequence[Any]]]) -> TimedSteps:
        n = len(segments)
        begin_ns, end_ns = np.zeros((2, n), np.int64)
        host_s, seconds = np.zeros((2, n, len(TIMED)))
        alike: dict[int, list[int]] = {}
        for at, (layout, _) in enumerate(segments):
            alike.setdefault(id(layout), []).append(at)
        for places in alike.values():
            layout = segments[places[0]][0]
            rows = [segments[at][1] for at in places]
            if self.stream is not None:
                seconds[places] = [self._on_device(layout, row) for row in rows]
                rows = [[instant[0] for instant in row] for row in rows]
            ns = np.array(rows, np.int64)[:, layout.marks]
            begin_ns[places], end_ns[places] = ns[:, 0], ns[:, -1]
            host_s[places] = np.diff(ns, axis=1) * 1e-9 @ layout.parts
        return TimedSteps(begin_ns, end_ns, host_s, host_s if self.stream is None else seconds)

    def _on_device(self, layout: _Layout, instants: Sequence[Any]) -> Sequence[float]:
        assert self.stream is not None
        events = [instants[at][1] for at in layout.marks]
        known = StepMarks(layout.codes, [], events).stream_seconds(self.stream)
        self.stream.release([instant[1] for instant in instants])
        return [np.nan] * len(TIMED) if known is None else known

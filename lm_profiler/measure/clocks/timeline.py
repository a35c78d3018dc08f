"""Marks on two clocks, put down on a tape.

A mark says what happens at its instant, mostly which part of the step begins or ends; so the parts of a step add up to
the step by construction, on each clock. What it means for the parts that are open is found out later (``steps``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.steps import (
    BACKWARD,
    CLIP,
    CLIPPED,
    DATA,
    END,
    FAIL,
    FORWARD,
    LEAVE,
    OPTIMIZED,
    OPTIMIZER,
    OTHER,
    OUTSIDE,
    TRANSFER,
    ZERO_GRAD,
    StepMarks,
    TapeReading,
)
from lm_profiler.measure.clocks.stream import EventStream

__all__ = [
    "BACKWARD",
    "CLIP",
    "CLIPPED",
    "DATA",
    "END",
    "FAIL",
    "FORWARD",
    "LEAVE",
    "OPTIMIZED",
    "OPTIMIZER",
    "OTHER",
    "OUTSIDE",
    "TRANSFER",
    "ZERO_GRAD",
    "Span",
    "StepMarks",
    "Timeline",
]


@dataclass(eq=False)
class Timeline:
    """Takes the marks. It and ``Span`` are the hot path: between a model's own work every further Python frame costs a
    microsecond and more, several times what it costs in a tight loop. So a mark is one entry of a list, written by one
    built-in call, which Ctrl-C finds done or not done.

    Args:
        clock: the host's clock, in nanoseconds.
        stream: the device's clock, or None where the host's is the only one.
        part: answers for what fails while training is in here.

    ``note`` puts down a mark: what happens, and the host's instant.
    """

    clock: Callable[[], int] = time.perf_counter_ns
    stream: EventStream | None = None
    part: Guard = UNGUARDED

    def __post_init__(self) -> None:
        self._tape: list[Any] = [TapeReading()]  # first what is known of the marks before, then two entries a mark
        self._last: Any = None
        self._outside = self._stopped = False
        self.went_outside: list[tuple[int, str]] = []
        """When the loop left the step, and for what."""
        self.saved: list[int] = []
        """When each checkpoint began and ended, in turn."""
        self.observers = ()

    @property
    def observers(self) -> tuple[Callable[[int], None], ...]:
        """Called at each mark, after its instant was taken, with the code of the part that begins."""
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[Callable[[int], None], ...]) -> None:
        self._observers = observers
        self._tune()

    def unobserve(self, *observers: Callable[[int], None]) -> None:
        """Call these no more; it may be done twice."""
        self.observers = tuple(each for each in self.observers if each not in observers)

    def _tune(self) -> None:
        """Have ``note`` do what is wanted and no more."""
        self._put: Callable[[tuple[int, int]], object]
        self._put = self._tape.extend if self.stream is None else self._put_with_event
        self.note = self._put if not self._observers else self._tell
        if self._outside or self._stopped:
            self.note = self._wait

    def _put_with_event(self, mark: tuple[int, int]) -> None:
        code, now = mark
        last, stream = self._last, self.stream
        assert stream is not None
        reached = stream.reached(last) if code < OTHER and last is not None else None
        event = stream.record()
        self._last = None if code == END else event
        self._tape.extend((code, (now, event, reached)))

    def _tell(self, mark: tuple[int, int]) -> None:
        """Put it down and read it at once, for those who observe."""
        reading = self.reading()
        self._put(mark)
        code, instant = self._tape[1:]
        del self._tape[1:]
        reading.read(code, instant)
        if reading.began is not None:
            for observer in self._observers:
                observer(reading.began)

    def _wait(self, mark: tuple[int, int]) -> None:
        """Whatever happens outside of the step is not marked; that the loop comes back, or asks for the end, is."""
        if mark[0] in (DATA, FORWARD, END) and not self._stopped:
            self._outside = False
            self._tune()
            self.note(mark)

    def reading(self) -> TapeReading:
        """Read the tape up to its last mark. Not for a timed step."""
        tape = self._tape
        count = len(tape)
        known: TapeReading = tape[0]
        if count > 1:
            known = known.after(tape[1:count])
            tape[:count] = [known]  # in one go: an interrupt finds marks that were read, or were not
        return known

    def peek(self) -> TapeReading:
        """What the tape says by now, read by another thread: the tape stays as it is."""
        tape = self._tape[:]
        known: TapeReading = tape[0]
        return known.after(tape[1:])

    @property
    def live(self) -> bool:
        """Whether a step is open and the loop is inside of it, so that marks are taken."""
        known = self.reading()
        return known.running and known.stack[-1] != OUTSIDE

    @property
    def stack(self) -> list[int]:
        """Codes of the parts that are open."""
        return self.reading().stack

    def mark(self, code: int) -> None:
        """``code`` happens at this instant."""
        self.note((code, self.clock()))

    def go_outside(self, what: str = "") -> None:
        """What follows, until the loop is back at a step, is in no part of one, and is not marked; ``what`` it is."""
        if what:
            self.went_outside.append((self.clock(), what))
        self.mark(OUTSIDE)
        self._outside = True
        self._tune()

    def stop(self) -> None:
        """Take no more marks."""
        self._stopped = True
        self._tune()


@dataclass(eq=False, slots=True)
class Span:
    """A part as a context manager, whose end says ``ends``; reusable and reentrant, so that a step allocates none.

    It does what ``Timeline.mark`` does, in one frame.
    """

    _timeline: Timeline
    _code: int
    _ends: int = LEAVE

    def __enter__(self) -> None:
        timeline = self._timeline
        try:
            timeline.note((self._code, timeline.clock()))
        except BaseException as error:
            timeline.part.failed(error)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        timeline = self._timeline
        try:
            if kind is not None:
                timeline.mark(FAIL)
            timeline.note((self._ends, timeline.clock()))
        except BaseException as error:
            timeline.part.failed(error)

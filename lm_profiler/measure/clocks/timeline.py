"""Takes marks on two clocks and writes them to a tape.

A mark records an event and its instant: usually which part of the step begins or ends. So the parts of a step add up to
the step by construction, on each clock. ``tape`` reads it later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import (
    DATA,
    END,
    FAIL,
    FORWARD,
    LEAVE,
    OTHER,
    OUTSIDE,
    TapeReading,
)


@dataclass(eq=False)
class Timeline:
    """Takes the marks.

    This class and ``Span`` are the hot path: between a model's own work each further Python frame costs a microsecond
    and more, several times its cost in a tight loop. So a mark is one call of a built-in that extends a list, which
    Ctrl-C finds either done or not done: ``note``, which takes a code and the host's instant.
    """

    clock: Callable[[], int] = time.perf_counter_ns  # the host's clock, in nanoseconds
    # the device's clock; None if there is only the host's
    stream: EventStream | None = None
    guard: Guard = UNGUARDED  # the Guard that handles errors in here

    def __post_init__(self) -> None:
        # [TapeReading, code, instant, code, instant, …]: what all earlier marks meant, and the marks that are not read.
        # An instant is the host's time in ns, or a tuple that begins with it (``_write_with_event``).
        self._tape: list[Any] = [TapeReading()]
        self._last_event: Any = None  # the device's, of the last mark within the step
        # whether the loop has left the step, for a validation for example
        self._is_outside = False
        self._is_stopped = False  # whether all further marks are dropped
        # when the loop left the step (ns), and for what
        self.went_outside: list[tuple[int, str]] = []
        # when the saving of a checkpoint began, when it ended, when the next one began, …
        self.checkpoint_instants_ns: list[int] = []
        # the begin (ns), the end (ns) and the name of each hook at the beginning or end of an epoch
        self.epoch_hooks: list[tuple[int, int, str]] = []
        self.observers = ()

    @property
    def observers(self) -> tuple[Callable[[int], None], ...]:
        """Callables that receive the code of each beginning part, after the instant of its mark was taken."""
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[Callable[[int], None], ...]) -> None:
        self._observers = observers
        self._choose_note()

    def unobserve(self, *observers: Callable[[int], None]) -> None:
        self.observers = tuple(
            observer for observer in self.observers if observer not in observers
        )

    def _choose_note(self) -> None:
        """Choose the cheapest ``note`` for the current state, so that a mark has no branches."""
        self._write: Callable[[tuple[int, int]], object]
        self._write = self._tape.extend
        if self.stream is not None:
            self._write = self._write_with_event
        self.note = self._write
        if self._observers:
            self.note = self._write_and_call_observers
        if self._is_outside or self._is_stopped:
            self.note = self._write_if_back

    def _write_with_event(self, mark: tuple[int, int]) -> None:
        """Write ``mark`` to the tape with an event of the device's stream.

        The tape is flat: after a reading, codes and instants in turns. The instant of a mark with an event is the
        host's clock, the event, and whether the stream had reached the event before it (None if that was not checked).
        """
        code, host_ns = mark
        last_event = self._last_event
        stream = self.stream
        assert stream is not None
        # Queried before the next event is enqueued: a device that has reached the last one is idle.
        reached = None
        begins_phase = code < OTHER  # the phases have the smallest codes
        if begins_phase and last_event is not None:
            reached = stream.reached(last_event)
        event = stream.record()
        self._last_event = None if code == END else event
        self._tape.extend((code, (host_ns, event, reached)))

    def _write_and_call_observers(self, mark: tuple[int, int]) -> None:
        """Write ``mark`` to the tape and read it at once; if it begins a part, call the observers with its code."""
        reading = self.reading()  # empties the tape but for this reading
        self._write(mark)
        _, code, instant = self._tape
        del self._tape[1:]
        reading.read(code, instant)
        if reading.begun_part is None:
            return
        for observer in self._observers:
            observer(reading.begun_part)

    def _write_if_back(self, mark: tuple[int, int]) -> None:
        """Drop marks outside the step, until the loop comes back to a step or ends it."""
        is_back = mark[0] in (DATA, FORWARD, END)
        if is_back and not self._is_stopped:
            self._is_outside = False
            self._choose_note()
            self.note(mark)

    def reading(self) -> TapeReading:
        """Read the tape up to its last mark; too slow for a timed step."""
        tape = self._tape
        count = len(tape)
        reading: TapeReading = tape[0]
        if count > 1:
            reading = reading.after(tape[1:count])
            # in one assignment: an interrupt must not find marks half read
            tape[:count] = [reading]
        return reading

    def take_marks(self) -> list[Any]:
        """Return the marks that were not read yet, and take them off the tape; none if observers read them at once.

        They are flat, as on the tape: the code of a mark, its instant, the code of the next mark, and so on.
        """
        tape = self._tape
        count = len(tape)
        marks = tape[1:count]
        del tape[1:count]
        return marks

    def restart(self) -> None:
        """Forget all marks."""
        self._tape[:] = [TapeReading()]

    def read_without_change(self) -> TapeReading:
        """Return the state after the last mark without changing the tape; for other threads."""
        tape = self._tape[:]
        reading: TapeReading = tape[0]
        return reading.after(tape[1:])

    @property
    def last_ns(self) -> int:
        """When the last mark was taken; 0 if none is on the tape. For other threads."""
        last_entry = self._tape[-1]
        if isinstance(last_entry, TapeReading):
            return 0
        if isinstance(last_entry, tuple):
            return int(last_entry[0])
        return int(last_entry)

    @property
    def is_in_step(self) -> bool:
        """Whether a step is running and the loop is inside it, so that marks count."""
        reading = self.reading()
        return reading.is_step_running and reading.stack[-1] != OUTSIDE

    @property
    def stack(self) -> list[int]:
        """The codes of the parts that are open, the innermost last."""
        return self.reading().stack

    def mark(self, code: int) -> None:
        self.note((code, self.clock()))

    def go_outside(self, what: str = "") -> None:
        """Ignore marks until the loop is back at a step; ``what`` names what happens meanwhile."""
        if what:
            self.went_outside.append((self.clock(), what))
        self.mark(OUTSIDE)
        self._is_outside = True
        self._choose_note()

    def stop(self) -> None:
        """Drop all further marks."""
        self._is_stopped = True
        self._choose_note()


@dataclass(eq=False, slots=True)
class Span:
    """A context manager that marks a part and its end; reusable and reentrant, so that steps allocate none.

    It does what ``Timeline.mark`` does, but in one frame.
    """

    _timeline: Timeline
    _code: int

    def __enter__(self) -> None:
        timeline = self._timeline
        try:
            timeline.note((self._code, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        timeline = self._timeline
        try:
            if kind is not None:
                timeline.mark(FAIL)
            timeline.note((LEAVE, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

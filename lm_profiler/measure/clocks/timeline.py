"""Takes marks on two clocks and writes them to a tape, which the module ``tape`` reads later.

A mark records an instant and what happened then: usually that a part of the step began or ended. Because each part ends
at the mark that begins the next, the parts add up to the step on each clock.
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
    and more, several times its cost in a tight loop. So a mark is one call of ``note`` with a code and the host's
    instant, and ``note`` is usually a built-in method that extends a list, which Ctrl-C cannot interrupt halfway.
    """

    clock: Callable[[], int] = time.perf_counter_ns  # the host's clock, in nanoseconds
    # the device's clock; None if there is only the host's
    stream: EventStream | None = None
    guard: Guard = UNGUARDED  # the Guard that handles errors in here

    def __post_init__(self) -> None:
        # [TapeReading, code, instant, code, instant, …]: the state after all marks that were read, and then the marks
        # that were not read. ``Instant`` in ``tape`` states what an instant is.
        self._tape: list[Any] = [TapeReading()]
        # the device's event of the last mark within the step
        self._last_event: Any = None
        # whether the loop has left the step, for example for a validation
        self._is_outside = False
        self._is_stopped = False  # whether all further marks are dropped
        # when (ns) the loop left the step each time, and for what; also when it continued with the step's last batch
        self.departures: list[tuple[int, str]] = []
        # called when the loop leaves the step
        self.left_step: Callable[[], object] = _do_nothing
        # when the saving of each checkpoint began and ended, in turn
        self.checkpoint_instants_ns: list[int] = []
        # the start (ns), the end (ns) and the name of each hook at the start or end of an epoch
        self.epoch_hooks: list[tuple[int, int, str]] = []
        self.observers = ()

    @property
    def observers(self) -> tuple[Callable[[int], None], ...]:
        """Functions that receive the code of each part that begins, after the instant of its mark was taken."""
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[Callable[[int], None], ...]) -> None:
        self._observers = observers
        self._choose_note()

    def unobserve(self, *observers: Callable[[int], None]) -> None:
        """Call these ``observers`` no longer."""
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

        Its instant is a tuple: the host's clock, the event, and whether the stream had reached the previous event (None
        if that was not checked).
        """
        code, host_ns = mark
        last_event = self._last_event
        stream = self.stream
        assert stream is not None
        # Checked before the next event is enqueued: a device that has reached the last event is idle.
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
        reading.add(code, instant)
        if reading.begun_part is None:
            return
        for observer in self._observers:
            observer(reading.begun_part)

    def _write_if_back(self, mark: tuple[int, int]) -> None:
        """Drop marks outside of the step, until the loop begins, continues or ends a step."""
        code = mark[0]
        is_back = code in (DATA, FORWARD, END)
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
        """Return the marks that were not read yet, and remove them from the tape.

        They alternate between codes and instants, as on the tape. If there are observers, all marks are read at once,
        so that none is left.
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
        """When the last mark was taken (ns); 0 if none is on the tape. For other threads."""
        last_entry = self._tape[-1]
        if isinstance(last_entry, TapeReading):
            return 0
        if isinstance(last_entry, tuple):  # with the device's event
            host_ns, *_ = last_entry
            return int(host_ns)
        return int(last_entry)

    @property
    def is_in_step(self) -> bool:
        """Whether a step is running and the loop has not left it, so that marks count."""
        reading = self.reading()
        return reading.is_step_running and reading.stack[-1] != OUTSIDE

    @property
    def stack(self) -> list[int]:
        """The codes of the parts that are open, the innermost last."""
        return self.reading().stack

    def mark(self, code: int) -> None:
        self.note((code, self.clock()))

    def go_outside(self, what: str = "") -> None:
        """Ignore marks until the loop begins or continues a step; ``what`` names what happens in between."""
        if what:
            self.departures.append((self.clock(), what))
        self.mark(OUTSIDE)
        self._is_outside = True
        self._choose_note()
        self.left_step()

    def name_outside(self, what: str) -> None:
        """Set the name of what happens from now on, while the loop is outside of a step."""
        self.departures.append((self.clock(), what))
        self.left_step()

    def is_outside_for(self, what: str) -> bool:
        """Return whether the loop has left the step for ``what``, and is not back. Other threads may ask, too."""
        return self._is_outside and self.has_left_for(what)

    def has_left_for(self, what: str) -> bool:
        """Return whether ``what`` was the last thing for which the loop left the step. Other threads may ask, too."""
        return bool(self.departures) and self.departures[-1][1] == what

    def stop(self) -> None:
        """Drop all further marks."""
        self._is_stopped = True
        self._choose_note()


def _do_nothing() -> None:
    """Do nothing when the loop leaves a step, unless an instrument waits for that."""


@dataclass(eq=False, slots=True)
class Span:
    """A context manager that marks the start and the end of a part; reusable and reentrant, so steps allocate none.

    It does what ``Timeline.mark`` does, but in one Python frame.
    """

    _timeline: Timeline
    _code: int

    def __enter__(self) -> None:
        """Mark the start of the part."""
        timeline = self._timeline
        try:
            timeline.note((self._code, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Mark the end of the part, and before it an error that passed."""
        timeline = self._timeline
        try:
            if kind is not None:
                timeline.mark(FAIL)
            timeline.note((LEAVE, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

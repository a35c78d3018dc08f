"""Reads a tape of marks into steps: which part of the step each stretch of time belongs to.

Parts nest (a backward inside a manual training_step); the time belongs to the innermost. None of this runs within a
timed step. ``TapeReading`` reads step by step, and mark by mark if a step's sequence of codes is new or the step still
runs. ``ChunkReader`` computes all steps with the same codes together, which costs a run that is watched for days much
less per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.record.quantities import PARTS, TIMED

DATA, TRANSFER, FORWARD, ZERO_GRAD, BACKWARD, CLIP, OPTIMIZER, OTHER = range(len(PARTS))
# code of a stretch between two marks that is not part of the step, such as validation during accumulation
OUTSIDE = len(PARTS)

# Codes of marks that begin no part. LEAVE: the innermost part ends. OPTIMIZED: the phase optimizer ends, however often
# it began. FAIL: an error passed. END: the step ends.
LEAVE, OPTIMIZED, FAIL, END = range(OUTSIDE + 1, OUTSIDE + 5)

# When a mark was taken: the host's time in ns. With a device it is a tuple of the host's time, the device's event, and
# whether the device had reached the event of the previous mark (None if that was not checked).
Instant = int | tuple[int, Any, bool | None]


@dataclass(slots=True)
class StepMarks:
    """The marks of one finished step; the last mark ends it."""

    codes: list[int]  # the part that begins at each mark
    host_ns: list[int]  # the instant of each mark on the host's clock
    # the event of each mark on the device's stream; empty without a device
    events: list[Any]
    # the number of phases at whose start it was checked whether the device was idle
    idle_checks: int = 0
    # the number of those phases at whose start the device was idle, because it waited for the host
    idle_starts: int = 0

    def host_seconds(self) -> tuple[float, ...]:
        """Return the seconds of each part on the host's clock, and last those of the step."""
        seconds = [
            (end_ns - begin_ns) * 1e-9 for begin_ns, end_ns in pairwise(self.host_ns)
        ]
        return _per_part(self.codes, seconds)

    def stream_seconds(self, stream: EventStream) -> tuple[float, ...] | None:
        """Return the seconds of each part on the device's stream, and last those of the step.

        The stream must have reached all events. None if the time between two of them is unknown.
        """
        known_seconds: list[float] = []
        for begin, end in pairwise(self.events):
            seconds = stream.seconds(begin, end)
            if seconds is not None:
                known_seconds.append(seconds)
        if len(known_seconds) != len(self.codes) - 1:
            return None
        return _per_part(self.codes, known_seconds)


@dataclass(slots=True)
class ClippedBatches:
    """Counts the batches after which gradients are clipped, from the marks of one step after another.

    Clipping is early if the backward pass of a later batch adds to the gradients before an optimizer uses them. It is
    not early if gradients of several losses of one batch are each clipped on their own, nor if gradients are cleared
    afterwards, as for differential privacy.
    """

    count: int = 0
    early: int = 0  # those after which clipping is early
    # whether there are clipped gradients that have been neither used nor cleared
    _is_clipped: bool = False
    _has_next_batch: bool = False  # since the gradients were clipped

    def add(self, codes: Sequence[int]) -> None:
        """Add the next step; ``codes`` are the parts that begin in it, one after another.

        Only a loader's batches count: without one, a backward pass may be that of another loss of the same batch.
        """
        for code in codes:
            if code == CLIP:
                if not self._is_clipped:
                    self.count += 1
                self._is_clipped = True
                self._has_next_batch = False
            elif code == DATA:
                self._has_next_batch = True
            elif code in (OPTIMIZER, ZERO_GRAD):
                self._is_clipped = False
            elif code == BACKWARD and self._is_clipped and self._has_next_batch:
                self.early += 1
                self._is_clipped = False


def _per_part(codes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of each part, and last those of the step; ``codes[i]`` runs for ``seconds[i]``."""
    # one for each part, and one for ``OUTSIDE``
    seconds_by_code = [0.0] * (len(PARTS) + 1)
    for code, duration in zip(codes, seconds, strict=False):
        seconds_by_code[code] += duration
    parts = seconds_by_code[:OUTSIDE]  # time outside is dropped
    return (*parts, sum(parts))


@dataclass(slots=True)
class TapeReading:
    """The state of the loop after the marks that were read."""

    # the codes of the open parts, the innermost last
    stack: list[int] = field(default_factory=lambda: [OTHER])
    is_step_running: bool = False
    # the innermost part when an error first passed in the step; None if none passed
    failed_in: int | None = None
    # the part that the last mark began; None if it began none
    begun_part: int | None = None
    # finished steps that were not taken yet
    finished: deque[StepMarks] = field(default_factory=deque)
    # the current or last step
    step: StepMarks = field(
        default_factory=lambda: StepMarks(codes=[], host_ns=[], events=[])
    )

    def after(self, tape: Sequence[Any]) -> TapeReading:
        """Return the state after ``tape``, which alternates between codes and instants; this object does not change.

        Whole steps are added by ``_add_step``, which is faster than adding their marks one by one.
        """
        reading = self._copy()
        codes = tape[::2]
        instants = tape[1::2]
        begin = 0
        for index, code in enumerate(codes):
            if code == END:
                end = index + 1
                reading._add_step(codes[begin:end], instants[begin:end])
                begin = end
        for code, instant in zip(codes[begin:], instants[begin:], strict=True):
            reading.add(code, instant)
        return reading

    def _copy(self) -> TapeReading:
        """Return a copy to which marks can be added without changing this object."""
        step = self.step
        step_copy = StepMarks(
            codes=[*step.codes],
            host_ns=[*step.host_ns],
            events=[*step.events],
            idle_checks=step.idle_checks,
            idle_starts=step.idle_starts,
        )
        return TapeReading(
            stack=self.stack.copy(),
            is_step_running=self.is_step_running,
            failed_in=self.failed_in,
            begun_part=None,
            finished=self.finished.copy(),
            step=step_copy,
        )

    def _add_step(self, codes: Sequence[int], instants: Sequence[Any]) -> None:
        """Add marks of which the last one ends a step.

        Usually they are added by the layout of the step, which is computed once for each sequence of codes. They are
        added one by one if a part of the step was added before, if an error passed, or if the instants include device
        times, because ``_add_to_step`` also counts idle starts from these.
        """
        layout = None
        begins_with_step = not self.is_step_running
        has_device_times = type(instants[-1]) is tuple
        if begins_with_step and not has_device_times and FAIL not in codes:
            layout = _layout_of(tuple(self.stack), tuple(codes))
        if layout is None:
            for code, instant in zip(codes, instants, strict=True):
                self.add(code, instant)
            return
        host_ns = [instants[place] for place in layout.places]
        self.stack = list(layout.stack_at_end)
        self.failed_in = None
        self.begun_part = OTHER
        self.step = StepMarks(codes=[*layout.codes], host_ns=host_ns, events=[])
        self.finished.append(self.step)

    def add(self, code: int, instant: Instant) -> None:
        """Add one mark: open or close its part, and add it to the running step.

        DATA or FORWARD begins a step, and END ends it. FAIL only notes in which part an error first passed.
        """
        stack = self.stack
        self.begun_part = None
        if code == FAIL:
            if self.failed_in is None:
                self.failed_in = stack[-1]
            return
        if stack[-1] == OUTSIDE:
            stack.pop()  # any mark ends the time outside
        if code != END:
            self._open_or_close(code)
        # training_step(dataloader_iter) fetches the data itself, so its step begins with forward
        begins_step = code in (DATA, FORWARD) and not self.is_step_running
        if begins_step:
            self.is_step_running = True
            self.failed_in = None
            self.step = StepMarks(codes=[], host_ns=[], events=[])
        if not self.is_step_running:
            return
        if code == END:
            self._add_to_step(OTHER, instant)
            self.is_step_running = False
            self.finished.append(self.step)
        else:
            self._add_to_step(stack[-1], instant)

    def _open_or_close(self, code: int) -> None:
        """Open the part that a mark begins, or close the part that it ends."""
        stack = self.stack
        if code <= OUTSIDE:
            stack.append(code)
        elif code == OPTIMIZED:
            while stack[-1] == OPTIMIZER:
                stack.pop()
        elif len(stack) > 1:
            stack.pop()

    def _add_to_step(self, code: int, instant: Instant) -> None:
        """Add a mark to the running step: ``code`` is the part that runs from now on."""
        step = self.step
        if isinstance(instant, tuple):
            host_ns, event, had_reached_previous = instant
            # before the code is added, because the part that ended here is the last one of ``step.codes``
            self._count_idle_start(code, had_reached_previous)
            step.events.append(event)
        else:
            host_ns = instant
        step.codes.append(code)
        step.host_ns.append(host_ns)
        self.begun_part = code

    def _count_idle_start(self, code: int, had_reached_previous: bool | None) -> None:
        """Count whether the device was idle at the start of a phase: it had then reached the event of the last mark."""
        step = self.step
        begins_phase = code < OTHER and bool(step.codes) and step.codes[-1] == OTHER
        if had_reached_previous is None or not begins_phase:
            return
        step.idle_checks += 1
        if had_reached_previous:
            step.idle_starts += 1


# limited, because a loop whose marks never repeat would fill the memory
_MOST_LAYOUTS = 512


class TimedSteps(NamedTuple):
    """The times of n finished steps, in their order."""

    begin_ns: NDArray[np.int64]  # [n] on the host's clock
    end_ns: NDArray[np.int64]  # [n] on the host's clock
    # [n, TIMED] seconds of each part and of the step, on the host's clock
    host_s: NDArray[np.float64]
    # [n, TIMED] the same on the device's clock, NaN if unknown; without a device equal to ``host_s``
    seconds: NDArray[np.float64]


class _Layout(NamedTuple):
    """What the marks of a step mean, for one sequence of codes whose last one ends the step."""

    # the positions in the sequence of the marks that are within the step
    places: list[int]
    codes: list[int]  # the part that begins at each of these marks
    # [len(places) - 1, TIMED]: 1 where the time after a mark belongs to the part, or to the step, else 0
    parts: NDArray[np.float64]
    stack_at_end: tuple[int, ...]  # the open parts when the step has ended


# Most steps of a run have the same codes, so that their layout is computed once.
@lru_cache(maxsize=_MOST_LAYOUTS)
def _layout_of(open_parts: tuple[int, ...], codes: tuple[int, ...]) -> _Layout | None:
    """Return the layout of ``codes``, of which the last one ends a step; None if no step was running.

    ``open_parts`` are the parts that are open before, the innermost last.
    """
    reading = TapeReading(stack=list(open_parts))
    for place, code in enumerate(codes):
        # The position of each mark stands for its instant, so that ``host_ns`` of the step are positions.
        reading.add(code, place)
    if not reading.finished:
        return None
    step = reading.finished[0]
    step_column = len(TIMED) - 1
    parts = np.zeros((len(step.codes) - 1, len(TIMED)))
    for row, code in enumerate(step.codes[:-1]):
        is_in_step = code < len(PARTS)
        if is_in_step:
            parts[row, code] = 1.0
            parts[row, step_column] = 1.0
    return _Layout(
        places=step.host_ns,
        codes=step.codes,
        parts=parts,
        stack_at_end=tuple(reading.stack),
    )


@dataclass(eq=False)
class ChunkReader:
    """Reads one tape in chunks."""

    # the device's clock of the timeline; None if there is only the host's
    stream: EventStream | None = None
    # the parts that were open at the end of the last step, the innermost last
    _open_parts: tuple[int, ...] = tuple(TapeReading().stack)
    # codes and instants of the step that has not ended, in turn
    _unfinished_marks: list[Any] = field(default_factory=list)
    # the layout and the instants of each step whose end the device had not reached
    _unread_steps: deque[tuple[_Layout, Sequence[Any]]] = field(default_factory=deque)

    def read(self, tape: Sequence[Any], wait: bool = False) -> TimedSteps:
        """Return the steps that end in ``tape`` or in earlier chunks and whose ends the device has reached.

        ``wait`` is whether the caller has waited for the device, so that it has reached all of them.
        """
        tape = [*self._unfinished_marks, *tape]
        codes = tape[::2]
        instants = tape[1::2]
        begin = 0
        for _ in range(codes.count(END)):
            end = codes.index(END, begin) + 1
            layout = _layout_of(self._open_parts, tuple(codes[begin:end]))
            if layout is not None:
                self._open_parts = layout.stack_at_end
                self._unread_steps.append((layout, instants[begin:end]))
            begin = end
        self._unfinished_marks = tape[2 * begin :]  # a mark is two entries
        ready_steps = []
        for _ in range(self._count_ready(wait)):
            ready_steps.append(self._unread_steps.popleft())
        return self._times(ready_steps)

    def _count_ready(self, wait: bool) -> int:
        """Return how many of the unread steps the device has reached."""
        if self.stream is None or wait:
            return len(self._unread_steps)
        for count, (_, instants) in enumerate(self._unread_steps):
            _, end_event, _ = instants[-1]
            if not self.stream.reached(end_event):
                return count
        return len(self._unread_steps)

    def _times(self, steps: Sequence[tuple[_Layout, Sequence[Any]]]) -> TimedSteps:
        """Compute the times of ``steps`` (layouts and instants), all steps of one layout at once."""
        count = len(steps)
        begin_ns = np.zeros(count, np.int64)
        end_ns = np.zeros(count, np.int64)
        host_s = np.zeros((count, len(TIMED)))
        device_s = np.zeros((count, len(TIMED)))
        for layout, indices in _indices_by_layout(steps):
            instants_of_steps = [steps[index][1] for index in indices]
            if self.stream is not None:
                for index in indices:
                    _, instants = steps[index]
                    device_s[index] = self._device_seconds(layout, instants)
                instants_of_steps = [
                    _host_instants(instants) for instants in instants_of_steps
                ]
            all_ns = np.array(instants_of_steps, np.int64)
            marks_ns = all_ns[:, layout.places]  # [step, mark within the step]
            begin_ns[indices] = marks_ns[:, 0]
            end_ns[indices] = marks_ns[:, -1]
            # [step, interval] times [interval, TIMED]: the layout says to which part each interval belongs
            between_marks_s = np.diff(marks_ns, axis=1) * 1e-9
            host_s[indices] = between_marks_s @ layout.parts
        seconds = host_s if self.stream is None else device_s
        return TimedSteps(begin_ns, end_ns, host_s, seconds)

    def _device_seconds(
        self, layout: _Layout, instants: Sequence[Any]
    ) -> Sequence[float]:
        """Return the seconds of each part of a step on the device, and release its events; NaN if they are unknown."""
        assert self.stream is not None
        events = [event for _, event, _ in instants]
        events_of_step = [events[place] for place in layout.places]
        marks = StepMarks(layout.codes, host_ns=[], events=events_of_step)
        seconds = marks.stream_seconds(self.stream)
        self.stream.release(events)
        if seconds is None:
            return [np.nan] * len(TIMED)
        return seconds


def _indices_by_layout(
    steps: Sequence[tuple[_Layout, Sequence[Any]]],
) -> list[tuple[_Layout, list[int]]]:
    """Return each layout with the indices of its ``steps``."""
    # by the id of a layout, which cannot be hashed
    groups: dict[int, tuple[_Layout, list[int]]] = {}
    for index, (layout, _) in enumerate(steps):
        _, indices = groups.setdefault(id(layout), (layout, []))
        indices.append(index)
    return list(groups.values())


def _host_instants(instants: Sequence[Any]) -> list[int]:
    """Return the host's time of each instant."""
    return [host_ns for host_ns, _, _ in instants]

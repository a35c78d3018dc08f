"""Times the parts that the program marks with ``lm_profiler.part``, in the measured steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import OUTSIDE, StepMarks
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.code_parts import ask_compiler, time_parts
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import CodePart

ask_compiler(torch.compiler.is_compiling)


class _Instant(NamedTuple):
    """A moment on the host's clock (ns), and on the device's clock if the device has one."""

    host_ns: int
    event: Any


class _Span(NamedTuple):
    """The time from the start to the end of a part that the program marks."""

    name: str
    begin: _Instant
    end: _Instant


@dataclass
class _Total:
    calls: int = 0
    seconds: float = 0.0


class _PartTimer(NamedTuple):
    """Functions that a part calls when it begins and ends."""

    begin: Callable[[], Any]
    # takes the name of the part, and the value that ``begin`` returned
    end: Callable[[str, Any], Any]


class PartTimes(Instrument):
    """Instrument that times the parts that the program marks.

    Like a phase, a part is timed by two instants, which are read between steps.
    """

    name = "parts"
    stage = "measure"

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._thread = get_ident()
        self._spans: deque[_Span] = deque()  # spans that were not read yet
        # by the name of the part and the phase in which it began
        self._totals: dict[tuple[str, str], _Total] = {}
        self._steps = 0  # the number of steps that were read

    def start(self) -> None:
        """Time the program's parts from now on, in this thread."""
        self._thread = get_ident()
        self._undo.callback(time_parts, None)
        time_parts(
            _PartTimer(
                self.guard.wrap(self._present_instant), self.guard.wrap(self._note)
            )
        )

    def _present_instant(self) -> _Instant | None:
        """Return this moment; None in another thread, such as autograd's, in which checkpoints are recomputed."""
        if get_ident() != self._thread:
            return None
        stream = self._timeline.stream
        event = None if stream is None else stream.record()
        return _Instant(self._timeline.clock(), event)

    def _note(self, name: str, begin: _Instant | None) -> None:
        """Note the span of the part ``name``, which ends now."""
        end = self._present_instant()
        if begin is not None and end is not None:
            self._spans.append(_Span(name, begin, end))

    def keep(self, marks: StepMarks) -> None:
        """Add up the program's parts in the measured step with these ``marks``, which the device has reached.

        The phase of a part is that in which it began. A part that began before the step is left out.
        """
        self._steps += 1
        step_begin_ns, step_end_ns = marks.host_ns[0], marks.host_ns[-1]
        while self._spans and self._spans[0].begin.host_ns < step_end_ns:
            span = self._spans.popleft()
            code = OUTSIDE
            if span.begin.host_ns >= step_begin_ns:
                last_mark = bisect_right(marks.host_ns, span.begin.host_ns) - 1
                code = marks.codes[last_mark]
            self._add(span, code)

    def _add(self, span: _Span, code: int) -> None:
        """Add the time of ``span``, which began in the phase with this ``code``."""
        stream = self._timeline.stream
        seconds: float | None = (span.end.host_ns - span.begin.host_ns) * 1e-9
        if stream is not None:
            seconds = _seconds_on(stream, span)
        if code == OUTSIDE or seconds is None:
            return
        total = self._totals.setdefault((span.name, PARTS[code]), _Total())
        total.calls += 1
        total.seconds += seconds

    def result(self) -> Mapping[str, Any]:
        """Stop timing, and return the mean time and the mean number of calls of each part per step."""
        self.discard()
        parts = []
        for (name, phase), total in self._totals.items():
            parts.append(
                CodePart(
                    name=name,
                    phase=phase,
                    seconds=total.seconds / self._steps,
                    calls=total.calls / self._steps,
                )
            )
        return {"code_parts": parts}


def _seconds_on(stream: EventStream, span: _Span) -> float | None:
    """Return the seconds of ``span`` on the device, and release its events; None if they cannot be read."""
    begin_event = span.begin.event
    end_event = span.end.event
    seconds = stream.seconds(begin_event, end_event)
    stream.release((begin_event, end_event))
    return seconds

"""Reads tapes of a long run in chunks: steps whose marks have the same codes are computed together.

``TapeReading`` says what each mark means; it is asked once for each sequence of codes, since it takes tens of
microseconds a step, which a run that is watched for days would pay in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.measure.clocks.steps import END, StepMarks, TapeReading
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.record.quantities import PARTS, TIMED

_MOST_LAYOUTS = 512  # a loop whose marks never repeat must not fill the memory


class TimedSteps(NamedTuple):
    """The times of n finished steps, in their order.

    Attributes:
        begin_ns, end_ns: (n,) instants on the host's clock.
        host_s: (n, TIMED) seconds of each part and of the step on the host's clock.
        seconds: (n, TIMED) the same on the device's clock, NaN where it is unknown; ``host_s`` without a device.
    """

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    host_s: NDArray[np.float64]
    seconds: NDArray[np.float64]


class _Layout(NamedTuple):
    """What the marks of one sequence of codes mean: where the step's marks stand, their parts, and the state after."""

    marks: NDArray[np.intp]
    codes: list[int]
    parts: NDArray[np.float64]
    after: tuple[int, ...]


_Segment = tuple[_Layout, Sequence[Any]]


@dataclass(eq=False)
class ChunkReader:
    """Reads one tape, a chunk after the other."""

    stream: EventStream | None = None  # the device's clock of the timeline; None where there is only the host's
    _stack: tuple[int, ...] = tuple(TapeReading().stack)
    _rest: list[Any] = field(default_factory=list)
    _layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], _Layout | None] = field(default_factory=dict)
    _unread: deque[_Segment] = field(default_factory=deque)

    def read(self, tape: Sequence[Any], wait: bool = False) -> TimedSteps:
        """Return the steps that end in ``tape``, which alternates between codes and instants, as far as the device has
        reached their ends; those of earlier chunks first. With ``wait`` the device has done all that it was given."""
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
        """Return what ``codes`` up to the end of a step mean here; None where no step ran."""
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

    def _times(self, segments: Sequence[_Segment]) -> TimedSteps:
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

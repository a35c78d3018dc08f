"""Keeps each rank's phases and collectives, which show which rank waits for which.

On the CPU they come from the measured steps, on the host's clock. On GPUs, where the host only enqueues work, they come
from a stage after timing, with NCCL's own durations on the stream's clock.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.rank_timeline import (
    BACKWARD,
    Collective,
    Instants,
    RankTimeline,
    stream_instants_ns,
)
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import StepMarks
from lm_profiler.measure.collective_calls import (
    Arrivals,
    CollectiveCall,
    StreamWaits,
    most_reductions,
    read_timed_ring,
    reduces_in_backward,
    time_collectives,
)
from lm_profiler.record.quantities import count_text

# The most collectives whose arrivals a rank sends. At 25 bytes each, 1,024 ranks together send half a gigabyte.
MOST_CALLS = 20_000

# the share of the flight recorder's ring buffer that may fill up before it is read
_SHARE_UNTIL_READ = 0.75

STEPS = 6  # steps of the ``collectives`` stage

UNKNOWN_WAITS = "which rank waits for which is unknown"


@dataclass(eq=False)
class RanksWatch(Instrument):
    """Instrument that keeps the marks of the measured steps, and the calls in torch's flight recorder.

    The recorder is a ring buffer, so it is read between steps, before it overwrites entries that were not read.
    """

    arrivals: Arrivals | None  # reads the flight recorder; None if this torch has none
    rank: int  # the rank of this process
    # returns the module that trains, as its strategy wrapped it; called when the steps have ended
    wrapped_module: Callable[[], object] = lambda: None
    name: str = "who waits for whom"
    stage: ClassVar[str] = "measure"  # the stage whose steps it keeps
    _steps: list[int] = field(default_factory=list)
    _marks: list[StepMarks] = field(default_factory=list)
    _has_begun: bool = False
    _steps_at_read: int = 0  # steps that had ended when the recorder was last read
    _next_read: int = 1  # the step after which it is read again

    def begin(self, stage: str) -> None:
        if self.arrivals is not None and not self._has_begun:
            self._has_begun = True
            self.arrivals.read_ring()  # discards calls before the first step

    def read_if_due(self, steps: int) -> None:
        """Read the recorder if it could overflow before the next call; ``steps`` have ended, warm-up or measured."""
        if self.arrivals is None or steps < self._next_read:
            return
        new_entries = self.arrivals.read_ring()
        new_steps = max(steps - self._steps_at_read, 1)
        entries_per_step = max(new_entries / new_steps, 1e-3)
        # The rest of the ring is a reserve for steps with more calls, and for validation. It is not read more often,
        # because reading the whole ring takes some 15 ms.
        steps_until_read = int(
            self.arrivals.capacity * _SHARE_UNTIL_READ / entries_per_step
        )
        self._steps_at_read = steps
        self._next_read = steps + max(steps_until_read, 1)

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        """Keep the marks of a step of ``stage``."""
        if stage == self.stage:
            self._steps.append(step)
            self._marks.append(marks)

    def end(self, stage: str) -> None:
        """Keep the timeline of this rank, or report why it is unknown which rank waits for which."""
        if stage != self.stage or not self._marks:
            return
        if self.arrivals is not None:
            self._read_ring(self.arrivals)
        problem = self._problem_text()
        if problem is None and self.arrivals is not None:
            timeline = self._timeline(self.arrivals)
            if not self._calls_within_backward(timeline):
                self.facts["timelines"] = [timeline]
                return
            problem = "the module calls its own collectives during backward, which look the same as DDP's"
        is_own_problem = self.arrivals is not None and (
            self.arrivals.lost or self.arrivals.clock_was_set
        )
        if self.rank == 0 or is_own_problem:
            # rank 0 reports the problems that all ranks share
            self.guard.report(f"{UNKNOWN_WAITS}: {problem}")

    def _read_ring(self, arrivals: Arrivals) -> None:
        arrivals.read_ring()

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        return timeline_of(self.rank, self._steps, self._marks, arrivals)

    def _calls_within_backward(self, timeline: RankTimeline) -> bool:
        """Return whether the module makes its own calls in backward, more than DDP does.

        Of DDP's calls only the last is waited for.
        """
        most_calls_of_ddp = most_reductions(self.wrapped_module())
        if most_calls_of_ddp is None:
            return False
        # the index of the last mark before each call; -1 if there is none
        mark_of_call = (
            np.searchsorted(timeline.host_ns, timeline.arrivals_ns, "right") - 1
        )
        mark_of_call = mark_of_call[mark_of_call >= 0]
        is_in_backward = timeline.codes[mark_of_call] == BACKWARD
        calls_by_mark = np.bincount(mark_of_call[is_in_backward])
        most_calls = int(calls_by_mark.max(initial=0))
        return most_calls > most_calls_of_ddp

    def _problem_text(self) -> str | None:
        """Return why it is unknown which rank waits for which; None if the calls are known."""
        arrivals = self.arrivals
        if arrivals is None:
            return "this version of torch has no flight recorder"
        if arrivals.lost:
            capacity = count_text(arrivals.capacity, "call")
            return (
                f"a step makes more collective calls than torch's flight recorder keeps ({capacity}): "
                "increase TORCH_FR_BUFFER_SIZE"
            )
        if arrivals.clock_was_set:
            return "this machine's clock was adjusted while steps were measured"
        if arrivals.capacity == 0 or arrivals.newest_record < 0:
            # It lacks even the entry of DDP's first broadcast.
            return "torch's flight recorder is empty: set TORCH_FR_BUFFER_SIZE=2000; on GPUs only NCCL has a recorder"
        if not arrivals.at_ns or arrivals.at_ns[-1] < self._marks[0].host_ns[0]:
            return "torch's flight recorder has no collective of the measured steps"
        return None


def timeline_of(
    rank: int, steps: Sequence[int], marks: Sequence[StepMarks], arrivals: Arrivals
) -> RankTimeline:
    """Return what ``rank`` did in ``steps``, which have these ``marks``, and its arrivals at collectives.

    The last arrival before the steps is included. If there are more than ``MOST_CALLS`` arrivals, the first steps are
    left out.
    """
    arrivals_ns = np.array(arrivals.at_ns, dtype=np.int64)
    steps_begin_ns = [step_marks.host_ns[0] for step_marks in marks]
    steps_end_ns = marks[-1].host_ns[-1]
    calls_before_step = np.searchsorted(arrivals_ns, steps_begin_ns)
    calls_end = int(np.searchsorted(arrivals_ns, steps_end_ns, "right"))
    # the index of the first step from which on at most MOST_CALLS follow
    oldest_step = int(np.searchsorted(calls_before_step, calls_end - MOST_CALLS))
    oldest_step = min(oldest_step, len(marks) - 1)
    calls_begin = max(int(calls_before_step[oldest_step]) - 1, 0)

    mark_counts = [0]
    codes: list[int] = []
    host_ns: list[int] = []
    for step_marks in marks[oldest_step:]:
        mark_counts.append(len(step_marks.codes))
        codes.extend(step_marks.codes)
        host_ns.extend(step_marks.host_ns)
    collectives = []
    for call in arrivals.calls[calls_begin:calls_end]:
        # Interned, so that thousands of equal names are stored once.
        collectives.append(
            Collective(
                group=intern(call.group), number=call.number, name=intern(call.name)
            )
        )
    return RankTimeline(
        rank=rank,
        host=socket.gethostname(),
        steps=np.array(steps[oldest_step:], dtype=np.int64),
        first=np.cumsum(mark_counts, dtype=np.int64),
        codes=np.array(codes, dtype=np.uint8),
        host_ns=np.array(host_ns, dtype=np.int64),
        arrivals_ns=arrivals_ns[calls_begin:calls_end],
        collectives=collectives,
        clock=clock_name(),
    )


def clock_name() -> str:
    """Return the name of this process's monotonic clock. Containers of one machine that share it get the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Each time namespace may have its own offset (time_namespaces(7)).
        time_namespace = Path("/proc/self/ns/time").readlink()
    except OSError:
        return socket.gethostname()
    return f"{boot} {time_namespace}"


class _StreamWait(NamedTuple):
    """A wait of the computing stream."""

    launched_ns: int  # when the host enqueued it
    begin_ns: int  # the instant at which it began, on the stream's clock
    end_ns: int
    call: CollectiveCall  # the call that it counts as


class _ClockPairs(NamedTuple):
    """Instants that are known on both clocks, in the order of the host's clock."""

    host_ns: Instants
    stream_ns: Instants
    # for each instant: whether the rank works beside the calls that follow
    works_beside_calls: NDArray[np.bool_]


@dataclass(eq=False)
class StreamRanksWatch(RanksWatch):
    """Instrument that makes NCCL time its collectives in the ``collectives`` stage.

    The marks of a step on the stream are shifted so that the first one is at the host's first mark. The position of a
    collective on the stream is estimated from its call on the host: in the same part, and after the same share of the
    rank's own work there (``stream_instants_ns``). The duration of each collective is sent to rank 0 in the field for
    waiting, and ``with_waits`` turns it into waiting. A call on a stream other than the computing stream (FSDP)
    makes no rank wait, so the waits of the computing stream count instead.
    """

    stream: EventStream | None = None  # the device's clock
    waits: StreamWaits | None = None  # records the waits of the computing stream
    # for each step of ``_marks``, when the stream reached its marks
    _stream_marks_ns: list[list[int]] = field(default_factory=list)
    _stream_waits: list[_StreamWait] = field(default_factory=list)
    stage: ClassVar[str] = "collectives"

    def begin(self, stage: str) -> None:
        """In the ``collectives`` stage, have NCCL time its collectives, and note the computing stream's waits."""
        if stage != self.stage or self.arrivals is None:
            return
        time_collectives()
        self.arrivals.read_ring()
        if self.waits is not None:
            self._undo.callback(self.waits.stop)
            self.waits.start()

    def read_if_due(self, steps: int) -> None:
        """Do nothing: the ring buffer is read when the stage ends."""

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        """Keep the marks of a step on both clocks, and the stream's waits; keep nothing if a mark cannot be read."""
        if stage != self.stage or self.stream is None:
            return
        stream_ns = self._stream_instants_ns(self.stream, marks)
        if stream_ns is None:
            return
        super().keep(stage, step, marks)
        self._stream_marks_ns.append(stream_ns)
        self._stream_waits += self._waits_in(self.stream, step, marks, stream_ns[0])

    def end(self, stage: str) -> None:
        if stage == self.stage:
            self.discard()
        super().end(stage)

    def _stream_instants_ns(
        self, stream: EventStream, marks: StepMarks
    ) -> list[int] | None:
        """Return the step's marks on the stream; None if one of them cannot be read."""
        step_begin_ns = marks.host_ns[0]
        if self._stream_marks_ns:
            # The host may be ahead by more than a step, but a step begins on the stream only after the previous one.
            previous_end_ns = self._stream_marks_ns[-1][-1]
            step_begin_ns = max(step_begin_ns, previous_end_ns)
        instants_ns = [step_begin_ns]
        for event in marks.events[1:]:
            seconds = stream.seconds(marks.events[0], event)
            if seconds is None:
                return None
            instants_ns.append(step_begin_ns + round(seconds * 1e9))
        return instants_ns

    def _waits_in(
        self, stream: EventStream, step: int, marks: StepMarks, step_begin_ns: int
    ) -> list[_StreamWait]:
        """Return the computing stream's waits in ``step``; empty if one of them cannot be read."""
        if self.waits is None:
            return []
        stream_waits: list[_StreamWait] = []
        for wait in self.waits.waits:
            is_in_step = marks.host_ns[0] <= wait.at_ns < marks.host_ns[-1]
            if not is_in_step:
                continue
            begin_s = stream.seconds(marks.events[0], wait.begin)
            end_s = stream.seconds(marks.events[0], wait.end)
            if begin_s is None or end_s is None:
                return []
            begin_ns = step_begin_ns + round(begin_s * 1e9)
            end_ns = step_begin_ns + round(end_s * 1e9)
            call = CollectiveCall(
                group=f"streams, step {step}",
                number=len(stream_waits),
                name="wait_event",
                wall_ns=0,
                duration_ns=end_ns - begin_ns,
            )
            stream_waits.append(_StreamWait(wait.at_ns, begin_ns, end_ns, call))
        return stream_waits

    def _read_ring(self, arrivals: Arrivals) -> None:
        read_timed_ring(arrivals)

    def _with_stream_waits(self, arrivals: Arrivals) -> Arrivals:
        """Return ``arrivals`` with the computing stream's waits in place of calls on other streams.

        If no call is on another stream, the waits replace nothing, and are dropped.
        """
        calls = list(zip(arrivals.at_ns, arrivals.calls, strict=True))
        if self.waits is not None and self._stream_waits:
            calls = [
                (at_ns, call)
                for at_ns, call in calls
                if not self.waits.is_on_other_stream(at_ns)
            ]
        has_calls_on_other_streams = len(calls) < len(arrivals.calls)
        if not has_calls_on_other_streams:
            self._stream_waits.clear()
        calls += [(wait.launched_ns, wait.call) for wait in self._stream_waits]
        calls.sort(key=itemgetter(0))
        return replace(
            arrivals,
            at_ns=[at_ns for at_ns, _ in calls],
            calls=[call for _, call in calls],
        )

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        """Return the steps of this rank on the stream's clock: marks, and when the stream reached each collective."""
        arrivals = self._with_stream_waits(arrivals)
        timeline = timeline_of(self.rank, self._steps, self._marks, arrivals)
        durations_ns = self._durations_ns(arrivals, timeline.collectives)
        # the timeline may have only the last steps
        stream_marks = self._stream_marks_ns[-len(timeline.steps) :]
        stream_marks_ns = np.array([*chain.from_iterable(stream_marks)], dtype=np.int64)

        pairs = self._clock_pairs(timeline, stream_marks_ns)
        arrivals_ns = stream_instants_ns(
            called_ns=timeline.arrivals_ns,
            took_ns=np.maximum(durations_ns, 0),
            host_ns=pairs.host_ns,
            stream_ns=pairs.stream_ns,
            overlaps=pairs.works_beside_calls,
        )
        # Waits are measured, so only the order of the ranks' instants matters: each rank's begin at zero.
        zero_ns = stream_marks_ns[0]
        return replace(
            timeline,
            host_ns=stream_marks_ns - zero_ns,
            arrivals_ns=arrivals_ns - zero_ns,
            waited_ns=durations_ns,
        )

    def _clock_pairs(
        self, timeline: RankTimeline, stream_marks_ns: Instants
    ) -> _ClockPairs:
        """Return the instants of the marks, and of the start and the end of each of the stream's waits.

        ``timeline`` has the marks on the host's clock, and ``stream_marks_ns`` the same marks on the stream's.
        """
        host_ns = [timeline.host_ns]
        stream_ns = [stream_marks_ns]
        for wait in self._stream_waits:
            # The host enqueues the start and the end at once, which counts as 1 ns.
            host_ns.append(np.array([wait.launched_ns, wait.launched_ns + 1]))
            stream_ns.append(np.array([wait.begin_ns, wait.end_ns]))
        marks = len(timeline.codes)
        works_beside_calls = np.zeros(marks + 2 * len(self._stream_waits), dtype=bool)
        if reduces_in_backward(self.wrapped_module()):
            # gradients are reduced during backward, on a stream of their own
            works_beside_calls[:marks] = timeline.codes == BACKWARD
        all_host_ns = np.concatenate(host_ns)
        order = np.argsort(all_host_ns, kind="stable")
        return _ClockPairs(
            host_ns=all_host_ns[order],
            stream_ns=np.concatenate(stream_ns)[order],
            works_beside_calls=works_beside_calls[order],
        )

    def _durations_ns(
        self, arrivals: Arrivals, collectives: Sequence[Collective]
    ) -> Instants:
        """Return how long each of ``collectives`` took; -1 if that is unknown."""
        ns_of_call: dict[tuple[str, int], int] = {}
        for call in arrivals.calls:
            duration_ns = -1 if call.duration_ns is None else call.duration_ns
            ns_of_call[call.group, call.number] = duration_ns
        durations_ns = [
            ns_of_call[collective.group, collective.number]
            for collective in collectives
        ]
        return np.array(durations_ns, dtype=np.int64)

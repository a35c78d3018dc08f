"""Keeps each rank's phases and collectives, which show who waits for whom.

On the host's clock they are from the measured steps. On GPUs, where the host only enqueues, they are from a stage after
timing, with NCCL's own durations on the stream's clock.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import ClassVar, NamedTuple

import numpy as np

from lm_profiler.analysis.ranks.rank_timeline import BACKWARD, Collective, RankTimeline, comes_ns
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import StepMarks
from lm_profiler.measure.collective_calls import (
    Arrivals,
    CollectiveCall,
    StreamWaits,
    drain_timed,
    most_reductions,
    reduces_in_backward,
    time_collectives,
)
from lm_profiler.record.quantities import counted

# most collectives whose arrivals a rank sends, at 25 bytes each: 1,024 ranks then send half a gigabyte together
MOST_CALLS = 20_000

_FULL = 0.75  # share of the flight recorder's ring buffer that may fill up before it is read

STEPS = 6  # steps of the ``collectives`` stage

UNKNOWN_WAITS = "who waits for whom is unknown"


@dataclass(eq=False)
class RanksWatch(Instrument):
    """Instrument that keeps the marks of the measured steps, and the calls in torch's flight recorder.

    The recorder is a ring buffer, so it is read between steps, before it overwrites what was not read.
    """

    arrivals: Arrivals | None  # reads the flight recorder; None where this torch has none
    rank: int  # the rank of this process
    # returns the module that trains, as its strategy wrapped it; called when the steps are over
    wrapped: Callable[[], object] = lambda: None
    name: str = "who waits for whom"
    stage: ClassVar[str] = "measure"  # the stage whose steps it keeps
    _steps: list[int] = field(default_factory=list)
    _marks: list[StepMarks] = field(default_factory=list)
    _since: int | None = None
    _due: int = 1

    def begin(self, stage: str) -> None:
        if self.arrivals is not None and self._since is None:
            self._since = 0
            self.arrivals.drain()  # calls before the first step belong to none

    def look(self, steps: int) -> None:
        """Read the recorder where it could overflow before the next look; ``steps`` have ended, warm-up or measured."""
        if self.arrivals is None or steps < self._due:
            return
        fresh = self.arrivals.drain()
        a_step = max(fresh / max(steps - (self._since or 0), 1), 1e-3)
        # The rest is left for steps with more calls, and for validation. Reading the whole ring takes some 15 ms.
        self._since, self._due = steps, steps + max(int(self.arrivals.capacity * _FULL / a_step), 1)

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        """Keep the marks of a step of ``stage``."""
        if stage == self.stage:
            self._steps.append(step)
            self._marks.append(marks)

    def end(self, stage: str) -> None:
        if stage != self.stage or not self._marks:
            return
        if self.arrivals is not None:
            self._drain(self.arrivals)
        why_not = self._why_not()
        if why_not is None and self.arrivals is not None:
            timeline = self._timeline(self.arrivals)
            if not self._calls_amid_backward(timeline):
                self.facts["timelines"] = [timeline]
                return
            why_not = "the module calls its own collectives during backward, which look the same as DDP's"
        if self.rank == 0 or (self.arrivals is not None and (self.arrivals.lost or self.arrivals.clock_was_set)):
            self.part.tell(f"{UNKNOWN_WAITS}: {why_not}")  # rank 0 reports the reasons that all ranks share

    def _drain(self, arrivals: Arrivals) -> None:
        arrivals.drain()

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        return timeline_of(self.rank, self._steps, self._marks, arrivals)

    def _calls_amid_backward(self, timeline: RankTimeline) -> bool:
        """Return whether a backward has more calls than DDP makes, whose last call alone is waited for."""
        most = most_reductions(self.wrapped())
        mark = np.searchsorted(timeline.host_ns, timeline.arrivals_ns, "right") - 1
        amid = mark[(mark >= 0) & (timeline.codes[mark] == BACKWARD)]
        return most is not None and int(np.bincount(amid).max(initial=0)) > most

    def _why_not(self) -> str | None:
        arrivals = self.arrivals
        if arrivals is None:
            return "this torch has no flight recorder"
        if arrivals.lost:
            holds = counted(arrivals.capacity, "call")
            return f"a step makes more than the {holds} that torch's recorder holds: set TORCH_FR_BUFFER_SIZE to more"
        if arrivals.clock_was_set:
            return "this machine's clock was set while steps were measured"
        if arrivals.capacity == 0 or arrivals.newest_record < 0:  # no entry at all, not even of DDP's first broadcast
            return "torch's flight recorder is empty: TORCH_FR_BUFFER_SIZE=2000 switches it on; on GPUs it is NCCL's"
        if not arrivals.at_ns or arrivals.at_ns[-1] < self._marks[0].host_ns[0]:
            return "torch's flight recorder has no collective of the measured steps"
        return None


def timeline_of(rank: int, steps: Sequence[int], marks: Sequence[StepMarks], arrivals: Arrivals) -> RankTimeline:
    """Return what ``rank`` did in ``steps``, with its ``arrivals`` from the last one before; of many steps the last."""
    at_ns = np.array(arrivals.at_ns, dtype=np.int64)
    until = int(np.searchsorted(at_ns, marks[-1].host_ns[-1], "right"))
    before = np.searchsorted(at_ns, [each.host_ns[0] for each in marks])
    few = min(int(np.searchsorted(before, until - MOST_CALLS)), len(marks) - 1)
    since, marks = max(int(before[few]) - 1, 0), marks[few:]
    return RankTimeline(
        rank,
        socket.gethostname(),
        np.array(steps[few:], dtype=np.int64),
        np.cumsum([0, *(len(each.codes) for each in marks)], dtype=np.int64),
        np.array([code for each in marks for code in each.codes], dtype=np.uint8),
        np.array([at for each in marks for at in each.host_ns], dtype=np.int64),
        at_ns[since:until],
        # Names are interned, so that thousands of equal names are one string.
        [Collective(intern(call.group), call.number, intern(call.name)) for call in arrivals.calls[since:until]],
        clock_id(),
    )


def clock_id() -> str:
    """Return the name of this process's monotonic clock; the same clock has the same name in other containers too."""
    with suppress(OSError):
        # A time namespace may have its own offset (time_namespaces(7)).
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/time').readlink()}"
    return socket.gethostname()


class _StreamWait(NamedTuple):
    """A wait of the computing stream: when the host asked for it, its span, and the call that it counts as."""

    at_ns: int
    since_ns: int
    until_ns: int
    call: CollectiveCall


@dataclass(eq=False)
class StreamRanksWatch(RanksWatch):
    """Instrument that has NCCL time its collectives in the ``collectives`` stage.

    The marks of a step on the stream are placed so that the first one is at the host's first mark. A collective is
    placed on the stream as its call lies among the host's marks: in the same part, and as far into the rank's own work
    there (``comes_ns``). The duration of each collective goes to rank 0 in the field for waiting, until ``with_waits``
    turns it into waiting. A call on another stream than the computing one (FSDP) makes nobody wait: the waits of
    the computing stream take its place.
    """

    stream: EventStream | None = None  # the device's clock
    waits: StreamWaits | None = None  # records the waits of the computing stream
    _on_stream: list[StepMarks] = field(default_factory=list)
    _stood: list[_StreamWait] = field(default_factory=list)
    stage: ClassVar[str] = "collectives"

    def begin(self, stage: str) -> None:
        if stage == self.stage and self.arrivals is not None:
            time_collectives()
            self.arrivals.drain()
            if self.waits is not None:
                self._undo.callback(self.waits.stop)
                self.waits.start()

    def look(self, steps: int) -> None:
        """Do nothing: the ring buffer is read when the stage is over."""

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        if stage == self.stage and self.stream is not None:
            on_stream = self._on_stream_ns(self.stream, marks)
            if on_stream is not None:
                super().keep(stage, step, marks)
                self._on_stream.append(replace(marks, host_ns=on_stream, instants=[]))
                self._stood += self._waits_in(self.stream, step, marks, on_stream[0])

    def end(self, stage: str) -> None:
        if stage == self.stage:
            self.discard()
        super().end(stage)

    def _on_stream_ns(self, stream: EventStream, marks: StepMarks) -> list[int] | None:
        """Return the step's marks on the stream; None where one of them cannot be read."""
        since = [stream.seconds(marks.instants[0], instant) for instant in marks.instants[1:]]
        known = [round(seconds * 1e9) for seconds in since if seconds is not None]
        # The host may be ahead by more than a step: a step cannot begin before the last one ended on the stream.
        begins = max(marks.host_ns[0], self._on_stream[-1].host_ns[-1] if self._on_stream else 0)
        return [begins + ns for ns in (0, *known)] if len(known) == len(since) else None

    def _waits_in(self, stream: EventStream, step: int, marks: StepMarks, begins: int) -> list[_StreamWait]:
        """Return the computing stream's waits in ``step``, which begins at ``begins``; empty if one is unreadable."""
        stood = list[_StreamWait]()
        for stand in [] if self.waits is None else self.waits.stands:
            if not marks.host_ns[0] <= stand.at_ns < marks.host_ns[-1]:
                continue
            since, until = (stream.seconds(marks.instants[0], at) for at in (stand.begin, stand.end))
            if since is None or until is None:
                return []
            since_ns, until_ns = begins + round(since * 1e9), begins + round(until * 1e9)
            call = CollectiveCall(f"streams, step {step}", len(stood), "wait_event", 0, until_ns - since_ns)
            stood.append(_StreamWait(stand.at_ns, since_ns, until_ns, call))
        return stood

    def _drain(self, arrivals: Arrivals) -> None:
        drain_timed(arrivals)

    def _with_stream_waits(self, arrivals: Arrivals) -> Arrivals:
        """Return ``arrivals`` with the computing stream's waits in place of calls on other streams."""
        calls = list(zip(arrivals.at_ns, arrivals.calls, strict=True))
        if self.waits is not None and self._stood:
            calls = [(at_ns, call) for at_ns, call in calls if not self.waits.is_on_other_stream(at_ns)]
        if len(calls) == len(arrivals.calls):
            self._stood.clear()
        calls = sorted(calls + [(each.at_ns, each.call) for each in self._stood], key=lambda each: each[0])
        return replace(arrivals, at_ns=[at_ns for at_ns, _ in calls], calls=[call for _, call in calls])

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        arrivals = self._with_stream_waits(arrivals)
        on_host = timeline_of(self.rank, self._steps, self._marks, arrivals)
        on_stream = timeline_of(self.rank, self._steps, self._on_stream, arrivals)
        took = {(c.group, c.number): -1 if c.duration_ns is None else c.duration_ns for c in arrivals.calls}
        took_ns = np.array([took[c.group, c.number] for c in on_host.collectives], dtype=np.int64)
        # Gradients that are reduced during backward have their own stream.
        behind = reduces_in_backward(self.wrapped()) & (on_host.codes == BACKWARD)
        # Instants that are known on both clocks: the marks, and the waits of the stream.
        host_ns = np.concatenate([on_host.host_ns, *([each.at_ns, each.at_ns + 1] for each in self._stood)])
        stream_ns = np.concatenate([on_stream.host_ns, *([each.since_ns, each.until_ns] for each in self._stood)])
        behind = np.concatenate([behind, np.zeros(2 * len(self._stood), dtype=bool)])
        order = np.argsort(host_ns, kind="stable")
        calls_ns, took_there = on_host.arrivals_ns, np.maximum(took_ns, 0)
        comes = comes_ns(calls_ns, took_there, host_ns[order], stream_ns[order], behind[order])
        zero = on_stream.host_ns[0]  # waits are measured, so the ranks' instants need only an order
        return replace(on_host, host_ns=on_stream.host_ns - zero, arrivals_ns=comes - zero, waited_ns=took_ns)

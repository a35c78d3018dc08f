"""Finds who waits for whom on GPUs from NCCL's own durations, in the stage after timing, on the stream's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch.distributed

from lm_profiler.analysis.ranks.on_stream import comes_ns
from lm_profiler.analysis.ranks.rank_timeline import BACKWARD, RankTimeline
from lm_profiler.callbacks.instruments.communication import STEPS
from lm_profiler.callbacks.instruments.ranks import RanksWatch, timeline_of
from lm_profiler.measure.clocks.steps import StepMarks
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.collectives.durations import drain_timed, time_collectives
from lm_profiler.measure.collectives.recorder import Arrivals, CollectiveCall
from lm_profiler.measure.collectives.reducer import reduces_in_backward
from lm_profiler.measure.collectives.streams import StreamWaits


class _StreamWait(NamedTuple):
    """A wait of the computing stream: when the host asked for it, its span, and the call that it counts as."""

    at_ns: int
    since_ns: int
    until_ns: int
    group: str
    number: int

    @property
    def call(self) -> CollectiveCall:
        return CollectiveCall(self.group, self.number, "wait_event", 0, self.until_ns - self.since_ns)


@dataclass(eq=False)
class StreamRanksWatch(RanksWatch):
    """Instrument that has NCCL time its collectives in the first steps of the ``collectives`` stage.

    The marks of a step on the stream are placed so that the first one is at the host's first mark. A collective is
    placed on the stream as its call lies among the host's marks: in the same part, and as far into the rank's own work
    there (``on_stream``). The duration of each collective goes to rank 0 in the field for waiting, until
    ``on_stream.with_waits`` turns it into that. A call on another stream than the computing one (FSDP) makes nobody
    wait by itself: the waits of the computing stream take its place.
    """

    stream: EventStream | None = None  # the device's clock
    waits: StreamWaits | None = None  # records the waits of the computing stream
    # returns the backend over which the ranks talk
    backend: Callable[[], str] = lambda: torch.distributed.get_backend()  # which a torch without ranks lacks
    _on_stream: list[StepMarks] = field(default_factory=list)
    _stood: list[_StreamWait] = field(default_factory=list)
    stage: ClassVar[str] = "collectives"

    def begin(self, stage: str) -> None:
        if stage == self.stage and self.arrivals is not None:
            time_collectives()
            self.arrivals.drain()
            if self.waits is not None:
                self.waits.start()

    def look(self, steps: int) -> None:
        """Do nothing: the ring buffer is read when the stage is over."""

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        if stage != self.stage or len(self._marks) == STEPS:
            return
        on_stream = self._stream_ns(marks)
        if on_stream is not None:
            super().keep(stage, step, marks)
            self._on_stream.append(replace(marks, host_ns=on_stream, instants=[]))
            self._stood += self._waits_in(step, marks, on_stream[0])
        if len(self._marks) == STEPS:
            self.discard()

    def end(self, stage: str) -> None:
        if stage == self.stage:
            self.discard()
        super().end(stage)

    def discard(self) -> None:
        if self.waits is not None:
            self.waits.stop()

    def _stream_ns(self, marks: StepMarks) -> list[int] | None:
        """Return the step's marks on the stream in nanoseconds; None where one of them cannot be read."""
        if self.stream is None:
            return None
        since = [self.stream.seconds(marks.instants[0], instant) for instant in marks.instants[1:]]
        known = [round(seconds * 1e9) for seconds in since if seconds is not None]
        # The host may be ahead by more than a step: a step cannot begin before the last one ended on the stream.
        begins = max(marks.host_ns[0], self._on_stream[-1].host_ns[-1] if self._on_stream else 0)
        return [begins + ns for ns in (0, *known)] if len(known) == len(since) else None

    def _why_not(self) -> str | None:
        if self.arrivals is not None and self.arrivals.last < 0 and (talk := self.backend()) != "nccl":
            return f"on a GPU only NCCL times its collectives, and these ranks talk over {talk}"
        return super()._why_not()

    def _drain(self, arrivals: Arrivals) -> None:
        drain_timed(arrivals)

    def _waits_in(self, step: int, marks: StepMarks, begins: int) -> list[_StreamWait]:
        """Return the computing stream's waits in ``step``, which begins at ``begins``; none if one is unreadable."""
        if self.stream is None or self.waits is None:
            return []
        within = [each for each in self.waits.stands if marks.host_ns[0] <= each.at_ns < marks.host_ns[-1]]
        stood = []
        for number, stand in enumerate(within):
            since, until = (self.stream.seconds(marks.instants[0], at) for at in (stand.since, stand.until))
            if since is None or until is None:
                return []
            since_ns, until_ns = begins + round(since * 1e9), begins + round(until * 1e9)
            stood.append(_StreamWait(stand.at_ns, since_ns, until_ns, f"streams, step {step}", number))
        return stood

    def _with_stream_waits(self, arrivals: Arrivals) -> Arrivals:
        """Return ``arrivals`` with the computing stream's waits in the place of calls on other streams."""
        everything = zip(arrivals.at_ns, arrivals.calls, strict=True)
        calls = [(at_ns, call) for at_ns, call in everything if not self._on_other_stream(at_ns)]
        if len(calls) == len(arrivals.calls):
            self._stood.clear()
        calls = sorted(calls + [(each.at_ns, each.call) for each in self._stood], key=lambda each: each[0])
        return replace(arrivals, at_ns=[at_ns for at_ns, _ in calls], calls=[call for _, call in calls])

    def _on_other_stream(self, at_ns: int) -> bool:
        return self.waits is not None and bool(self._stood) and self.waits.beside(at_ns)

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        arrivals = self._with_stream_waits(arrivals)
        on_host = timeline_of(self.rank, self._steps, self._marks, arrivals)
        on_stream = timeline_of(self.rank, self._steps, self._on_stream, arrivals)
        calls = on_host.arrivals_ns
        took = {(c.group, c.number): -1 if c.duration_ns is None else c.duration_ns for c in arrivals.calls}
        took_ns = np.array([took[c.group, c.number] for c in on_host.collectives], dtype=np.int64)
        # What is reduced while backward goes on has a stream of its own.
        reduced = reduces_in_backward(self.wrapped())
        behind = reduced & (on_host.codes == BACKWARD)
        # Instants that are known on both clocks: the marks, and the waits of the stream.
        host_ns = np.concatenate([on_host.host_ns, *([each.at_ns, each.at_ns + 1] for each in self._stood)])
        stream_ns = np.concatenate([on_stream.host_ns, *([each.since_ns, each.until_ns] for each in self._stood)])
        behind = np.concatenate([behind, np.zeros(2 * len(self._stood), dtype=bool)])
        order = np.argsort(host_ns, kind="stable")
        comes = comes_ns(calls, np.maximum(took_ns, 0), host_ns[order], stream_ns[order], behind[order])
        return replace(on_host, host_ns=on_stream.host_ns, arrivals_ns=comes, waited_ns=took_ns)

"""Who waits for whom on GPUs: from NCCL's own durations, in the stage after timing, on the stream's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.analysis.ranks.on_stream import comes_ns
from lm_profiler.analysis.ranks.timeline import RankTimeline
from lm_profiler.analysis.ranks.track import BACKWARD
from lm_profiler.callbacks.instruments.communication import STEPS
from lm_profiler.callbacks.instruments.ranks import RanksWatch, timeline_of
from lm_profiler.measure.clocks.steps import StepMarks
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.collectives.durations import drain_timed, time_collectives
from lm_profiler.measure.collectives.recorder import Arrivals


@dataclass(eq=False)
class StreamRanksWatch(RanksWatch):
    """An instrument: has NCCL time its collectives in the first steps of the ``collectives`` stage.

    Of a step, the stream's marks stand where the host's first one does. A collective stands on the stream where its
    call stands among the host's marks: in the same part, as far into the rank's own work there (``on_stream``). How
    long each took goes to rank 0 in place of what was waited (``durations.with_waits``).

    Args:
        stream: the device's clock.
        backend: over which the ranks talk.
    """

    stream: EventStream | None = None
    backend: Callable[[], str] = lambda: torch.distributed.get_backend()  # which a torch without ranks lacks
    _on_stream: list[StepMarks] = field(default_factory=list)
    stage: ClassVar[str] = "collectives"

    def begin(self, stage: str) -> None:
        if stage == self.stage and self.arrivals is not None:
            time_collectives()
            self.arrivals.drain()

    def look(self, steps: int) -> None:
        """Nothing: the ring is read when the stage is over."""

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        if stage != self.stage or len(self._marks) == STEPS:
            return
        on_stream = self._stream_ns(marks)
        if on_stream is not None:
            super().keep(stage, step, marks)
            self._on_stream.append(replace(marks, host_ns=on_stream, instants=[]))

    def _stream_ns(self, marks: StepMarks) -> list[int] | None:
        """None where one of the instants cannot be read."""
        if self.stream is None:
            return None
        since = [self.stream.seconds(marks.instants[0], instant) for instant in marks.instants[1:]]
        known = [round(seconds * 1e9) for seconds in since if seconds is not None]
        # The host may be ahead by more than a step.
        begins = max(marks.host_ns[0], self._on_stream[-1].host_ns[-1] if self._on_stream else 0)
        return [begins + ns for ns in (0, *known)] if len(known) == len(since) else None

    def _why_not(self) -> str | None:
        if self.arrivals is not None and self.arrivals.last < 0 and (talk := self.backend()) != "nccl":
            return f"on a GPU only NCCL times its collectives, and these ranks talk over {talk}"
        return super()._why_not()

    def _drain(self, arrivals: Arrivals) -> None:
        drain_timed(arrivals)

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        on_host = timeline_of(self.rank, self._steps, self._marks, arrivals)
        on_stream = timeline_of(self.rank, self._steps, self._on_stream, arrivals)
        calls = on_host.arrivals_ns
        took = {(c.group, c.number): -1 if c.duration_ns is None else c.duration_ns for c in arrivals.calls}
        took_ns = np.array([took[c.group, c.number] for c in on_host.collectives], dtype=np.int64)
        reduced = isinstance(self.wrapped(), DistributedDataParallel)  # while backward goes on
        behind = reduced & (on_host.codes == BACKWARD)
        return replace(
            on_host,
            host_ns=on_stream.host_ns,
            arrivals_ns=comes_ns(calls, np.maximum(took_ns, 0), on_host.host_ns, on_stream.host_ns, behind),
            waited_ns=took_ns,
        )

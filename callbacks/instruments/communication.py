"""The ``collectives`` stage: DDP's own timings of its communication, in a few steps after the measured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lm_profiler.analysis.ranks.reducer import ReducerTimes
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collectives.reducer import ReducerTimer

STEPS = 6
"""The last of them is told of by the one that follows: it tells of no step itself."""


@dataclass(eq=False)
class CommunicationWatch:
    """An instrument: samples DDP's reducer.

    Args:
        timeline: whose marks say where a step begins.
        rank: of this process.
        wrapped: what trains, asked for when the stage begins.
    """

    timeline: Timeline
    rank: int
    wrapped: Callable[[], object]
    part: Guard = UNGUARDED
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = "collectives"
    _timer: ReducerTimer | None = None
    _observer: Callable[[int], None] | None = None

    def begin(self, stage: str) -> None:
        wrapped = self.wrapped() if stage == "collectives" else None
        if not isinstance(wrapped, DistributedDataParallel):
            return
        self._timer = ReducerTimer(wrapped)
        self._timer.start()
        self._observer = self.part.guard(self._mark)
        self.timeline.observers += (self._observer,)

    def _mark(self, code: int) -> None:
        if self._timer is not None and len(self.timeline.reading().step.codes) == 1:
            self._timer.read()

    def end(self, stage: str) -> None:
        if stage != "collectives" or (timer := self._timer) is None:
            return
        timer.read()
        self.discard()
        exposed_s = {each.backward: each.communication_s - each.hidden_s for each in timer.readings}
        self.facts["reducers"] = [ReducerTimes(self.rank, exposed_s)]

    def discard(self) -> None:
        if self._observer is not None:
            self.timeline.unobserve(self._observer)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self._observer = None

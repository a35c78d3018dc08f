"""The ``collectives`` stage: DDP's own timings of its communication, in a few steps after the measured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lm_profiler.analysis.ranks.rank_timeline import ReducerTimes
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collectives.reducer import ReducerTimer

STEPS = 6  # Steps for each kind of reading in the stage. The reducer reports a step only once the next one has begun.


def steps_of_stage(device_type: str, ddp: bool) -> int:
    """Return how many steps the ``collectives`` stage has: first those for NCCL's durations, then those for DDP's
    reducer.

    Reading the reducer waits for the device, which would disturb the former.
    """
    return STEPS * (device_type == "cuda") + STEPS * ddp


@dataclass(eq=False)
class CommunicationWatch(Instrument):
    """Instrument that reads the timings of DDP's reducer in each step of the ``collectives`` stage."""

    timeline: Timeline  # its marks tell where a step begins
    rank: int  # this process's
    # returns the module that trains, as its strategy wrapped it; called when the stage begins
    wrapped: Callable[[], object]
    after: int = 0  # steps at the beginning of the stage that other instruments need undisturbed
    part: Guard = UNGUARDED
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = "collectives"
    _timer: ReducerTimer | None = None
    _step: int = 0
    _observer: Callable[[int], None] | None = None

    def begin(self, stage: str) -> None:
        wrapped = self.wrapped() if stage == "collectives" else None
        if not isinstance(wrapped, DistributedDataParallel):
            return
        self._timer, self._step = ReducerTimer(wrapped), 0
        self._observer = self.part.guard(self._mark)
        self.timeline.observers += (self._observer,)

    def _mark(self, code: int) -> None:
        if self._timer is None or len(self.timeline.reading().step.codes) != 1:  # not the first mark of a step
            return
        self._step += 1
        if self._step == self.after + 1:
            self._timer.start()
        elif self._step > self.after:
            self._timer.read()

    def end(self, stage: str) -> None:
        if stage != "collectives" or (timer := self._timer) is None:
            return
        if self._step > self.after:
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

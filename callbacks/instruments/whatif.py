"""Finds what a delay in one place costs the step, by an experiment in a stage of its own, after timing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lm_profiler.analysis.why.slack_model import LEVELS, DelayBlock, Experiment, plan, steps_needed
from lm_profiler.callbacks.instruments.delayed_loader import DelayedLoader
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.delays.device import DeviceDelays
from lm_profiler.record.quantities import counted
from lm_profiler.usage_error import expect

# the mark at which a place is delayed; any other is delayed where forward begins
_MARKS = {"data": at.DATA, "forward": at.FORWARD, "backward": at.BACKWARD, "optimizer": at.OPTIMIZER}

_ONCE_A_STEP = ("optimizer",)  # places that occur once a step, and not once a batch


@dataclass(frozen=True, kw_only=True)
class WhatIfOptions:
    """What a delay in one place costs the step, and so what a faster one would save.

    Args:
        steps: Steps after the measured ones in which one place at a time is delayed, by up to 60 % of a step: 210 are
            enough without workers in the loader, 410 with two of them. They take about a third longer. 0 for none.
    """

    steps: int = 0

    def __post_init__(self) -> None:
        expect(self.steps >= 0, "whatif.steps", "0 or more", self.steps)


@dataclass(frozen=True)
class Delayable:
    """The places that can be delayed, and how many steps a block needs to settle.

    ``workers`` is how many of the loader's are delayed; ``why_not`` says why the loader is left alone.
    """

    places: Sequence[str]
    settle: int
    workers: int
    why_not: str | None = None

    @classmethod
    def of(cls, loader: DelayedLoader, held_s: float, batches: int, host: Sequence[str], device: bool) -> Delayable:
        """Return what can be delayed.

        Args:
            loader: the run's.
            held_s: seconds that the loader's workers would be held at most.
            batches: batches of a step.
            host: places on the host.
            device: whether the device can be delayed too.
        """
        why_not = loader.why_not(held_s)
        workers = 0 if why_not is not None or loader.delays is None else loader.delays.workers
        of_loader = ["loader"] if workers else ["data"] * (why_not is None)
        settle = 1 + math.ceil((loader.ahead + workers + 1) / batches)
        return cls([*of_loader, *host, *["device"] * device], settle, workers, why_not)

    def too_few(self, steps: int) -> str | None:
        """Return why ``steps`` are not enough; None where they are."""
        if steps >= (least := steps_needed(self.places, self.settle, self.workers)):
            return None
        with_loader = f"a loader with {counted(self.workers, 'worker')}" if self.workers else "a loader without workers"
        return f"expected {least:,} steps or more with {with_loader}, given {steps:,}"


@dataclass(eq=False)
class WhatIf:
    """Delays one place at a time, as planned, and says how long each delay really was.

    On the host it sleeps at a phase's first mark of each batch, in the ``whatif`` stage alone.
    """

    options: WhatIfOptions  # how many steps there are
    timeline: Timeline  # its marks tell where the loop is
    stream: EventStream | None  # the device's stream, where that can be delayed; else None
    loader: DelayedLoader | None  # the loader whose workers are delayed; None where no delays were asked for
    batches: int  # batches of a step
    host: Sequence[str]  # places on the host where the verb can be delayed
    step_s: Callable[[], Sequence[float]]  # returns the seconds of the measured steps
    sleep: Callable[[float], object] = time.sleep  # lets time go by on the timeline's clock
    part: Guard = UNGUARDED
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = "whatif"
    _observer: Callable[[int], None] | None = None
    _blocks: Sequence[DelayBlock] = ()
    _device: DeviceDelays | None = None

    def begin(self, stage: str) -> None:
        if stage != "whatif" or self.loader is None:
            return
        self._median_s = median(self.step_s())
        self._ahead = self.loader.ahead
        what = Delayable.of(self.loader, self._hold_s(max(LEVELS)), self.batches, self.host, self.stream is not None)
        if what.why_not is not None:
            self.part.tell(f"whatif: the loader is not delayed: {what.why_not}")
        self._of_loader = None if what.why_not is not None else self.loader.delays
        if (why := what.too_few(self.options.steps)) is not None:  # loaders may have changed since the run began
            self.part.leave_out(why)
            return
        self._blocks = plan(what.places, self.options.steps, what.settle, what.workers)
        if self.stream is not None:
            self._device = DeviceDelays(self.stream)
        self._delays_s = [0.0] * len(self._blocks)
        self._step, self._at, self._due, self._before = -1, -1, False, (0.0, 0)
        self._observer = self.part.guard(self._mark)
        self.timeline.observers += (self._observer,)

    def end(self, stage: str) -> None:
        if stage != "whatif" or self._observer is None:
            return
        self._close()
        if self._device is not None:
            for at_work, seconds in self._device.taken():
                self._delays_s[at_work] += seconds
        workers = 0 if self._of_loader is None else self._of_loader.workers
        self.discard()
        a_step = [
            taken_s / (block.end - block.kept) for block, taken_s in zip(self._blocks, self._delays_s, strict=True)
        ]
        self.facts["experiment"] = Experiment(self._blocks, a_step, workers)

    def discard(self) -> None:
        if self._observer is not None:
            self.timeline.unobserve(self._observer)
            self._observer = None
        if self.loader is not None:
            if (workers := self.loader.delays) is not None:
                workers.say(0.0)
            self.loader.restore()

    def _hold_s(self, level: float) -> float:
        """Return the seconds that it takes at most until the loop has taken all prefetched batches."""
        return self._ahead / self.batches * self._median_s * (1 + level)

    @property
    def _block(self) -> DelayBlock | None:
        return self._blocks[self._at] if 0 <= self._at < len(self._blocks) else None

    def _mark(self, code: int) -> None:
        """Delay the block's place where ``code`` is its first mark in this step, or in this batch of it."""
        if len(self.timeline.reading().step.codes) == 1:
            self._begin_step()
        block = self._block
        if block is None or block.place is None or block.place == "loader":
            return
        if code == at.DATA:
            self._due = True
        if self._due and code == _MARKS.get(block.place, at.FORWARD):
            self._due = False
            self._delay(block)

    def _delay(self, block: DelayBlock) -> None:
        counts = self._step >= block.kept
        delay_s = block.level * self._median_s / (1 if block.place in _ONCE_A_STEP else self.batches)
        if block.place == "device" and self._device is not None:
            self._device.take(delay_s, self._at if counts else None)
            return
        began = self.timeline.clock()
        self.sleep(delay_s)
        if counts:
            self._delays_s[self._at] += (self.timeline.clock() - began) * 1e-9

    def _begin_step(self) -> None:
        self._step += 1
        block = self._block
        if block is not None and self._step == block.kept and self._of_loader is not None:
            self._before = self._of_loader.taken()
        if block is None or self._step == block.end:
            self._close()
            self._at = min(self._at + 1, len(self._blocks))
            self._open()

    def _open(self) -> None:
        """Begin the next block with nothing in stock: no prefetched batches, and no work queued for the device."""
        block = self._block
        if self._device is not None:
            self._device.settle()
        if self._of_loader is not None:
            level = 0.0 if block is None else block.level
            delayed = block is not None and block.place == "loader"
            in_worker_s = level * self._median_s * self._of_loader.workers / self.batches
            hold_s = 0.0 if block is None else self._hold_s(0.0 if delayed else level)
            self._of_loader.say(in_worker_s if delayed else 0.0, hold_s)

    def _close(self) -> None:
        """Note how long the loader was delayed in the block that ends.

        Workers deliver in turns, so a step is delayed by their mean delay of a batch divided by their number.
        """
        block = self._block
        if block is None or block.place != "loader" or self._of_loader is None:
            return
        seconds, batches = (now - before for now, before in zip(self._of_loader.taken(), self._before, strict=True))
        a_step_s = seconds / batches * self.batches / self._of_loader.workers if batches else 0.0
        self._delays_s[self._at] = a_step_s * (block.end - block.kept)

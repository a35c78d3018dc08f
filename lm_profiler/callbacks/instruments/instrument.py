"""The interface of an instrument, and the results of a rank's instruments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from lm_profiler.analysis.evidence import Evidence
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.traffic import StepTraffic
from lm_profiler.measure.device.contention import CpuUse
from lm_profiler.record.run_record import Flops


@dataclass(frozen=True)
class SeenFlops:
    """FLOPs of all steps of the ``memory`` stage together."""

    flops: Flops | None = None
    # why FLOPs are unknown; None if they are known, or if no step of that stage ran
    unknown: str | None = None
    # whether the step is compiled, so that FLOPs have to be counted on a copy
    compiled: bool = False
    # FLOPs of one rank, by the kind of work and the dtype of the factors
    by_dtype: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured(Evidence):
    """The measurements of one rank, or of all ranks merged: evidence without the facts about Trainer and machine."""

    traffic: StepTraffic | None = None  # bytes that a step of the memory stage moved
    cpu_uses: Sequence[CpuUse] = ()  # CPU use on each rank that can read it
    seen_flops: SeenFlops = field(default_factory=SeenFlops)


class Instrument:
    """Measures something in one stage of a run, and keeps the results in ``facts``, by the fields of ``Measured``.

    ``begin`` and ``end`` are called at every change of stage, between steps. If one of them raises, the instrument is
    disabled: only ``discard`` is called. ``guard`` guards the functions that training calls during a step.
    """

    name: str = ""
    stage: ClassVar[str] = ""
    guard: Guard = UNGUARDED

    @cached_property
    def facts(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _undo(self) -> ExitStack:
        return ExitStack()

    def begin(self, stage: str) -> None:
        """Begin the work of ``stage``, which starts with the next step."""
        if stage == self.stage:
            self.start()

    def end(self, stage: str) -> None:
        """End the work of ``stage``; at the end of ``measure``, the device has done all its work too."""
        if stage == self.stage:
            self.facts.update(self.result())

    def start(self) -> None:
        """Begin to measure: the stage ``stage`` begins."""

    def result(self) -> Mapping[str, Any]:
        """Stop measuring, because the stage ends, and return the facts."""
        return {}

    def discard(self) -> None:
        """Stop without a result, and restore what was changed in training."""
        self._undo.close()

    def observe(self, timeline: Timeline, *observers: Callable[[int], object]) -> None:
        """Call ``observers`` at each mark until the instrument is discarded."""
        guarded_observers = []
        for observer in observers:
            guarded_observers.append(self.guard.wrap(observer))
        self._undo.callback(timeline.unobserve, *guarded_observers)
        timeline.observers += tuple(guarded_observers)


class Watch(Instrument):
    """Instrument of one stage that is made of functions.

    Args:
        name: the name of the instrument, for messages.
        stage: the stage in which it measures.
        start: begins to measure, and returns a value for ``result``.
        result: stops measuring; takes the value that ``start`` returned, and returns the facts.
        stop: stops without a result; may be called twice.
    """

    def __init__(
        self,
        name: str,
        stage: str,
        start: Callable[[], Any],
        result: Callable[[Any], Mapping[str, Any]],
        stop: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.stage = stage  # type: ignore[misc]  # other instruments have it as an attribute of their class
        self._start = start
        self._result = result
        self._stop = stop

    def start(self) -> None:
        self._start_value = self._start()

    def result(self) -> Mapping[str, Any]:
        return self._result(self._start_value)

    def discard(self) -> None:
        self._stop()

"""What is measured besides time: each instrument is told when a stage begins and ends, and keeps its facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.ranks import RanksWatch
from lm_profiler.callbacks.instruments.step_counters import StepWatch
from lm_profiler.callbacks.instruments.trace import Tracer
from lm_profiler.measure.boundary import UNGUARDED, Guard


class Instrument(Protocol):
    """Told of every stage; works between steps. What it raises takes it out, and ``discard`` is called."""

    name: str
    part: Guard
    """Answers for what training calls of it during a step."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What it knows by now, by the fields of ``Measured``."""

    def begin(self, stage: str) -> None:
        """``stage`` starts with the next step."""

    def end(self, stage: str) -> None:
        """``stage`` is over; of ``measure``, on the device too."""

    def discard(self) -> None:
        """Stop, and leave training's objects as they were."""


@dataclass(eq=False)
class Watch:
    """An instrument that works from the beginning of one ``stage`` to its end.

    Args:
        name: what messages call it.
        stage: the stage in which it works.
        start: begins.
        finish: ends; returns the facts.
        stop: ends without a result; may be called twice.
    """

    name: str
    stage: str
    start: Callable[[], object]
    finish: Callable[[], Mapping[str, Any]]
    stop: Callable[[], object] = lambda: None
    facts: Mapping[str, Any] = field(default_factory=dict)
    part: Guard = UNGUARDED

    def begin(self, stage: str) -> None:
        if stage == self.stage:
            self.start()

    def end(self, stage: str) -> None:
        if stage == self.stage:
            self.facts = self.finish()

    def discard(self) -> None:
        self.stop()


class Instruments:
    """All of one run's, in the order in which they begin; they end in the opposite one.

    Args:
        memory: begins first: it resets the peaks that others may add to.
        tracer: has a stage of its own.
        others: in their order; what a reading would disturb stands before what reads.
        tell: is told when one of them fails, each by itself.
        counters: begins last and ends first: it reads what all others cost too.
        ranks: None where this process trains alone.
    """

    def __init__(
        self,
        memory: MemoryReader,
        tracer: Tracer,
        others: Iterable[Instrument],
        tell: Callable[[str], object],
        counters: StepWatch,
        ranks: RanksWatch | None = None,
    ) -> None:
        self.memory, self.tracer, self.counters, self.ranks = memory, tracer, counters, ranks
        self._all: list[Instrument] = [memory, tracer, *others, *([] if ranks is None else [ranks]), counters]
        for instrument in self._all:
            instrument.part = Guard(instrument.name, tell, instrument.discard)

    def begin(self, stage: str) -> None:
        """``stage`` starts with the next step."""
        for instrument in self._all:
            instrument.part.run(instrument.begin, stage)

    def end(self, stage: str) -> None:
        """``stage`` is over."""
        for instrument in reversed(self._all):
            if instrument.part.out:
                instrument.part.undo()  # what it could not undo where it failed, amid a backward pass
            else:
                instrument.part.run(instrument.end, stage)

    def discard(self) -> None:
        """Stop them all."""
        for instrument in reversed(self._all):
            instrument.part.run(instrument.discard)

    def facts(self) -> dict[str, Any]:
        """What they know, by the fields of ``Measured``; of one that failed, what it knew by then."""
        return {name: value for instrument in self._all for name, value in instrument.facts.items()}

"""What an instrument is, and how all instruments of a run begin and end with its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.ranks import RanksWatch
from lm_profiler.callbacks.instruments.step_counters import StepWatch
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.measure.boundary import UNGUARDED, Guard


class Instrument(Protocol):
    """Reads something in some stages of a run, and keeps it as facts.

    It is told of every stage, between steps. Where it raises it is taken out: ``discard`` is called, and nothing else.
    """

    name: str
    part: Guard  # guards what training calls of it during a step

    @property
    def facts(self) -> Mapping[str, Any]:
        """What it knows by now, by the names of the fields of ``Measured``."""

    def begin(self, stage: str) -> None:
        """Begin what is to be done in ``stage``, which starts with the next step."""

    def end(self, stage: str) -> None:
        """End what was done in ``stage``, which is over; at the end of ``measure`` the device is done too."""

    def discard(self) -> None:
        """Stop, and leave training's objects as they were."""


@dataclass(eq=False)
class Watch:
    """Instrument that works from the beginning of one ``stage`` to its end."""

    name: str  # its name in messages
    stage: str  # the stage in which it works
    start: Callable[[], object]  # called at the beginning
    finish: Callable[[], Mapping[str, Any]]  # called at the end; returns the facts
    stop: Callable[[], object] = lambda: None  # ends the work without a result; may be called twice
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
    """All instruments of one run, in the order in which they begin; they end in the opposite order.

    Args:
        memory: begins first, because it resets the peaks that the others may add to.
        tracer: the trace, in a stage of its own.
        others: further ones in their order; one that a reading would disturb stands before the one that reads.
        tell: is told of each that fails; the others go on.
        counters: begins last and ends first, so that what the others cost at both ends is not in its counts.
        ranks: who waits for whom; None where this process trains alone.
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
        """Begin all of them: ``stage`` starts with the next step."""
        for instrument in self._all:
            instrument.part.run(instrument.begin, stage)

    def end(self, stage: str) -> None:
        """End all of them: ``stage`` is over."""
        for instrument in reversed(self._all):
            if instrument.part.out:
                instrument.part.undo()  # amid a backward pass, where it failed, not everything could be undone
            else:
                instrument.part.run(instrument.end, stage)

    def discard(self) -> None:
        """Stop them all."""
        for instrument in reversed(self._all):
            instrument.part.run(instrument.discard)

    def facts(self) -> dict[str, Any]:
        """Return what all of them know by now, by the names of the fields of ``Measured``."""
        return {name: value for instrument in self._all for name, value in instrument.facts.items()}

"""Stands in for the process that counts a step on shapes alone."""

from dataclasses import dataclass, field

from lm_profiler.callbacks.instruments.work import StepWork
from lm_profiler.measure.counts.uncountable import UncountableError


@dataclass
class CountedApart:
    """Keeps the trainers whose steps are counted, and gives ``work`` as the count."""

    work: StepWork | None = None
    trainers: list[object] = field(default_factory=list)

    def __call__(self, trainer: object, *_: object) -> StepWork:
        self.trainers.append(trainer)
        if self.work is None:
            raise UncountableError("not counted here")
        return self.work

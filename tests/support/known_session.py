"""A session whose steps take the time that a test gives, without any real work, on the CPU or on a simulated device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_device import Clock, FakeStream

from lm_profiler.callbacks import StageOptions, TraceOptions
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.instruments.watches import StepWatch, watches_of
from lm_profiler.callbacks.instruments.work import FlopsWatch
from lm_profiler.callbacks.session import Instruments, Session
from lm_profiler.callbacks.stages import StageCounter, StoppingRule
from lm_profiler.measure.clocks.tape import DATA, END, FORWARD
from lm_profiler.measure.clocks.timeline import Span, Timeline
from lm_profiler.measure.counts.step_reader import StepReader
from lm_profiler.measure.memory.peaks import ProcessProbe

CPU = torch.device("cpu")
STEP_MS = 10


def module() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


class Loop:
    """The ``stages``, or warm-up and measure of ``options``; ``agree`` is what rank 0 makes of this rank's answer."""

    def __init__(
        self,
        folder: Path,
        options: StageOptions,
        agree: Callable[[int], int] = int,
        stages: dict[str, int] | None = None,
        clock: Clock | None = None,
        stream: FakeStream | None = None,
        probe: Any = None,
        progress: Any = None,
    ) -> None:
        self.clock = clock or Clock()
        self.timeline = Timeline(self.clock, stream)
        self.ended = 0
        self.session = Session(
            timeline=self.timeline,
            stream=stream,
            schedule=StageCounter(stages or {"warmup": options.warmup_steps, "measure": options.planned_steps}),
            instruments=Instruments(
                MemoryReader(probe or ProcessProbe(), self.timeline, CPU, lambda: (module(), [])),
                Tracer(TraceOptions(steps=0), CPU, self.timeline, folder, 0, module),
                [FlopsWatch(self.timeline, module), *watches_of(CPU)],
                print,
                StepWatch(StepReader(self.clock)),
            ),
            progress=progress,
            rank=0,
            stopping=StoppingRule(options, agree),
            report=print,
        )

    def step(self, ms: float) -> None:
        self.timeline.mark(DATA)
        self.clock.pass_ms(ms)
        self._end_step()

    def run(self, steps: int) -> None:
        """Steps of 10 ms, of which 4 are forward."""
        for _ in range(steps):
            with Span(self.timeline, FORWARD):
                self.clock.pass_ms(4)
            self.clock.pass_ms(STEP_MS - 4)
            self._end_step()

    def _end_step(self) -> None:
        self.timeline.mark(END)
        self.ended += not self.session.step_ended()

    def finish(self) -> Measured:
        self.session.finish()
        return self.session.measured()

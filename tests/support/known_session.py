"""A session on the CPU whose steps take what the test says, without any real work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from fake_device import Clock

from lm_profiler.callbacks import StageOptions, TraceOptions
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.instruments.watches import StepWatch, watches_of
from lm_profiler.callbacks.instruments.work import FlopsWatch
from lm_profiler.callbacks.session import Instruments, Session
from lm_profiler.callbacks.stages import StageCounter, StoppingRule
from lm_profiler.measure.clocks.tape import DATA, END
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.step_reader import StepReader
from lm_profiler.measure.memory.peaks import ProcessProbe


class Loop:
    """Warm-up and measure of ``options``; ``agree`` is what rank 0 makes of this rank's answer."""

    def __init__(self, folder: Path, options: StageOptions, agree: Callable[[bool], bool]) -> None:
        self.clock = Clock()
        self.timeline = Timeline(self.clock, None)
        self.ended = 0
        cpu = torch.device("cpu")
        self.session = Session(
            timeline=self.timeline,
            stream=None,
            schedule=StageCounter({"warmup": options.warmup_steps, "measure": options.planned_steps}),
            instruments=Instruments(
                MemoryReader(ProcessProbe(), self.timeline, cpu, lambda: (torch.nn.Linear(1, 1), [])),
                Tracer(TraceOptions(steps=0), cpu, self.timeline, folder, 0, lambda: torch.nn.Linear(1, 1)),
                [FlopsWatch(self.timeline, lambda: torch.nn.Linear(1, 1)), *watches_of(cpu)],
                print,
                StepWatch(StepReader(self.clock)),
            ),
            progress=None,
            rank=0,
            stopping=StoppingRule(options, agree),
            report=print,
        )

    def step(self, ms: float) -> None:
        self.timeline.mark(DATA)
        self.clock.pass_ms(ms)
        self.timeline.mark(END)
        self.ended += not self.session.step_ended()

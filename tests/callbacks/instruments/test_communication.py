"""When DDP's reducer is asked: on CUDA after the steps in which NCCL times its collectives, which that would slow."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.callbacks.instruments import communication
from lm_profiler.callbacks.instruments.communication import STEPS, CommunicationWatch, steps_of_stage
from lm_profiler.measure.clocks.steps import BACKWARD, DATA, END, FORWARD, LEAVE
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collectives.reducer import ReducerReading


class Timer:
    """Tells of the step before, as DDP does; notes in which step it was asked for what."""

    def __init__(self) -> None:
        self.step = 0
        self.asked: list[tuple[str, int]] = []
        self.readings: list[ReducerReading] = []

    def start(self) -> None:
        self.asked.append(("start", self.step))

    def read(self) -> None:
        self.asked.append(("read", self.step))
        self.readings.append(ReducerReading(len(self.readings), 3e-3, 1e-3))

    def stop(self) -> None:
        self.asked.append(("stop", self.step))


@pytest.mark.parametrize("device, first", [("cuda", STEPS + 1), ("cpu", 1)])
def test_it_is_read_once_for_each_of_its_own_steps(device: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timer, timeline, steps = Timer(), Timeline(), steps_of_stage(device, ddp=True)
    monkeypatch.setattr(communication, "ReducerTimer", lambda ddp: timer)
    wrapped = object.__new__(DistributedDataParallel)
    watch = CommunicationWatch(timeline, 0, lambda: wrapped, STEPS * (device == "cuda"))
    watch.begin("collectives")
    for timer.step in range(1, steps + 1):
        for code in (DATA, LEAVE, FORWARD, LEAVE, BACKWARD, LEAVE, END):
            timeline.mark(code)
    watch.end("collectives")
    assert timer.asked == [
        ("start", first),
        *(("read", step) for step in range(first + 1, steps + 1)),
        ("read", steps),  # of the last, when the stage ends
        ("stop", steps),
    ]
    (times,) = watch.facts["reducers"]
    assert times.exposed_s == pytest.approx(dict.fromkeys(range(STEPS), 2e-3))
    assert timeline.observers == ()

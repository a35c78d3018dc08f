"""The instruments with their usual settings, for anybody's own Trainer."""

from __future__ import annotations

from lightning.pytorch import Callback

from lm_profiler.callbacks.memory import MemoryOptions
from lm_profiler.callbacks.profiling import TrainingProfiler
from lm_profiler.callbacks.recorder import Launch
from lm_profiler.callbacks.stages import StageOptions
from lm_profiler.callbacks.trace import TraceOptions


def profiling_callbacks(
    warmup_steps: int = 5,
    measure_steps: int = 20,
    trace_steps: int = 2,
    memory_steps: int = 1,
    stop_when_done: bool = True,
    name: str = "lm_profiler",
) -> list[Callback]:
    """The instruments for your own ``Trainer``: ``Trainer(callbacks=[*yours, *profiling_callbacks()])``.

    Args:
        warmup_steps: steps before the measured ones.
        measure_steps: steps to measure.
        trace_steps: steps to trace with torch.profiler afterwards; 0 for none.
        memory_steps: steps in which memory is read phase by phase, and FLOPs are counted; 0 for none.
        stop_when_done: end the run then. Otherwise training goes on, with the instruments taken out.
        name: of the run's folder where the Trainer has no logger.

    Raises:
        ValueError: a number of steps is negative, or nothing is to be measured.
    """
    return [
        TrainingProfiler(
            StageOptions(warmup_steps=warmup_steps, measure_steps=measure_steps, stop_when_done=stop_when_done),
            MemoryOptions(steps=memory_steps),
            TraceOptions(steps=trace_steps),
            Launch(name=name),
        )
    ]

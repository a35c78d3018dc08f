"""What the recorder says of the ranks: who worked, who waited, and for whom."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.analysis.ranks.exposed import exposed_communication
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.callbacks.measured import Measured
from lm_profiler.record.run import Contention, Ranks
from lm_profiler.record.steps import StepRow

_ON_HOST = "arrivals at collectives, from torch's flight recorder"
_ON_STREAM = "durations of collectives on the device's stream, in steps after the measured ones"


def ranks_facts(
    trainer: Trainer,
    measured: Measured,
    steady: Sequence[StepRow],
    traced: Traced | None,
    contention: Contention | None = None,
) -> Ranks | None:
    """In the ``steady`` steps, or those after them in which collectives were timed on the stream.

    None where one rank trains alone, or nothing says when they came.
    """
    timelines = measured.timelines
    if len(timelines) < 2:
        return None
    on_stream = any(timeline.waited_ns is not None for timeline in timelines)
    # Of a DDP that wraps the module, gradients are reduced while backward goes on.
    overlap = isinstance(trainer.strategy.model, DistributedDataParallel)
    exposed = exposed_communication(measured.reducers, traced)
    return ranks_of(
        timelines,
        trainer.world_size,
        overlap,
        steps=None if on_stream else [row.step for row in steady],
        witness=_ON_STREAM if on_stream else _ON_HOST,
        exposed_s=exposed.seconds,
        exposed_source=exposed.source,
        contention=contention,
        counters=measured.counters,
    )

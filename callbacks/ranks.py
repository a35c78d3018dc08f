"""What every rank measured, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed

from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.work import of_all_ranks
from lm_profiler.measure.telemetry import together
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import UNKNOWN, largest


def gather(measured: Measured) -> Measured:
    """The rows of every rank, and the largest peaks. A collective call where there are several ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return measured
    everyone: list[Measured | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, measured)
    return merge([m for m in everyone if m is not None])


def merge(measured: Sequence[Measured]) -> Measured:
    """One ``Measured`` of several ranks', rank 0's first, whose own the rest is. Telemetry is of all their GPUs."""
    return replace(
        measured[0],
        rows=sorted((row for m in measured for row in m.rows), key=lambda row: (row.step, row.rank)),
        part_peaks={
            part: largest(m.part_peaks.get(part, UNKNOWN) for m in measured)
            for part in PARTS
            if any(part in m.part_peaks for m in measured)
        },
        telemetry=together([m.telemetry for m in measured]),
        cpu_uses=[use for m in measured for use in m.cpu_uses],
        flops=of_all_ranks([m.flops for m in measured]),
        recompilations=sum(m.recompilations for m in measured),
        notes=list(dict.fromkeys(note for m in measured for note in m.notes)),
    )

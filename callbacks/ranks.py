"""What every rank measured, brought together."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed

from lm_profiler.callbacks.recorder import Measured
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
    """One ``Measured`` of several ranks', rank 0's first."""
    return Measured(
        rows=sorted((row for m in measured for row in m.rows), key=lambda row: (row.step, row.rank)),
        part_peaks={
            part: largest(m.part_peaks.get(part, UNKNOWN) for m in measured)
            for part in PARTS
            if any(part in m.part_peaks for m in measured)
        },
        planned=measured[0].planned,
        between_steps_s=measured[0].between_steps_s,
        device_idle=measured[0].device_idle,
        recompilations=sum(m.recompilations for m in measured),
        held=measured[0].held,
        levels=measured[0].levels,
        allocator=measured[0].allocator,
        telemetry=measured[0].telemetry,
        syncs=measured[0].syncs,
        notes=list(dict.fromkeys(note for m in measured for note in m.notes)),
    )

"""What is found out about work and machine when all timing is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer

from lm_profiler.callbacks.instruments.numerics import NumericsAudit
from lm_profiler.callbacks.instruments.trace import TRACED, Tracer
from lm_profiler.callbacks.instruments.work import Work
from lm_profiler.callbacks.outcome.judgement import run_dtype, torch_dtype
from lm_profiler.callbacks.outcome.measured import Measured
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.device.ceiling import Ceiling
from lm_profiler.measure.device.kept_ceilings import known_ceiling
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run import Flops, NumericsFacts


@dataclass(frozen=True)
class Hardware:
    """None is unknown."""

    flops: Flops | None = None
    """Of a step, over all ranks."""
    ceiling: Ceiling | None = None
    peak_flops_per_s: float | None = None
    """Of one device, where the user says it."""
    samples: int | None = None
    """Of a step, over all ranks."""
    numerics: NumericsFacts | None = None
    kernels: KernelTable | None = None
    """Of rank 0's trace."""
    notes: Sequence[str] = ()


def look_at_hardware(
    trainer: Trainer,
    work: Work,
    measured: Measured,
    audit: NumericsAudit,
    tracer: Tracer,
    peak_flops_per_s: float | None,
) -> Hardware:
    """On rank 0, after the run; what fails leaves a note."""
    notes: list[str] = []
    module, device = trainer.lightning_module, trainer.strategy.root_device
    dtype = torch_dtype(run_dtype(trainer))
    kernels = try_or_note("kernels", tracer.kernels, notes)
    notes += without_kernels(device, kernels)
    return Hardware(
        flops=try_or_note("FLOPs", lambda: _flops(trainer, work, measured, notes), notes),
        ceiling=None
        if dtype is None
        else try_or_note("ceiling", lambda: known_ceiling(device, dtype, notes.append), notes),
        peak_flops_per_s=peak_flops_per_s,
        samples=try_or_note("samples", lambda: work.samples_per_step(trainer), notes),
        kernels=kernels,
        numerics=try_or_note("numerics", lambda: audit.facts(trainer, module), notes),
        notes=notes,
    )


def without_kernels(device: torch.device, kernels: KernelTable | None) -> list[str]:
    """The note that a trace of ``device`` shows the host alone; none where it shows the device, or there is none."""
    if kernels is None or kernels.source == "kernels" or device.type not in TRACED:
        return []
    text = f"the trace has PyTorch's operators and no kernel: the driver of this {device.type} device lets nobody look "
    return [text + "(on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"]


def _flops(trainer: Trainer, work: Work, measured: Measured, notes: list[str]) -> Flops | None:
    steps = len({row.step for row in measured.rows if row.stage == "memory"})
    try:
        return work.flops_per_step(trainer, trainer.lightning_module, measured.flops, steps)
    except UncountableError as unknown:
        notes.append(f"FLOPs unknown: {unknown}")
        return None

"""What is determined after all timing: FLOPs of a step, the machine's matmul rate, kernels, numerics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer

from lm_profiler.callbacks.instruments.numerics import NumericsAudit
from lm_profiler.callbacks.instruments.trace import TRACED, Tracer
from lm_profiler.callbacks.instruments.work import Work
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.outcome.judgement import run_dtype, torch_dtype
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.device.kept_ceilings import known_ceiling
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run import Flops, NumericsFacts, Verb


@dataclass(frozen=True)
class LateFacts:
    """None is unknown."""

    flops: Flops | None = None
    """Of a step, over all ranks."""
    ceiling_flops_per_s: float | None = None
    """Of one device."""
    peak_flops_per_s: float | None = None
    """Of one device, where the user says it."""
    samples: int | None = None
    """Of a step, over all ranks."""
    numerics: NumericsFacts | None = None
    kernels: KernelTable | None = None
    """Of rank 0's trace."""
    notes: Sequence[str] = ()


class Afterwards:
    """Keeps what the run's first batch looks like, once it was ``seen``, to look at the run when it is over.

    Args:
        verb: what runs.
        audit: whether its precision is to be audited.
        peak_flops_per_s: dense peak of one device, where the user says it.
    """

    def __init__(self, verb: Verb, audit: bool, peak_flops_per_s: float | None) -> None:
        self._work, self._audit = Work(verb), NumericsAudit(verb) if audit else None
        self._peak_flops_per_s = peak_flops_per_s
        self.seen = False

    def see(self, trainer: Trainer, batch: Any) -> None:
        """Remember ``batch``."""
        self.seen = True
        self._work.see(trainer, batch)
        if self._audit is not None:
            self._audit.see(batch)

    def look(self, trainer: Trainer, measured: Measured, tracer: Tracer) -> LateFacts:
        """Called on rank 0 after the run; each failure becomes a note."""
        notes: list[str] = []
        device, audit = trainer.strategy.root_device, self._audit
        dtype = torch_dtype(run_dtype(trainer))
        kernels = try_or_note("kernels", tracer.kernels, notes)
        notes += without_kernels(device, kernels)
        return LateFacts(
            flops=try_or_note("FLOPs", lambda: self._flops(trainer, measured, notes), notes),
            ceiling_flops_per_s=try_or_note("ceiling", lambda: known_ceiling(device, dtype, notes.append), notes)
            if dtype
            else None,
            peak_flops_per_s=self._peak_flops_per_s,
            samples=try_or_note("samples", lambda: self._work.samples_per_step(trainer), notes),
            kernels=kernels,
            numerics=None
            if audit is None
            else try_or_note("numerics", lambda: audit.facts(trainer, trainer.lightning_module), notes),
            notes=notes,
        )

    def _flops(self, trainer: Trainer, measured: Measured, notes: list[str]) -> Flops | None:
        steps = len({row.step for row in measured.rows if row.stage == "memory"})
        try:
            return self._work.flops_per_step(trainer, trainer.lightning_module, measured.flops, steps)
        except UncountableError as unknown:
            notes.append(f"FLOPs unknown: {unknown}")
            return None


def without_kernels(device: torch.device, kernels: KernelTable | None) -> list[str]:
    """The note that a trace of ``device`` shows the host alone; none where it shows the device, or there is none."""
    if kernels is None or kernels.source == "kernels" or device.type not in TRACED:
        return []
    driver = f"the driver of this {device.type} device does not permit profiling"
    text = f"the trace has PyTorch's operators but no kernels: {driver} "
    return [text + "(on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"]

"""What is determined after all timing: FLOPs of a step, the machine's matmul rate, kernels, numerics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer

from lm_profiler.analysis.hardware.device_rates import Dtype
from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.steps.batch_counts import mean_counts
from lm_profiler.analysis.why.traced import Traced, traced_of
from lm_profiler.callbacks.instruments.numerics import numerics_facts, on_host
from lm_profiler.callbacks.instruments.trace import TRACED, Tracer
from lm_profiler.callbacks.instruments.work import StepWork, batches_per_step, scaled, step_work, without_data
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.outcome.floors import bytes_of_batch, phase_work
from lm_profiler.callbacks.outcome.judgement import run_dtype, torch_name
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.device.kept_ceilings import known_ceiling, known_copy_rate
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run import Flops, NumericsFacts, Verb


@dataclass(frozen=True)
class LateFacts:
    """None is unknown."""

    flops: Flops | None = None
    """Of a step, over all ranks."""
    ceilings: Mapping[str, float | None] = field(default_factory=dict)
    """The machine's own FLOP/s for each dtype of the run's products, by torch's names: of one device."""
    copied_bytes_per_s: float | None = None
    """By one device, in a large copy."""
    numerics: NumericsFacts | None = None
    kernels: KernelTable | None = None
    """Of rank 0's trace."""
    traced: Traced | None = None
    """What the time of rank 0's traced steps went to."""
    work: Mapping[str, Work] = field(default_factory=dict)
    """What each phase of a step has to do at least, of one device."""
    notes: Sequence[str] = ()
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    """FLOPs of a step of one rank, by the dtype of their factors in torch's names."""
    batches: float | None = None
    """Of the step whose work this is, over all ranks."""

    def of_step_of(self, batches: float | None) -> LateFacts:
        """The same where a step takes so many ``batches``. What forward and backward move then is unknown."""
        if not (batches and self.batches) or batches == self.batches:
            return self
        times = batches / self.batches
        work = {
            phase: replace(
                of,
                flops=None if of.flops is None else _times(of.flops, times),
                bytes=None if of.flops or of.bytes is None else round(of.bytes * (times if of.on_the_bus else 1)),
            )
            for phase, of in self.work.items()
        }
        flops = None if self.flops is None else scaled(self.flops, self.batches / batches)
        return replace(self, flops=flops, work=work, by_dtype=_times(self.by_dtype, times), batches=batches)


def _times(counts: Mapping[str, int], times: float) -> dict[str, int]:
    return {name: round(count * times) for name, count in counts.items()}


def _kept(look: Callable[[Any], Any], batch: Any) -> Callable[[], Any]:
    """Tells later what ``look`` makes of ``batch`` now; also what it raises: training goes on with anybody's types."""
    try:
        result = look(batch)
    except Exception as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error


class Afterwards:
    """Keeps what the run's first batch looks like, once it was ``seen``, to look at the run when it is over.

    Args:
        verb: what runs.
        audit: whether its precision is to be audited.
    """

    def __init__(self, verb: Verb, audit: bool) -> None:
        self._verb: Verb = verb
        self._audit = audit
        self.seen = False
        self._shapes = self._copy = _kept(lambda batch: batch, None)

    def see(self, trainer: Trainer, batch: Any) -> None:
        """Remember ``batch``."""
        self.seen = True
        self._shapes = _kept(without_data, batch)
        if self._audit:
            self._copy = _kept(on_host, batch)

    def look(self, trainer: Trainer, measured: Measured, tracer: Tracer) -> LateFacts:
        """Called on rank 0 after the run; each failure becomes a note."""
        notes: list[str] = []
        device, verb = trainer.strategy.root_device, self._verb
        ran = try_or_note("trace", lambda: tracer.work(notes), notes)
        kernels = try_or_note("kernels", lambda: tracer.kernels(ran), notes)
        traced = None if ran is None else try_or_note("waterfall", lambda: traced_of(ran), notes)
        notes += without_kernels(device, kernels)
        work = try_or_note("FLOPs", lambda: self._work(trainer, measured, notes), notes)
        by_dtype = {} if work is None else _by_dtype(work)
        phases = try_or_note("floors", lambda: self._phases(trainer, measured, work), notes) or {}
        stages = {row.stage for row in measured.rows}
        timed = "measure" in stages and not trainer.fast_dev_run  # type: ignore[attr-defined]
        ceilings: dict[str, float | None] = {}
        for name in _multiplied(run_dtype(trainer, by_dtype), phases) if timed else ():
            factors = getattr(torch, name)
            ceilings[name] = try_or_note("ceiling", lambda: known_ceiling(device, factors, notes.append), notes)  # noqa: B023
        copied = None
        if timed and (phases or traced is not None):  # else nothing is held against it
            copied = try_or_note("bandwidth", lambda: known_copy_rate(device), notes)
        numerics = None
        if self._audit:
            numerics = try_or_note("numerics", lambda: numerics_facts(trainer, verb, self._copy), notes)
        flops = None if work is None else work.flops
        batches = mean_counts(measured.batch_counts, _looked_at(measured)).batches
        if measured.flops.flops is None or batches is None:
            batches = batches_per_step(trainer, verb)  # of the copy
        return LateFacts(flops, ceilings, copied, numerics, kernels, traced, phases, notes, by_dtype, batches)

    def _phases(self, trainer: Trainer, measured: Measured, work: StepWork | None) -> dict[str, Work]:
        try:
            batch_bytes = bytes_of_batch(self._shapes()) * batches_per_step(trainer, self._verb) // trainer.world_size
        except Exception:  # it cannot be described
            batch_bytes = None
        return phase_work(trainer, work, measured.traffic, batch_bytes)

    def _work(self, trainer: Trainer, measured: Measured, notes: list[str]) -> StepWork | None:
        steps = len(_looked_at(measured))
        if not steps and (measured.planned.get("memory") or not measured.planned.get("trace")):
            return None  # the run ended before; or nothing but times is asked for, and another process takes seconds
        try:
            return step_work(trainer, self._verb, measured.flops, steps, self._shapes)
        except UncountableError as unknown:
            remedy = "" if measured.planned.get("memory") else "; --memory.steps=1 counts those of a step that runs"
            notes.append(f"FLOPs unknown: {unknown}{remedy}")
            return None


def _by_dtype(work: StepWork) -> Counter[str]:
    flops: Counter[str] = Counter()
    for counted in work.by_dtype.values():
        flops.update(counted)
    return flops


def _multiplied(dtype: Dtype | None, phases: Mapping[str, Work]) -> list[str]:
    """The dtypes of all products, by torch's names: the run's own, and what else was seen."""
    run = [] if dtype is None else [torch_name(dtype)]
    return list(dict.fromkeys([*run, *(name for work in phases.values() for name in work.flops or {})]))


def without_kernels(device: torch.device, kernels: KernelTable | None) -> list[str]:
    """The note that a trace of ``device`` shows the host alone; none where it shows the device, or there is none."""
    if kernels is None or kernels.source == "kernels" or device.type not in TRACED:
        return []
    driver = f"the driver of this {device.type} device does not permit profiling"
    text = f"the trace has PyTorch's operators but no kernels: {driver} "
    return [text + "(on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"]


def _looked_at(measured: Measured) -> list[int]:
    """The steps whose work was counted."""
    return sorted({row.step for row in measured.rows if row.stage == "memory"})

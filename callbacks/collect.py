"""Asks Trainer, module, torch and the machine what they are, once the loop is over; nothing else does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer

from lm_profiler.analysis.conclude import main_precision
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.analysis.hardware.roofline import Work, matmul_dtype, torch_name
from lm_profiler.analysis.steps.summaries import mean_counts
from lm_profiler.analysis.why.operators import Lists
from lm_profiler.analysis.why.traced import traced_of
from lm_profiler.callbacks.instruments.numerics import numerics_facts, on_host
from lm_profiler.callbacks.instruments.sent_step import without_data
from lm_profiler.callbacks.instruments.tracer import TRACED, Tracer
from lm_profiler.callbacks.instruments.work import StepWork, batches_per_step, step_work
from lm_profiler.callbacks.launch import Launch, ProfilingOptions
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.namespaces import is_a
from lm_profiler.callbacks.phase_work import bytes_of_batch, phase_work
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.collectives.reducer import reduces_in_backward
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.contention import contention
from lm_profiler.measure.device.environment import cpu_cores, environment, matrix_units
from lm_profiler.measure.device.kept_ceilings import known_ceiling, known_copy_rate
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run import Failure, ModelFacts, Settings, Status
from lm_profiler.torch_names import FUSED_DEVICES

# profilers of Lightning's and ours that stand in the Trainer where the user chose none
_OWN_PROFILERS = ("PassThroughProfiler", "PhaseProfiler")


def _look_now(look: Callable[[Any], Any], batch: Any) -> Callable[[], Any]:
    """Call ``look`` on ``batch`` now, and return a function that gives its result, or raises its error, when called.

    A batch may be of anybody's type, and an error must not stop training.
    """
    try:
        result = look(batch)
    except Exception as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error


@dataclass(eq=False)
class Collector:
    """Makes the evidence of one run: ``evidence`` as soon as the loop ends, ``look_back`` once all timing is over.

    The constructor asks nothing.
    """

    trainer: Trainer  # the run's
    options: ProfilingOptions  # what the run was to do
    launch: Launch  # how it was started
    seen: bool = False  # whether the first batch was seen, of which only its shapes are kept, and a copy for the audit
    _shapes: Callable[[], Any] = field(default_factory=lambda: lambda: None)
    _copy: Callable[[], Any] = field(default_factory=lambda: lambda: None)
    # facts that were known in an earlier call, in case that they cannot be asked later
    _machine: Mapping[str, Any] = field(default_factory=dict)

    def see(self, batch: Any) -> None:
        """Remember ``batch``."""
        self.seen = True
        self._shapes = _look_now(without_data, batch)
        if self.options.numerics.audit:
            self._copy = _look_now(on_host, batch)

    def evidence(self, measured: Measured, status: Status, failure: Failure | None = None) -> Evidence:
        """Return what was ``measured``, with what Trainer and machine say; what they cannot say becomes a note."""
        trainer, options, notes = self.trainer, self.options, list(measured.notes)
        self._machine = {
            **self._machine,
            "model": try_or_note("model", lambda: model_facts(trainer), notes),
            "environment": try_or_note("environment", self._environment, notes),
        }
        kept = {each.name for each in fields(Evidence)} & measured.__dataclass_fields__.keys() - {"notes", "flops"}
        return Evidence(
            **self.launch.facts(),
            **{name: getattr(measured, name) for name in kept},
            **self._machine,
            verb=options.verb,
            status=status,
            failure=failure,
            contention=try_or_note("contention", lambda: contention(measured.cpu_uses), notes),
            world_size=trainer.world_size,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            precision=str(trainer.precision),
            reduces_in_backward=reduces_in_backward(trainer.strategy.model),
            settings=try_or_note("settings", lambda: switches(trainer), notes),
            lists=try_or_note("parameters", lambda: lists_of(trained(trainer)), notes),
            multiprocessors=_multiprocessors(trainer.strategy.root_device),
            peak_flops_per_s=options.peak_flops_per_s,
            notes=notes,
        )

    def _environment(self) -> Any:
        return environment(self.trainer.strategy.root_device, self.trainer.world_size)

    def look_back(self, evidence: Evidence, measured: Measured, tracer: Tracer) -> Evidence:
        """Return ``evidence`` with FLOPs, rates of the machine, kernels and numerics; each failure becomes a note.

        Called on rank 0, when nothing is timed any more.
        """
        trainer, notes = self.trainer, list(evidence.notes)
        device, verb = trainer.strategy.root_device, self.options.verb
        ran = try_or_note("trace", lambda: tracer.work(notes), notes)
        kernels = try_or_note("kernels", lambda: tracer.kernels(ran), notes)
        traced = None if ran is None else try_or_note("waterfall", lambda: traced_of(ran), notes)
        notes += without_kernels(device, kernels)
        work = try_or_note("FLOPs", lambda: self._work(measured, notes), notes)
        phases = try_or_note("floors", lambda: self._phases(measured, work), notes) or {}
        known = replace(evidence, by_dtype=_by_dtype(work), work=phases, kernels=kernels, traced=traced)
        timed = any(row.stage == "measure" for row in measured.rows) and not trainer.fast_dev_run  # type: ignore[attr-defined]
        numerics, ceilings = None, dict[str, float | None]()
        for name in _matmul_dtypes(known, device) if timed else ():
            factors = getattr(torch, name)
            ceilings[name] = try_or_note("ceiling", lambda: known_ceiling(device, factors, notes.append), notes)  # noqa: B023
        copied = None
        if timed and (phases or traced is not None):  # else nothing is compared with that rate
            copied = try_or_note("bandwidth", lambda: known_copy_rate(device), notes)
        if self.options.numerics.audit:
            numerics = try_or_note("numerics", lambda: numerics_facts(trainer, verb, self._copy), notes)
        batches = mean_counts(measured.batch_counts, _counted_steps(measured)).batches
        if measured.flops.flops is None or batches is None:
            # They are those of a copy then, with all batches of a step.
            batches = batches_per_step(trainer, verb)
        return replace(
            known,
            duration_s=self.launch.facts()["duration_s"],
            flops=None if work is None else work.flops,
            work_batches=batches,
            ceilings=ceilings,
            copied_bytes_per_s=copied,
            numerics=numerics,
            notes=notes,
        )

    def _phases(self, measured: Measured, work: StepWork | None) -> dict[str, Work]:
        trainer = self.trainer
        try:
            batches = batches_per_step(trainer, self.options.verb) // trainer.world_size
            batch_bytes = bytes_of_batch(self._shapes()) * batches
        except Exception:  # the batch's type has no shapes that can be kept
            batch_bytes = None
        return phase_work(trainer, work, measured.traffic, batch_bytes)

    def _work(self, measured: Measured, notes: list[str]) -> StepWork | None:
        steps = len(_counted_steps(measured))
        if not steps and (measured.steps_planned.get("memory") or not measured.steps_planned.get("trace")):
            return None  # the run ended before; or nothing but times is asked for, and another process takes seconds
        try:
            return step_work(self.trainer, self.options.verb, measured.flops, steps, self._shapes)
        except UncountableError as unknown:
            remedy = (
                "" if measured.steps_planned.get("memory") else "; --memory.steps=1 counts those of a step that runs"
            )
            notes.append(f"FLOPs unknown: {unknown}{remedy}")
            return None


def _by_dtype(work: StepWork | None) -> Counter[str]:
    flops: Counter[str] = Counter()
    for counted in {} if work is None else work.by_dtype.values():
        flops.update(counted)
    return flops


def _matmul_dtypes(evidence: Evidence, device: torch.device) -> list[str]:
    """Return torch's names of the dtypes of all matmuls: the dtype of the run, and those that were seen."""
    dtype = matmul_dtype(main_precision(evidence), float32_matmul_precision(device.type))
    run = [] if dtype is None else [torch_name(dtype)]
    return list(dict.fromkeys([*run, *(name for work in evidence.work.values() for name in work.flops or {})]))


def without_kernels(device: torch.device, kernels: KernelTable | None) -> list[str]:
    """Return the note that a trace of ``device`` shows the host alone; empty where that is not so."""
    if kernels is None or kernels.source == "kernels" or device.type not in TRACED:
        return []
    driver = f"the driver of this {device.type} device does not permit profiling"
    text = f"the trace has PyTorch's operators but no kernels: {driver} "
    return [text + "(on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"]


def _counted_steps(measured: Measured) -> list[int]:
    """Return the steps whose work was counted."""
    return sorted({row.step for row in measured.rows if row.stage == "memory"})


def model_facts(trainer: Trainer) -> ModelFacts:
    """Return size, precision and optimizers of the Trainer's module."""
    module = trainer.lightning_module
    parameters = list(module.parameters())
    # By id: tied weights are one tensor, which counts once.
    embeddings = {id(m.weight) for m in module.modules() if type(m).__name__ == "Embedding"}
    total = sum(p.numel() for p in parameters)
    return ModelFacts(
        class_path=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=total,
        parameters_without_embedding=total - sum(p.numel() for p in parameters if id(p) in embeddings),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        bytes=sum(t.numel() * t.element_size() for t in (*parameters, *module.buffers())),
        precision=str(trainer.precision),
        optimizers=[type(optimizer).__name__.lstrip("_") for optimizer in trainer.optimizers],
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        compiled=is_compiled_in(module),
    )


def switches(trainer: Trainer) -> Settings:
    """Return what is switched on, and what the machine has; ``conclude`` adds what the figures say."""
    loader, device = _loader(trainer), trainer.strategy.root_device
    units, profiler = matrix_units(device), type(trainer.profiler).__name__  # type: ignore[attr-defined]
    return Settings(
        precision=str(trainer.precision),
        tf32=float32_matmul_precision() != "highest" if units.tf32 else None,
        half_precision=units.half_precision,
        compiled=is_compiled_in(trainer.lightning_module),
        num_workers=getattr(loader, "num_workers", None),
        # Each device of this machine has a process, whose loader has workers of its own.
        cores=max(cpu_cores() // max(trainer.num_devices, 1), 1),
        pin_memory=getattr(loader, "pin_memory", None) if device.type == "cuda" else None,
        fused_optimizer=_are_fused(trainer),
        anomalies=torch.is_anomaly_enabled(),
        profiler=None if profiler in _OWN_PROFILERS else profiler,
    )


def _are_fused(trainer: Trainer) -> bool | None:
    """Return whether all optimizers are fused; None where one cannot be, or there is none."""
    optimizers = trainer.optimizers
    if not optimizers or any("fused" not in optimizer.defaults for optimizer in optimizers):
        return None
    if all(optimizer.defaults["fused"] for optimizer in optimizers):
        return True
    # Lightning cannot clip for a fused optimizer then (2.6.6: MixedPrecision.clip_gradients).
    clips = trainer.gradient_clip_val and is_a(trainer.precision_plugin, "MixedPrecision")
    refused = any(optimizer.defaults.get(name) for optimizer in optimizers for name in ("foreach", "differentiable"))
    return None if clips or refused or trainer.strategy.root_device.type not in FUSED_DEVICES else False


def _loader(trainer: Trainer) -> Any:
    """Return the first loader of the verb that runs."""
    loaders = (trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders)
    loader = next((each for each in loaders if each is not None), None)
    return loader[0] if isinstance(loader, (list, tuple)) and loader else loader


def trained(trainer: Trainer) -> Iterable[torch.Tensor]:
    """Return the parameters that are trained."""
    return (p for p in trainer.lightning_module.parameters() if p.requires_grad)


def lists_of(parameters: Iterable[Any]) -> Lists:
    """Return the size of the tensor lists that an optimizer of ``parameters`` updates: this rank's part of them."""
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
    items = {tensor.element_size() for tensor in local}
    return Lists(sum(tensor.numel() for tensor in local), items.pop() if len(items) == 1 else None)


def _multiprocessors(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None

"""Asks Trainer, module, torch and the machine what they are, once the loop is over; nothing else does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer

from lm_profiler.analysis.conclude import main_precision
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.analysis.hardware.roofline import Work, matmul_dtype, torch_name
from lm_profiler.analysis.steps.summaries import mean_counts
from lm_profiler.analysis.why.operators import Lists
from lm_profiler.analysis.why.traced import traced_of
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.numerics import numerics_facts, on_host
from lm_profiler.callbacks.instruments.profiling_options import TIMED_STEPS, ProfilingOptions
from lm_profiler.callbacks.instruments.sent_step import without_data
from lm_profiler.callbacks.instruments.tracer import TRACED, Tracer
from lm_profiler.callbacks.instruments.work import StepWork, batches_per_step, bytes_of_batch, phase_work, step_work
from lm_profiler.callbacks.marks.batches import Elements
from lm_profiler.callbacks.marks.namespaces import is_a
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.collective_calls import reduces_in_backward
from lm_profiler.measure.counts.flops import UncountableError
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.ceilings import known_ceiling, known_copy_rate
from lm_profiler.measure.device.contention import contention
from lm_profiler.measure.device.environment import cpu_cores, environment, float32_matmul_precision, matrix_units
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import Failure, ModelFacts, Settings, Status
from lm_profiler.torch_names import FUSED_DEVICES

_NO_PROFILER = "PassThroughProfiler"  # the class of Lightning's that the Trainer has where the user chose none


@dataclass(eq=False)
class Collector:
    """Makes the evidence of one run: ``evidence`` as soon as the loop ends, ``look_back`` once all timing is over."""

    trainer: Trainer  # the Trainer of the run
    options: ProfilingOptions  # the options of the run
    seen: bool = False  # whether the first batch was seen; only its shapes are kept, and a copy for the audit
    _shapes: Future[Any] = field(default_factory=Future)
    _copy: Future[Any] = field(default_factory=Future)

    def see(self, batch: Any) -> None:
        """Remember ``batch``, which may be of any type: an error is raised where the batch is asked for."""
        self.seen = True
        looks = [(self._shapes, without_data), *([(self._copy, on_host)] if self.options.numerics.audit else [])]
        for kept, look in looks:
            try:
                kept.set_result(look(batch))
            except Exception as error:
                kept.set_exception(error)

    def evidence(self, measured: Measured, status: Status, failure: Failure | None = None) -> Evidence:
        """Return what was ``measured``, with what Trainer and machine say; what they cannot say becomes a note."""
        trainer, notes = self.trainer, list(measured.notes)
        parameters = trainer.lightning_module.parameters()
        device, world_size = trainer.strategy.root_device, trainer.world_size
        known = {each.name: getattr(measured, each.name) for each in fields(Evidence)} | self.options.launch.facts()
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None
        asks: dict[str, Callable[[], Any]] = {
            "model": lambda: model_facts(trainer),
            "environment": lambda: environment(device, world_size),
            "contention": lambda: contention(measured.cpu_uses),
            "settings": lambda: switches(trainer),
            "lists": lambda: lists_of(each for each in parameters if each.requires_grad),
        }
        asked = {name: try_or_note(name, ask, notes) for name, ask in asks.items()}
        plain = {
            "verb": self.options.verb,
            "status": status,
            "failure": failure,
            "steps_planned": self._steps_planned(measured),
            "world_size": world_size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
            "reduces_in_backward": reduces_in_backward(trainer.strategy.model),
            "multiprocessors": processors,
            "peak_flops_per_s": self.options.peak_flops_per_s,
            "notes": notes,
        }
        return Evidence(**known | asked | plain)

    def _steps_planned(self, measured: Measured) -> Mapping[str, int]:
        """Return the planned steps of each stage: of the measured ones, whose number time decides, the fewest."""
        planned = measured.steps_planned
        if self.options.stages.is_timed and "measure" in planned:
            return {**planned, "measure": TIMED_STEPS}
        return planned

    def look_back(self, evidence: Evidence, measured: Measured, tracer: Tracer) -> Evidence:
        """Return ``evidence`` with FLOPs, rates of the machine, kernels and numerics; for rank 0, after all timing."""
        trainer, notes = self.trainer, list(evidence.notes)
        device, verb = trainer.strategy.root_device, self.options.verb
        ran = try_or_note("trace", lambda: tracer.work(notes), notes)
        kernels = try_or_note("kernels", lambda: tracer.kernels(ran), notes)
        traced = None if ran is None else try_or_note("waterfall", lambda: traced_of(ran), notes)
        notes += without_kernels(device, kernels)
        work = try_or_note("FLOPs", lambda: self._work(measured, notes), notes)
        phases = try_or_note("floors", lambda: self._phases(measured, work), notes) or {}
        by_dtype = sum((Counter(of) for of in work.by_dtype.values()), Counter[str]()) if work is not None else {}
        known = replace(evidence, by_dtype=by_dtype, work=phases, kernels=kernels, traced=traced)
        timed = any(row.stage == "measure" for row in measured.rows) and not trainer.fast_dev_run  # type: ignore[attr-defined]
        numerics, ceilings = None, dict[str, float | None]()
        for name in _matmul_dtypes(known, device) if timed else ():
            factors = getattr(torch, name)
            ceilings[name] = try_or_note("ceiling", lambda: known_ceiling(device, factors, notes.append), notes)  # noqa: B023
        copied = None
        if timed and (phases or traced is not None):  # otherwise nothing is compared with that rate
            copied = try_or_note("bandwidth", lambda: known_copy_rate(device), notes)
        if self.options.numerics.audit:
            numerics = try_or_note(
                "numerics", lambda: numerics_facts(trainer, verb, partial(self._copy.result, 0)), notes
            )
        counts = mean_counts(measured.batch_counts, _counted_steps(measured))
        batches, elements = counts.batches, counts.elements
        if measured.seen_flops.flops is None or batches is None:
            # FLOPs are then those of a copy, with all batches of a step.
            batches = batches_per_step(trainer, verb)
            elements = self._elements_of(batches)
        return replace(
            known,
            duration_s=self.options.launch.facts()["duration_s"],
            flops=None if work is None else work.flops,
            work_batches=batches,
            work_elements=elements,
            ceilings=ceilings,
            copied_bytes_per_s=copied,
            numerics=numerics,
            notes=notes,
        )

    def _elements_of(self, batches: int) -> int | None:
        """Return the elements of ``batches`` that are like the first one; None where its shapes are unknown."""
        try:
            elements = Elements()(self._shapes.result(0))
        except Exception:  # the batch's type has no shapes that can be kept
            return None
        return None if elements is None else elements * batches

    def _phases(self, measured: Measured, work: StepWork | None) -> dict[str, Work]:
        trainer = self.trainer
        try:
            batches = batches_per_step(trainer, self.options.verb) // trainer.world_size
            batch_bytes = bytes_of_batch(self._shapes.result(0)) * batches
        except Exception:  # the batch's type has no shapes that can be kept
            batch_bytes = None
        return phase_work(trainer, work, measured.traffic, batch_bytes)

    def _work(self, measured: Measured, notes: list[str]) -> StepWork | None:
        steps = len(_counted_steps(measured))
        if not steps and (measured.steps_planned.get("memory") or not measured.steps_planned.get("trace")):
            return None  # the run ended before; or only times are asked for, and another process takes seconds
        try:
            shapes = partial(self._shapes.result, 0)
            return step_work(self.trainer, self.options.verb, measured.seen_flops, steps, shapes)
        except UncountableError as unknown:
            planned = measured.steps_planned.get("memory")
            remedy = "" if planned else "; --memory.steps=1 counts those of a step that runs"
            notes.append(f"FLOPs unknown: {unknown}{remedy}")
            return None


def _matmul_dtypes(evidence: Evidence, device: torch.device) -> list[str]:
    """Return torch's names of the dtypes of all matmuls: the dtype of the run, and the dtypes that were seen."""
    dtype = matmul_dtype(main_precision(evidence), float32_matmul_precision(device.type))
    run = [] if dtype is None else [torch_name(dtype)]
    return list(dict.fromkeys([*run, *(name for work in evidence.work.values() for name in work.flops or {})]))


def without_kernels(device: torch.device, kernels: KernelTable | None) -> list[str]:
    """Return the note that a trace of ``device`` shows only the host; empty where it shows kernels."""
    if kernels is None or kernels.source == "kernels" or device.type not in TRACED:
        return []
    driver = f"the driver of this {device.type} device does not permit profiling"
    text = f"the trace has PyTorch's operators but no kernels: {driver} "
    return [text + "(on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"]


def _counted_steps(measured: Measured) -> list[int]:
    return sorted({row.step for row in measured.rows if row.stage == "memory"})


def model_facts(trainer: Trainer) -> ModelFacts:
    module = trainer.lightning_module
    parameters = list(module.parameters())
    # Compared by id: tied weights are one tensor, which counts once.
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
    loaders = (trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders)
    loader: Any = next((each for each in loaders if each is not None), None)
    loader = loader[0] if isinstance(loader, (list, tuple)) and loader else loader
    device = trainer.strategy.root_device
    units, profiler = matrix_units(device), type(trainer.profiler).__name__  # type: ignore[attr-defined]
    return Settings(
        precision=str(trainer.precision),
        tf32=float32_matmul_precision() != "highest" if units.tf32 else None,
        half_precision=units.half_precision,
        compiled=is_compiled_in(trainer.lightning_module),
        num_workers=getattr(loader, "num_workers", None),
        persistent_workers=getattr(loader, "persistent_workers", None),
        # Each device of this machine has a process, whose loader has its own workers.
        cores=max(cpu_cores() // max(trainer.num_devices, 1), 1),
        pin_memory=getattr(loader, "pin_memory", None) if device.type == "cuda" else None,
        fused_optimizer=_are_fused(trainer),
        weight_by_weight=any(
            group.get("foreach") is False and not group.get("fused")
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ),
        anomalies=torch.is_anomaly_enabled(),
        profiler=None if profiler == _NO_PROFILER else profiler,
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


def lists_of(parameters: Iterable[Any]) -> Lists:
    """Return the size of the tensor lists that an optimizer of ``parameters`` updates: this rank's part of them."""
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
    items = {tensor.element_size() for tensor in local}
    return Lists(sum(tensor.numel() for tensor in local), items.pop() if len(items) == 1 else None)

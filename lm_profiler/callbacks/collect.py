"""Collects the facts about loop, module, torch and machine when the loop has ended; no other module does that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from lm_profiler.analysis.conclude import main_precision
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.analysis.hardware.roofline import (
    Work,
    matmul_dtype,
    narrow_dtype,
    torch_name,
)
from lm_profiler.analysis.steps.summaries import mean_counts
from lm_profiler.analysis.why.operators import TensorListFacts
from lm_profiler.analysis.why.traced import broken_down
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.loop import Loop
from lm_profiler.callbacks.instruments.profiling_options import (
    TIMED_STEPS,
    ProfilingOptions,
)
from lm_profiler.callbacks.instruments.sent_step import copy_to_host, without_data
from lm_profiler.callbacks.instruments.tracer import TRACED, Tracer
from lm_profiler.callbacks.instruments.work import (
    LIMIT_IN_TRAINING_S,
    LIMIT_S,
    StepWork,
    batches_per_step,
    bytes_of_batch,
    count_tensors,
    phase_work,
    step_work,
)
from lm_profiler.callbacks.marks.batches import Elements
from lm_profiler.callbacks.model_sizes import (
    elements,
    embedding_weights,
    parameters_in_products,
    sizes_in_config,
)
from lm_profiler.measure.boundary import error_text, try_or_note
from lm_profiler.measure.collective_calls import reduces_in_backward
from lm_profiler.measure.counts.recompiles import (
    is_wrapped_by_compiler,
)
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.measure.device.ceilings import known_ceiling, known_copy_rate
from lm_profiler.measure.device.contention import contention
from lm_profiler.measure.device.environment import (
    cpu_cores,
    environment,
    float32_matmul_precision,
    matrix_units,
)
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import (
    ExpertLoad,
    Failure,
    ModelFacts,
    Settings,
    Status,
)
from lm_profiler.torch_names import FUSED_DEVICES

# If a batch has at least this many rows, taking them one by one from a dataset of tensors may cost more than the work
# on them.
_MANY_ROWS = 64


@dataclass(eq=False)
class Collector:
    """Makes the evidence of a run: by ``evidence`` when the loop ends, and ``collect_afterwards`` after all timing."""

    loop: Loop  # the loop of the run
    options: ProfilingOptions  # the options of the run
    has_batch: bool = False  # whether a batch is remembered
    # the batch without data, and, if the audit needs it, a copy on the host
    _shapes: _Remembered = field(default_factory=lambda: _Remembered())
    _copy: _Remembered = field(default_factory=lambda: _Remembered())

    def remember_batch(self, batch: Any) -> None:
        """Remember the shapes of ``batch``, and for an audit a copy of it.

        A batch may be of any type: if one of them cannot be made, an error says so when it is requested.
        """
        self.has_batch = True
        self._shapes.set(without_data, batch)
        if self.options.numerics.audit:
            self._copy.set(copy_to_host, batch)

    def evidence(
        self, measured: Measured, status: Status, failure: Failure | None = None
    ) -> Evidence:
        """Return the evidence of the run: what was ``measured``, and facts about its loop, model and machine.

        A fact that cannot be determined is None, and a note says why.
        """
        loop = self.loop
        device = loop.device
        world_size = loop.world_size
        multiprocessors = None
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(
                device
            ).multi_processor_count
        notes = list(measured.notes)
        return replace(
            _evidence_of(measured),
            **self.options.launch.facts(),
            verb=self.options.verb,
            loop=loop.kind,
            is_watched=self.options.watch is not None,
            status=status,
            failure=failure,
            steps_planned=self._steps_planned(measured),
            world_size=world_size,
            accumulate_grad_batches=loop.batches_per_step,
            precision=loop.precision,
            reduces_in_backward=reduces_in_backward(loop.wrapped_module),
            multiprocessors=multiprocessors,
            peak_flops_per_s=self.options.peak_flops_per_s,
            model=try_or_note("model", lambda: model_facts(loop), notes),
            experts=self._expert_loads(notes),
            environment=try_or_note(
                "environment", lambda: environment(device, world_size), notes
            ),
            contention=try_or_note(
                "contention", lambda: contention(measured.cpu_uses), notes
            ),
            settings=try_or_note("settings", self._settings, notes),
            lists=try_or_note(
                "lists", lambda: lists_of(_trained_parameters(loop.module)), notes
            ),
            notes=notes,
        )

    def _expert_loads(self, notes: list[str]) -> Sequence[ExpertLoad]:
        """Return the load of each layer of experts; empty without experts, or, with a note, if they cannot be read."""
        loads = try_or_note(
            "load of experts", lambda: expert_loads(self.loop.module), notes
        )
        return loads or ()

    def _steps_planned(self, measured: Measured) -> Mapping[str, int]:
        """Return the planned steps of each stage; for ``measure`` the fewest, if time decides their number."""
        planned = measured.steps_planned
        if self.options.stages.is_timed and "measure" in planned:
            return {**planned, "measure": TIMED_STEPS}
        return planned

    def collect_afterwards(
        self, evidence: Evidence, measured: Measured, tracer: Tracer
    ) -> Evidence:
        """Return ``evidence`` with FLOPs, rates of the machine, kernels and numerics. Call it on rank 0."""
        notes = list(evidence.notes)
        evidence = self._with_trace(evidence, tracer, notes)
        work = try_or_note("FLOPs", lambda: self._step_work(measured, notes), notes)
        evidence = self._with_work(evidence, measured, work, notes)
        was_timed = any(row.stage == "measure" for row in measured.rows)
        if was_timed and not self.loop.is_trial:
            evidence = self._with_rates(evidence, notes)
        if self.options.numerics.audit:
            audit = partial(self.loop.audit, self._copy.get)
            evidence = replace(evidence, numerics=try_or_note("numerics", audit, notes))
        duration_s = self.options.launch.facts()["duration_s"]
        return replace(evidence, duration_s=duration_s, notes=notes)

    def _with_trace(
        self, evidence: Evidence, tracer: Tracer, notes: list[str]
    ) -> Evidence:
        """Return ``evidence`` with the kernels of the trace, and with the data of its waterfall."""
        traced_work = try_or_note("trace", lambda: tracer.work(notes), notes)
        kernels = try_or_note("kernels", lambda: tracer.kernels(traced_work), notes)
        traced = None
        if traced_work is not None:
            traced = try_or_note("waterfall", lambda: broken_down(traced_work), notes)
        notes += without_kernels(self.loop.device, kernels)
        return replace(evidence, kernels=kernels, traced=traced)

    def _with_work(
        self,
        evidence: Evidence,
        measured: Measured,
        work: StepWork | None,
        notes: list[str],
    ) -> Evidence:
        """Return ``evidence`` with the ``work`` of a step, also by phase, and with the batches of that step."""
        by_phase = try_or_note(
            "floors", lambda: self._work_by_phase(measured, work), notes
        )
        flops = None
        by_dtype = Counter[str]()
        if work is not None:
            flops = work.flops
            for kind, flops_by_dtype in work.by_dtype.items():
                # The dtype of the optimizer is not that of the model.
                if kind != "optimizer":
                    by_dtype.update(flops_by_dtype)
        counts = mean_counts(measured.batch_counts, _counted_steps(measured))
        batches, elements = counts.batches, counts.elements
        if measured.seen_flops.flops is None or batches is None:
            # FLOPs were then counted on a copy, with all batches of a step.
            batches = batches_per_step(self.loop, self.options.verb)
            elements = self._elements_of(batches)
        return replace(
            evidence,
            flops=flops,
            by_dtype=by_dtype,
            work=by_phase or {},
            work_batches=batches,
            work_elements=elements,
        )

    def _with_rates(self, evidence: Evidence, notes: list[str]) -> Evidence:
        """Return ``evidence`` with the rates that the machine reaches, if something is compared with them."""
        device = self.loop.device
        ceilings = dict[str, float | None]()
        for dtype in _matmul_dtypes(evidence, device):
            if narrow_dtype(dtype) is not None:
                # Rates of products in 8 bits are not measured here.
                ceilings[dtype] = None
                continue
            find = partial(known_ceiling, device, getattr(torch, dtype), notes.append)
            ceilings[dtype] = try_or_note("ceiling", find, notes)
        copied_bytes_per_s = None
        if evidence.work or evidence.traced is not None:
            copied_bytes_per_s = try_or_note(
                "bandwidth", lambda: known_copy_rate(device), notes
            )
        return replace(
            evidence, ceilings=ceilings, copied_bytes_per_s=copied_bytes_per_s
        )

    def _settings(self) -> Settings:
        tensors = self._count_in_first_batch(count_tensors)
        settings = changeable_settings(self.loop)
        return settings.model_copy(update={"tensors_per_batch": tensors})

    def _elements_of(self, batches: int) -> int | None:
        """Return the elements of ``batches`` batches like the first one; None if its shapes are unknown."""
        elements = self._count_in_first_batch(Elements())
        return None if elements is None else elements * batches

    def _count_in_first_batch(self, count: Callable[[Any], int | None]) -> int | None:
        """Return what ``count`` counts in the first batch; None if the batch's type has no shapes that can be kept."""
        try:
            return count(self._shapes.get())
        except Exception:
            return None

    def _work_by_phase(
        self, measured: Measured, work: StepWork | None
    ) -> dict[str, Work]:
        """Return the FLOPs and bytes of each phase of a step on this rank."""
        loop = self.loop

        def count_bytes(batch: Any) -> int:
            batches = batches_per_step(loop, self.options.verb) // loop.world_size
            return bytes_of_batch(batch) * batches

        batch_bytes = self._count_in_first_batch(count_bytes)
        return phase_work(loop, work, measured.traffic, batch_bytes)

    def _step_work(self, measured: Measured, notes: list[str]) -> StepWork | None:
        """Return the FLOPs and bytes of a step; None, with a note, if they are unknown, or if they are not needed."""
        counted_steps = len(_counted_steps(measured))
        has_memory_stage = bool(measured.steps_planned.get("memory"))
        has_trace_stage = bool(measured.steps_planned.get("trace"))
        # If no real step was counted, another process counts, which takes some seconds: only if a trace needs the
        # FLOPs, and not if the run ended before the stage that was to count them.
        may_count_elsewhere = has_trace_stage and not has_memory_stage
        if counted_steps == 0 and not may_count_elsewhere:
            return None
        training_continues = not self.options.stages.stop_when_done
        limit_s = LIMIT_IN_TRAINING_S if training_continues else LIMIT_S
        try:
            return step_work(
                self.loop,
                self.options.verb,
                measured.seen_flops,
                counted_steps,
                self._shapes.get,
                limit_s,
            )
        except UncountableError as unknown:
            note = f"FLOPs unknown: {unknown}"
            if not has_memory_stage:
                note += "; --memory.steps=1 counts them in a real step"
            notes.append(note)
            return None


@dataclass(eq=False)
class _Remembered:
    """A copy of the first batch, or the reason why there is none.

    The error is not stored: its frames would keep the program's batches, loaders and workers alive.
    """

    value: Any = None
    missing_because: str | None = "there was no batch"

    def set(self, make: Callable[[Any], Any], batch: Any) -> None:
        """Remember what ``make`` returns for ``batch``."""
        try:
            self.value = make(batch)
            self.missing_because = None
        except UncountableError as error:
            self.missing_because = str(error)
        except Exception as error:
            self.missing_because = error_text(error)

    def get(self) -> Any:
        """Return what is remembered; raise UncountableError if there is nothing."""
        if self.missing_because is not None:
            raise UncountableError(self.missing_because)
        return self.value


def _evidence_of(measured: Measured) -> Evidence:
    """Return the evidence in ``measured``, without the fields that only this module and the merging of ranks need."""
    return Evidence(
        **{entry.name: getattr(measured, entry.name) for entry in fields(Evidence)}
    )


def _trained_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _matmul_dtypes(evidence: Evidence, device: torch.device) -> list[str]:
    """Return torch's names of the dtypes of all matmuls: the dtype of the run, and the dtypes that were seen."""
    names: list[str] = []
    run_dtype = matmul_dtype(
        main_precision(evidence), float32_matmul_precision(device.type)
    )
    if run_dtype is not None:
        names.append(torch_name(run_dtype))
    for work in evidence.work.values():
        names.extend(work.flops or {})
    return list(dict.fromkeys(names))


def without_kernels(device: torch.device, kernels: KernelTable | None) -> list[str]:
    """Return the note that a trace of ``device`` shows only the host; empty if it shows kernels."""
    if kernels is None or kernels.source == "kernels" or device.type not in TRACED:
        return []
    note = (
        f"the trace has PyTorch's operators but no kernels: the driver of this {device.type} device does not permit "
        "profiling (on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN)"
    )
    return [note]


def _counted_steps(measured: Measured) -> list[int]:
    """Return the numbers of the steps in which FLOPs are counted: those of the stage ``memory``."""
    return sorted({row.step for row in measured.rows if row.stage == "memory"})


def model_facts(loop: Loop) -> ModelFacts:
    """Return the record's facts about the trained module: its class, parameters, precision, optimizers and sizes."""
    module = loop.module
    written_module = module
    while is_wrapped_by_compiler(written_module):
        written_module = next(written_module.children())
    parameters = list(module.parameters())
    tensors = [*parameters, *module.buffers()]
    in_embeddings = embedding_weights(module).values()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return ModelFacts(
        class_path=f"{type(written_module).__module__}.{type(written_module).__qualname__}",
        parameters=elements(parameters),
        parameters_without_embedding=elements(parameters) - elements(in_embeddings),
        parameters_in_products=parameters_in_products(module),
        trainable_parameters=elements(trained),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        precision=loop.precision,
        optimizers=[
            type(optimizer).__name__.lstrip("_") for optimizer in loop.optimizers
        ],
        accumulate_grad_batches=loop.batches_per_step,
        compiled=loop.is_compiled,
        without_optimizer=_modules_without_optimizer(loop),
        **sizes_in_config(module),
    )


def _modules_without_optimizer(loop: Loop) -> list[str]:
    """Return the paths of the outermost modules whose weights all have gradients that no optimizer uses.

    Empty if they are unknown, because an optimizer does not hold the weights themselves but, for example, shards.
    """
    if loop.holdings != "whole" or not loop.optimizers:
        return []
    updated: set[int] = set()  # identities of weights
    for optimizer in loop.optimizers:
        for group in optimizer.param_groups:
            updated.update(id(weight) for weight in group["params"])
    if not any(id(weight) in updated for weight in loop.module.parameters()):
        return []
    paths: list[str] = []
    for path, submodule in loop.module.named_modules():
        if any(path.startswith(f"{outer_path}.") for outer_path in paths):
            continue
        weights = list(submodule.parameters())
        are_unused = [
            weight.grad is not None and id(weight) not in updated for weight in weights
        ]
        if path and are_unused and all(are_unused):
            paths.append(path)
    return paths


def expert_loads(module: object) -> list[ExpertLoad]:
    """Return the load of each layer of experts that has received tokens, if ``module`` reports it.

    The module's ``expert_load`` returns, for each layer, how many tokens each of its experts received in training.
    """
    report_load = getattr(module, "expert_load", None)
    if not callable(report_load):
        return []
    loads = []
    for layer, tokens in enumerate(report_load()):
        if any(tokens):
            loads.append(ExpertLoad.from_tokens(layer, tokens))
    return loads


def changeable_settings(loop: Loop) -> Settings:
    """Return the settings that a finding may advise to change, and what the machine offers for them (TF32, cores).

    ``conclude`` adds the settings that follow from the figures.
    """
    loader = loop.loader
    device = loop.device
    units = matrix_units(device)
    uses_tf32 = None
    if units.tf32:
        uses_tf32 = float32_matmul_precision() != "highest"
    pins_memory = None
    if device.type == "cuda":
        pins_memory = getattr(loader, "pin_memory", None)
    return Settings(
        precision=loop.precision,
        tf32=uses_tf32,
        half_precision=units.half_precision,
        compiled=loop.is_compiled,
        num_workers=loop.num_workers,
        restarts_loader=loop.restarts_loader,
        validates_with_gradients=loop.validates_with_gradients,
        validation_batch_size=loop.validation_batch_size,
        fetches_single_rows=_fetches_single_rows(loader),
        persistent_workers=getattr(loader, "persistent_workers", None),
        # Each device of this machine has a process, whose loader has its own workers.
        cores=max(cpu_cores() // max(loop.ranks_of_host, 1), 1),
        pin_memory=pins_memory,
        fused_optimizer=_are_fused(loop),
        weight_by_weight=_updates_weight_by_weight(loop.optimizers),
        parameter_groups=sum(
            len(optimizer.param_groups) for optimizer in loop.optimizers
        ),
        different_groups=_count_different_groups(loop.optimizers),
        anomalies=torch.is_anomaly_enabled(),
        profiler=loop.users_profiler,
    )


def _fetches_single_rows(loader: Any) -> bool:
    """Return whether ``loader`` takes many rows for a batch, one by one, from a ``TensorDataset``."""
    if type(loader) is not DataLoader:  # another class may fetch batches in its own way
        return False
    dataset = loader.dataset
    while type(dataset) is Subset:  # such as ``random_split`` returns
        dataset = dataset.dataset
    is_of_tensors = type(dataset) is TensorDataset
    return is_of_tensors and (loader.batch_size or 0) >= _MANY_ROWS


def _updates_weight_by_weight(optimizers: Iterable[Any]) -> bool:
    """Return whether an optimizer is set to update one weight after another (``foreach=False``)."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach") is False and not group.get("fused"):
                return True
    return False


def _count_different_groups(optimizers: Iterable[Any]) -> int:
    """Return how many groups of parameters the optimizers would need: those that differ in an option."""
    different: set[tuple[int, str]] = set()
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            options = dict(group)
            for name in ("params", "param_names", "name"):
                options.pop(name, None)
            different.add((number, repr(sorted(options.items()))))
    return len(different)


def _are_fused(loop: Loop) -> bool | None:
    """Return whether all optimizers are fused; None if there is none, or if one of them cannot be fused."""
    optimizers = loop.optimizers
    can_be_fused = all("fused" in optimizer.defaults for optimizer in optimizers)
    if not optimizers or not can_be_fused:
        return None
    if all(optimizer.defaults["fused"] for optimizer in optimizers):
        return True
    if not loop.can_fuse_optimizers or loop.device.type not in FUSED_DEVICES:
        return None
    for optimizer in optimizers:
        refuses = optimizer.defaults.get("foreach") or optimizer.defaults.get(
            "differentiable"
        )
        if refuses or not _has_floating_weights_alone(optimizer):
            return None
    return False


def _has_floating_weights_alone(optimizer: Any) -> bool:
    """Return whether all weights are floating-point tensors: torch refuses ``fused=True`` for complex ones."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if not torch.is_floating_point(weight):
                return False
    return True


def lists_of(parameters: Iterable[Any]) -> TensorListFacts:
    """Return the size of the tensor lists that an optimizer of ``parameters`` updates: this rank's part of them."""
    local_parts = []
    for parameter in parameters:
        is_sharded = hasattr(parameter, "to_local")
        local_parts.append(parameter.to_local() if is_sharded else parameter)
    element_bytes = {tensor.element_size() for tensor in local_parts}
    if len(element_bytes) != 1:
        return TensorListFacts(elements(local_parts), item_bytes=None)
    return TensorListFacts(elements(local_parts), item_bytes=element_bytes.pop())

"""The verdict on a run: whether it is steady, how much of the hardware it uses, what binds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from numpy.typing import NDArray

from lm_profiler.analysis.hardware.advice import Settings
from lm_profiler.analysis.hardware.peaks import Dtype, matmul_dtype, peak
from lm_profiler.analysis.hardware.rates import GIVEN
from lm_profiler.analysis.hardware.utilisation import share_of_peak
from lm_profiler.analysis.hardware.verdict import Evidence, what_binds
from lm_profiler.analysis.steps.statistics import median_rank
from lm_profiler.analysis.steps.typical import agree, resamples
from lm_profiler.callbacks.namespaces import is_a
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.environment import cpu_cores, matrix_units
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.quantities import PHASES, TIMED, counted
from lm_profiler.record.run import Contention, Flops, Ranks, Steadiness, Utilisation, Verdict
from lm_profiler.record.steps import StepRow

_FUSED_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "xpu"})
"""Devices with fused optimizers since torch 2.8 (torch.utils._foreach_utils)."""

_PRECISIONS = {"float32": "32", "bfloat16": "bf16", "float16": "16"}
"""Of Lightning, for torch's names."""

_NO_TIME = 1e-12  # seconds: avoids a division by zero

_BEYOND = 1.05
"""A share of the measured matmul rate that noise cannot explain."""


def run_dtype(trainer: Trainer, seen: Mapping[str, int]) -> Dtype | None:
    """The dtype in which this run multiplies most, as ``analysis.peaks`` names them.

    ``seen`` are its FLOPs by dtype, by torch's names: a module may enter autocast by itself, of which the Trainer's
    precision knows nothing. That counts where they are unknown.
    """
    precision = str(trainer.precision)
    if any(seen.values()):
        precision = _PRECISIONS.get(max(seen, key=seen.__getitem__), "")
    return matmul_dtype(precision, float32_matmul_precision(trainer.strategy.root_device.type))


def torch_name(dtype: Dtype) -> str:
    """Of the factors that are multiplied in ``dtype``: TF32 is a way to multiply float32."""
    return "float32" if dtype == "tf32" else dtype


def judge_utilisation(
    flops: Flops | None,
    step_s: float | None,
    device_name: str,
    dtype: Dtype | None,
    devices: int,
    ceiling_flops_per_s: float | None,
    peak_flops_per_s: float | None,
) -> Utilisation | None:
    """How close a step of ``flops`` (all ranks) is to ``devices`` devices; ``peak_flops_per_s`` overrides the table."""
    if flops is None or not step_s:
        return None
    known = peak(device_name, dtype) if dtype is not None else None
    rate, source = (None, None) if known is None else (known.flops_per_s, known.source)
    if peak_flops_per_s is not None:
        rate, source = peak_flops_per_s, GIVEN
    reached = share_of_peak(flops.all, step_s, ceiling_flops_per_s, devices)
    if reached is not None and reached > _BEYOND:
        ceiling_flops_per_s = reached = None  # no step beats the machine: something else used it while it was measured
    return Utilisation(
        flops=flops,
        dtype=dtype,
        peak_flops_per_s=rate,
        peak_source=source,
        mfu=share_of_peak(flops.model, step_s, rate, devices),
        hfu=share_of_peak(flops.all, step_s, rate, devices),
        ceiling_flops_per_s=ceiling_flops_per_s,
        of_ceiling=reached,
    )


def judge(
    steps: Sequence[StepRow],
    unsure: Unsure | None,
    has_stream: bool,
    device_idle: float | None,
    utilisation: Utilisation | None,
    settings: Settings,
    kernels: KernelTable | None = None,
    ranks: Ranks | None = None,
) -> Verdict | None:
    """What binds the run whose typical ``steps`` these are; None where no step was measured.

    ``kernels`` are its trace's, where there is one; ``ranks`` says who waits for whom. ``unsure`` takes the verdict
    back to what is certain.
    """
    device, host = (
        np.array([[row.time(part, clock) for part in TIMED] for row in steps]) for clock in ("device", "host")
    )
    median_s = float(np.median(device[:, -1])) if steps else 0.0
    if not median_s > 0.0:
        return None
    reached = None
    if utilisation is not None:
        reached = utilisation.of_ceiling if utilisation.of_ceiling is not None else utilisation.hfu

    def of(some: Sequence[int] | NDArray[np.intp]) -> Verdict:
        """From the mean times of ``some`` steps: means add up. The utilisation goes with their median."""
        faster = median_s / max(float(np.median(device[some, -1])), _NO_TIME)
        evidence = Evidence(
            step_s=max(float(device[some, -1].mean()), _NO_TIME),
            phases_s=dict(zip(PHASES, device[some].mean(axis=0).tolist(), strict=False)),
            host_phases_s=dict(zip(PHASES, host[some].mean(axis=0).tolist(), strict=False)),
            has_device_stream=has_stream,
            host_bound_fraction=device_idle,
            utilisation=None if reached is None else reached * faster,
            idle_share=_idle_share(kernels),
            memory_bound_share=None if kernels is None else kernels.memory_bound_share,
            communication_share=_exposed_share(kernels, ranks),
            traced=kernels is not None,
            ranks=ranks,
            settings=settings,
        )
        return what_binds(evidence)

    verdict = of(range(len(steps)))
    if unsure is None:
        return verdict
    drawn = resamples(len(steps)) if unsure.resamples_tell else ()
    return _certain(verdict, [of(some) for some in drawn], unsure)


def _exposed_share(kernels: KernelTable | None, ranks: Ranks | None) -> float | None:
    """What no compute hides: as the ranks say it, without their waiting; else as rank 0's trace has it."""
    if ranks is not None and ranks.exposed_s and ranks.step_s > 0.0:
        return sum(ranks.exposed_s.values()) / ranks.step_s
    return None if kernels is None else kernels.communication_share


def _idle_share(kernels: KernelTable | None) -> float | None:
    """Of the traced steps, on the device; None where none was traced."""
    if kernels is None or kernels.source != "kernels" or not kernels.window_s:
        return None
    return sum(phase.idle_s for phase in kernels.phases.values()) / kernels.window_s


@dataclass(frozen=True)
class Unsure:
    """Why the figures carry no verdict, and what to do; ``resamples_tell`` that what all of those say is certain."""

    because: str
    remedy: str
    resamples_tell: bool = False


def why_unsure(steadiness: Steadiness | None, steps: int, contention: Contention | None) -> Unsure | None:
    """None where the figures of ``steps`` steps carry what they say."""
    if contention is not None and contention.shared:
        # It may change what binds as well: shares are of the times that were had.
        because = "the machine was shared while measuring"
        return Unsure(because, "Measure again while nothing else uses this machine.")
    if steadiness is None or steadiness.word != "noisy":
        return None
    if median_rank(steps) is None:
        because = f"{counted(steps, 'step')} are too few to tell"
        return Unsure(because, "Measure more steps (--stages.measure_steps=20).")
    remedy = "Measure again with more steps (--stages.until_ci=0.02), and while nothing else uses this machine."
    return Unsure("the steps differ too much to tell", remedy, resamples_tell=True)


def _certain(verdict: Verdict, answers: Sequence[Verdict], unsure: Unsure) -> Verdict:
    """What of ``verdict`` is the answer of nearly all resamples; and first the remedy."""
    if not agree([answer.bound_by for answer in answers], verdict.bound_by):
        return Verdict(bound_by=None, share=None, evidence=unsure.because, advice=unsure.remedy, certain=False)
    advised = agree([answer.advice for answer in answers], verdict.advice)
    advice = f"{unsure.remedy} Then: {verdict.advice}" if advised else unsure.remedy
    return verdict.model_copy(update={"advice": advice})


def settings_of(
    trainer: Trainer,
    module: LightningModule,
    tokens_per_batch: int | None,
    recomputes: bool | None,
    memory_free_share: float | None,
) -> Settings:
    """What is switched on already, so that nobody is told to switch it on."""
    loader, device = _loader(trainer), trainer.strategy.root_device
    on_cuda = device.type == "cuda"
    units = matrix_units(device)
    return Settings(
        precision=str(trainer.precision),
        tf32=float32_matmul_precision() != "highest" if units.tf32 else None,
        half_precision=units.half_precision,
        compiled=is_compiled_in(module),
        num_workers=workers_of(trainer),
        cores=max(cpu_cores() // max(trainer.num_devices, 1), 1),
        pin_memory=getattr(loader, "pin_memory", None) if on_cuda else None,
        fused_optimizer=_are_fused(trainer),
        checkpointing=recomputes,
        tokens_per_batch=tokens_per_batch,
        memory_free_share=memory_free_share,
    )


def free_share(peak_bytes: int | None, device_bytes: int | None) -> float | None:
    """Share of the device's memory that the peak of its tensors left free; None on the CPU."""
    return None if peak_bytes is None or not device_bytes else 1.0 - peak_bytes / device_bytes


def _are_fused(trainer: Trainer) -> bool | None:
    """None where they cannot be: without an optimizer, for one that has no fused kernel, or where it is refused."""
    optimizers = trainer.optimizers
    if not optimizers or any("fused" not in optimizer.defaults for optimizer in optimizers):
        return None
    if all(optimizer.defaults["fused"] for optimizer in optimizers):
        return True
    # Lightning cannot clip for a fused optimizer then (2.6.6: MixedPrecision.clip_gradients).
    clips = trainer.gradient_clip_val and is_a(trainer.precision_plugin, "MixedPrecision")
    refused = any(optimizer.defaults.get(name) for optimizer in optimizers for name in ("foreach", "differentiable"))
    return None if clips or refused or trainer.strategy.root_device.type not in _FUSED_DEVICES else False


def workers_of(trainer: Trainer) -> int | None:
    """Processes of the loader; None where it does not say."""
    return getattr(_loader(trainer), "num_workers", None)


def _loader(trainer: Trainer) -> Any:
    """The first loader of the verb that runs."""
    loaders = (trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders)
    loader = next((each for each in loaders if each is not None), None)
    return loader[0] if isinstance(loader, (list, tuple)) and loader else loader

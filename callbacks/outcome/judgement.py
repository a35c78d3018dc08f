"""The verdict on a run: whether it is steady, how much of the hardware it uses, what binds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from lm_profiler.analysis.hardware.device_rates import GIVEN, Dtype, matmul_dtype, peak, share_of_peak
from lm_profiler.callbacks.namespaces import is_a
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.environment import cpu_cores, matrix_units
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.run import Flops, RunRecord, Settings, Utilisation

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


def settings_of(trainer: Trainer, record: RunRecord, batches: float) -> Settings:
    """What is switched on already, so that nobody is told to switch it on; a step has ``batches``, of all ranks."""
    loader, device = _loader(trainer), trainer.strategy.root_device
    on_cuda = device.type == "cuda"
    units, use, rate = matrix_units(device), record.utilisation, record.throughput
    peak_bytes = record.memory.measured.allocated_peak if record.memory is not None else None
    profiler = type(trainer.profiler).__name__  # type: ignore[attr-defined]
    half = use is not None and use.dtype in ("bfloat16", "float16", "float64")
    return Settings(
        # Also by the module's own autocast.
        precision=str(use.dtype if half and use is not None else trainer.precision),
        tf32=float32_matmul_precision() != "highest" if units.tf32 else None,
        half_precision=units.half_precision,
        compiled=is_compiled_in(trainer.lightning_module),
        num_workers=workers_of(trainer),
        cores=max(cpu_cores() // max(trainer.num_devices, 1), 1),
        pin_memory=getattr(loader, "pin_memory", None) if on_cuda else None,
        fused_optimizer=_are_fused(trainer),
        checkpointing=None if use is None else use.flops.recomputation > 0,
        tokens_per_batch=_each(None if rate is None else rate.tokens_per_step, batches),
        samples_per_batch=_each(None if rate is None else rate.samples_per_step, batches),
        memory_free_share=free_share(peak_bytes, record.environment.device_bytes if record.environment else None),
        anomalies=torch.is_anomaly_enabled(),
        profiler=None if profiler in ("PassThroughProfiler", "PhaseProfiler") else profiler,
        tracing=bool(record.steps_planned.get("trace")),
    )


def _each(count: int | None, batches: float) -> int | None:
    return None if count is None else round(count / max(batches, 1))


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

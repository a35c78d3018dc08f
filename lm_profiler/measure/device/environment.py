"""What the figures were measured on: versions, device, flags, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lm_profiler.measure.device.nvml import initialized
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.run import Environment

_PACKAGES = ("lm_profiler", "torch", "lightning", "numpy")


def environment(device: torch.device, world_size: int) -> Environment:
    """Facts of this process, its device and its source."""
    return Environment(
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_count=cpu_cores(),
        threads=torch.get_num_threads(),
        device_type=device.type,
        device_name=device_name(device),
        device_bytes=_device_bytes(device),
        driver=_driver(device),
        world_size=world_size,
        flags={
            "float32_matmul_precision": float32_matmul_precision(device.type),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        git_commit=_git_commit(),
    )


def cpu_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class MatrixUnits:
    """What a device multiplies faster than float32. ``tf32``: whether it has that mode; None is none, or unknown."""

    tf32: bool = False
    half_precision: Literal["bf16-mixed", "16-mixed"] | None = None


def matrix_units(device: torch.device) -> MatrixUnits:
    """By compute capability: fp16 since Volta (7.0), bf16 and TF32 since Ampere (8.0). Other makers' are unknown.

    Source: CUDA C++ Programming Guide, "Arithmetic Instructions" and "Warp Matrix Functions". Left out: Turing's GTX 16
    cards (7.5), which have no tensor cores but multiply fp16 at twice the rate.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return MatrixUnits()
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return MatrixUnits(True, "bf16-mixed")
    return MatrixUnits(False, "16-mixed" if capability >= (7, 0) else None)


def device_name(device: torch.device) -> str:
    """The device's own name, as its driver says it; on the CPU, the processor's."""
    if device.type == "cpu":
        return cpu_name()
    if device.type == "mps":
        return str(torch.backends.mps.get_name())
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # "lightning" may be there as pytorch-lightning
        return "unknown"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _device_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    return None


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    nvml = initialized()
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # no NVML here, or an old pynvml that has another
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _git_commit() -> str | None:
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""Reads the environment of a run: versions, device, flags, commit, and the precision of float32."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from lm_profiler.measure.device.nvml import initialized
from lm_profiler.record.run_record import Environment

_T = TypeVar("_T")

_PACKAGES = ("lm_profiler", "torch", "lightning", "numpy")


def environment(device: torch.device, world_size: int) -> Environment:
    """Return the facts about this machine and its software for the record."""
    return Environment(
        versions={
            "python": platform.python_version(),
            **{name: _package_version(name) for name in _PACKAGES},
        },
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_count=cpu_cores(),
        threads=torch.get_num_threads(),
        device_type=device.type,
        device_name=device_name(device),
        device_bytes=_device_bytes(device),
        driver=_driver_version(device),
        world_size=world_size,
        flags={
            "float32_matmul_precision": float32_matmul_precision(device.type),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        git_commit=_commit_of_process(),
    )


def cpu_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class MatrixUnits:
    """The precisions that a device multiplies faster than float32."""

    tf32: bool = False  # whether float32 matmuls can run as TF32
    # the fastest precision of 16 bits; None if there is none, or if it is unknown
    half_precision: Literal["bf16-mixed", "16-mixed"] | None = None


def matrix_units(device: torch.device) -> MatrixUnits:
    """Return the matrix units of a CUDA device; those of other devices are unknown.

    They follow from its compute capability: fp16 from 7.0 (Volta), bf16 and TF32 from 8.0 (Ampere). Source: CUDA C++
    Programming Guide, "Arithmetic Instructions" and "Warp Matrix Functions". Ignored: the GTX 16 cards of Turing (7.5)
    have no tensor cores, but multiply fp16 at twice the rate.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return MatrixUnits()
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return MatrixUnits(tf32=True, half_precision="bf16-mixed")
    if capability >= (7, 0):
        return MatrixUnits(half_precision="16-mixed")
    return MatrixUnits()


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives the device; on the CPU, the processor's name."""
    if device.type == "cpu":
        return cpu_name()
    if device.type == "mps":
        return str(torch.backends.mps.get_name())
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return device.type


@cache  # because it reads the file system, and a run calls it twice
def _package_version(package: str) -> str:
    """Return the version of an installed package; "unknown" without one."""
    if package == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # such as "lightning", if it is installed as pytorch-lightning
        return "unknown"


def cpu_name() -> str:
    """Return the name of the processor, from Linux, or on other systems from Python."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _device_bytes(device: torch.device) -> int | None:
    """Return the memory of the device; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    return None


def _driver_version(device: torch.device) -> str | None:
    """Return the version of the GPU driver; None without one."""
    if device.type != "cuda":
        return None
    nvml = initialized()
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # there is no NVML, or an old pynvml with another interface
        return None


def git_commit() -> str | None:
    """Return the commit of the current folder, followed by ``-dirty`` if files were changed; None without git."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


# Cached, because git takes some 20 ms, and later commits do not change the code that was imported.
_commit_of_process = cache(git_commit)

# values of the older setting by those of the newer one
_OLDER_WORDS = {"ieee": "highest", "none": "highest", "tf32": "high", "bf16": "medium"}


def float32_matmul_precision(device_type: str = "cuda") -> str:
    """Return ``highest``, ``high`` (TF32) or ``medium`` (bf16): the precision of float32 matmuls on ``device_type``.

    ``torch.get_float32_matmul_precision()`` raises if the setting that torch 2.9 introduced
    (``torch.backends.cuda.matmul.fp32_precision``) was used; then the new setting is read. "unknown" if it has a value
    that is not known here.
    """
    precision = _older_setting(torch.get_float32_matmul_precision)
    if precision is not None:
        return precision
    backends: Any = torch.backends  # torch has no types for a part of it
    library = backends.mkldnn if device_type == "cpu" else backends.cuda
    return _OLDER_WORDS.get(library.matmul.fp32_precision, "unknown")


@contextmanager
def exact_float32() -> Iterator[None]:
    """Within this context float32 is exact: no TF32 or bf16 inside matmuls and convolutions."""
    libraries: Any = torch.backends  # torch has no types for a part of it
    cuda, cudnn, mkldnn = libraries.cuda, libraries.cudnn, libraries.mkldnn
    operators = [
        cuda.matmul,
        cudnn.conv,
        cudnn.rnn,
        mkldnn.matmul,
        mkldnn.conv,
        mkldnn.rnn,
    ]
    matmul_precision = _older_setting(torch.get_float32_matmul_precision)
    allows_tf32 = _older_setting(lambda: cudnn.allow_tf32)
    precisions = [operator.fp32_precision for operator in operators]
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for operator in operators:
        operator.fp32_precision = "ieee"
    try:
        yield
    finally:
        if matmul_precision is not None:
            torch.set_float32_matmul_precision(matmul_precision)
        if allows_tf32 is not None:
            cudnn.allow_tf32 = allows_tf32
        for operator, precision in zip(operators, precisions, strict=True):
            operator.fp32_precision = precision


def _older_setting(read: Callable[[], _T]) -> _T | None:
    """Return the value of an older setting; None if the newer one was used, because then the older one raises."""
    try:
        return read()
    except RuntimeError:
        return None

"""Asks a GPU's driver through NVIDIA's management library (NVML), without CUDA.

Any module named ``pynvml`` is used: an old one lacks functions and constants of nvidia-ml-py, or takes other arguments.
So any exception means that the answer is unknown.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from lm_profiler.torch_names import NVML_INDEX


@dataclass(frozen=True)
class Gpu:
    """A GPU: its NVML handle, the module ``nvml`` to ask with, and its UUID."""

    handle: Any
    nvml: Any
    uuid: str

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return NVML's answer about this GPU; None where the GPU, driver or pynvml does not support ``function``."""
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except Exception:  # also where the GPU is lost for a moment
            return None


def initialized(nvml: Any = None) -> Any:
    """Return ``nvml``, or else ``pynvml``, initialized; None where it is not installed or finds no driver."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()  # never shut down: NVML counts its users, and handles must stay valid
    except Exception:
        return None
    return nvml


def gpu_of(device: torch.device, nvml: Any = None, properties: Any = None) -> Gpu | None:
    """Return the GPU of a CUDA device; None off NVIDIA, without NVML, and under MIG, where NVML has the whole card's
    figures.

    Call it from the thread that uses CUDA. Tests hand in ``nvml`` and the ``properties`` of the device.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # CUDA and NVML number devices differently, and CUDA_VISIBLE_DEVICES is CUDA's alone: only the UUID is the same.
    uuid = str((properties or torch.cuda.get_device_properties(device)).uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    nvml = initialized(nvml)
    try:
        gpu = Gpu(_handle(nvml, uuid), nvml, uuid)
    except Exception:
        return None
    sliced = gpu.ask("nvmlDeviceGetMigMode")  # None where the GPU has no MIG
    return None if sliced is not None and sliced[0] else gpu


def compute_capability(device: torch.device, nvml: Any = None) -> tuple[int, int] | None:
    """Return a GPU's compute capability; None where unknown. It is not opened, so that this process can still fork."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    nvml = initialized(nvml)
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(NVML_INDEX.find()(device))
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception:
        return None
    return major, minor


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except TypeError:  # pynvml before 11 takes bytes alone
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())

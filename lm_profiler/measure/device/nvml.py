"""NVIDIA's management library: what a GPU's driver tells without CUDA.

What answers is whatever module ``pynvml`` is: an old one beside nvidia-ml-py lacks functions and constants, or wants
other arguments. Whatever it raises means that the answer is unknown.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from lm_profiler.torch_names import NVML_INDEX


@dataclass(frozen=True)
class Gpu:
    """A card: its ``handle``, ``nvml`` (its functions, as ``pynvml`` has them) to ask with, and its UUID."""

    handle: Any
    nvml: Any
    uuid: str

    def ask(self, function: str, *arguments: Any) -> Any:
        """What ``function`` says of the card; None where this GPU, driver or pynvml does not support it."""
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except Exception:  # or the card is lost for the moment
            return None


def initialized(nvml: Any = None) -> Any:
    """``nvml``, or else ``pynvml``, ready to be asked; None where it is not there, or there is no driver for it."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()  # never shut down: NVML counts its users, and handles must stay valid
    except Exception:
        return None
    return nvml


def gpu_of(device: torch.device, nvml: Any = None, properties: Any = None) -> Gpu | None:
    """Of a CUDA device; None off NVIDIA, without NVML, and under MIG, where the figures are of the whole card.

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
    sliced = gpu.ask("nvmlDeviceGetMigMode")  # None of a card that cannot be
    return None if sliced is not None and sliced[0] else gpu


def compute_capability(device: torch.device, nvml: Any = None) -> tuple[int, int] | None:
    """Of a CUDA device, which is not opened: a copy of a process that has one open is of no use. None where unknown."""
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

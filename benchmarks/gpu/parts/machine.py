"""What is measured on, as every run's record says it too."""

from __future__ import annotations

import importlib.metadata
import os

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from lm_profiler.measure.device.environment import environment
from lm_profiler.usage_error import UsageError


def run(place: Place, findings: Findings) -> None:
    if not place.on_cpu and not torch.cuda.is_available():
        raise UsageError("benchmarks.gpu: expected a CUDA device, given none; --on_cpu tries the command itself")
    found = environment(place.device, 1).model_dump()
    for package in ("transformers", "triton", "nvidia-ml-py"):
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found["versions"][package] = "none"
    found["cuda"] = torch.version.cuda
    found["cuda_visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    findings.add(**found)

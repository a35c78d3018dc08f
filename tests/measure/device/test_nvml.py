"""What NVML says of a GPU, with a fake of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lm_profiler.measure.device.nvml import compute_capability


def test_the_compute_capability_is_of_the_device_that_cuda_calls_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda card: [8, card],
    )
    assert compute_capability(torch.device("cuda", 0), nvml) == (8, 2)
    assert compute_capability(torch.device("cuda", 1), nvml) == (8, 1)
    assert compute_capability(torch.device("cpu"), nvml) is None
    assert compute_capability(torch.device("cuda", 0), SimpleNamespace(nvmlInit=lambda: None)) is None


@pytest.mark.gpu
def test_a_gpu_has_the_capability_that_cuda_tells() -> None:
    device = torch.device("cuda", 0)
    assert compute_capability(device) == torch.cuda.get_device_capability(device)

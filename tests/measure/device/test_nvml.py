"""What is read from NVML, with a fake of it."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm_profiler.measure.device.nvml import Gpu, compute_capability, gpu_of, gpu_sharing
from lm_profiler.record.run_record import GpuSharing


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
def test_a_gpu_has_the_capability_that_cuda_reports() -> None:
    device = torch.device("cuda", 0)
    assert compute_capability(device) == torch.cuda.get_device_capability(device)


ME = os.getpid()


class NVMLError(Exception):
    """As NVML raises it."""

    def __init__(self, value: int) -> None:
        self.value = value


class FakeNvml:
    """One GPU with ``running`` processes (bytes held, by pid) and ``samples`` (pid, seconds, per cent)."""

    def __init__(self, running: Any, samples: Any) -> None:
        self.running, self.samples = running, samples

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if isinstance(self.running, Exception):
            raise self.running
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.running.items()]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[Any]:
        if isinstance(self.samples, Exception):
            raise self.samples
        return [SimpleNamespace(pid=pid, timeStamp=int(at_s * 1e6), smUtil=used) for pid, at_s, used in self.samples]


def neighbours(running: Any, samples: Any) -> GpuSharing | None:
    """Return the other processes found during measured steps that begin at second 1000."""
    return gpu_sharing(Gpu("handle", FakeNvml(running, samples), "GPU-0"), 1000.0)


GIB = 2**30


def test_other_processes_have_their_time_and_memory() -> None:
    samples = [(ME, 1001, 60), (5, 1001, 30), (5, 1002, 40), (6, 1001, 4), (6, 1002, 0), (5, 999, 100)]
    found = neighbours({ME: GIB, 5: 2 * GIB, 6: GIB}, samples)
    assert (found.processes, found.memory_bytes) == (2, 3 * GIB)
    assert found.utilisation == pytest.approx(0.35 + 0.02)


@pytest.mark.parametrize(
    "running, samples, found",
    [
        # A process that ended is listed.
        ({ME: GIB}, [(5, 1001, 50)], GpuSharing(processes=1, utilisation=0.5, memory_bytes=0)),
        # Inside a container, whose process ids are others, only their number is known.
        ({4001: GIB, 4002: GIB}, [(4001, 1001, 50)], GpuSharing(processes=1, utilisation=None, memory_bytes=None)),
        ({4001: GIB}, [], GpuSharing(processes=0, utilisation=None, memory_bytes=None)),
        ({}, [], None),
    ],
)
def test_other_processes_as_far_as_they_are_known(running: Any, samples: Any, found: GpuSharing | None) -> None:
    assert neighbours(running, samples) == found


@pytest.mark.parametrize("samples", [[(ME, 1001, 90)], [], NVMLError(6)])
def test_without_other_processes_the_list_is_empty(samples: Any) -> None:
    assert neighbours({ME: GIB}, samples) == GpuSharing(processes=0, utilisation=0.0, memory_bytes=0)


@pytest.mark.parametrize("error", [NVMLError(3), AttributeError("an old pynvml")])
def test_figures_that_nvml_lacks_are_unknown(error: Exception) -> None:
    assert neighbours(error, []) is None
    assert neighbours({ME: GIB, 5: None}, error) == GpuSharing(processes=1, utilisation=None, memory_bytes=None)


def test_an_nvml_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    nvml = FakeNvml({}, [])
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: answered.wait() and [])
    assert gpu_sharing(Gpu("handle", nvml, "GPU-0"), 1000.0, patience_s=0.01) is None
    answered.set()
    assert gpu_of(torch.device("cpu")) is None

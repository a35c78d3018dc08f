"""What is measured on, as every run's record says it too, and all that the machine says of itself (``about.txt``)."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.place import Place
from lm_profiler.measure.device.environment import environment
from lm_profiler.record.files import write_whole
from lm_profiler.usage_error import UsageError

COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q"),
    ("nvidia-smi", "topo", "-m"),
    ("lscpu",),
    ("free", "-m"),
    ("df", "-h", ".", "/tmp", "/dev/shm"),
    ("cc", "--version"),
)
FILES = (
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",  # RmProfilingAdminOnly: whether kernels may be traced, with CapEff
    "/proc/self/status",
    "/proc/self/limits",
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/memory.max",
    "/sys/kernel/mm/transparent_hugepage/enabled",
)


def run(place: Place, findings: Findings) -> None:
    if not place.on_cpu and not torch.cuda.is_available():
        raise UsageError(
            "benchmarks.gpu: expected a CUDA device, given none; --on_cpu tries the command itself"
        )
    found = environment(place.device, 1).model_dump()
    for package in ("transformers", "triton", "nvidia-ml-py"):
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found["versions"][package] = "none"
    found["cuda"] = torch.version.cuda
    found["cuda_visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    findings.add(**found)
    write_whole(place.folder / "about.txt", "\n".join(about(place.device)))
    findings.note(
        "What the machine says of itself: about.txt. What each card did in every second: cards.csv."
    )


def about(device: torch.device) -> Iterator[str]:
    """Each command and file with what it says, or why it says nothing."""
    for command in COMMANDS:
        yield f"$ {' '.join(command)}\n{_said(command)}"
    for file in FILES:
        yield f"$ cat {file}\n{_said(('cat', file))}"
    if device.type == "cuda":
        yield f"{torch.cuda.get_device_properties(device)}\n{torch.cuda.get_arch_list()}\n{torch.__config__.show()}"
    yield "\n".join(
        sorted(
            f"{each.name}=={each.version}"
            for each in importlib.metadata.distributions()
        )
    )


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}\n"
    return done.stdout + done.stderr

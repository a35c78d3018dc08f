"""What is recorded about this machine, against other sources."""

import platform
import shutil
import subprocess
from pathlib import Path

import lightning
import psutil
import pytest
import torch

from lm_profiler.analysis.hardware.roofline import peak
from lm_profiler.measure.device.environment import device_name, environment, git_commit

CPU = torch.device("cpu")


def test_facts_of_the_environment_are_current() -> None:
    found = environment(CPU, 2)
    assert found.versions["torch"] == torch.__version__
    assert found.versions["lightning"] == lightning.__version__
    assert found.versions["python"] == platform.python_version()
    assert found.device_type == "cpu"
    assert found.device_name == found.cpu == device_name(CPU)
    assert found.device_bytes == psutil.virtual_memory().total
    assert found.world_size == 2
    assert found.driver is None
    assert 1 <= found.cpu_count <= (psutil.cpu_count() or 1)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert environment(CPU, 1).flags["float32_matmul_precision"] == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert environment(CPU, 1).flags["float32_matmul_precision"] == before


def test_an_apple_gpu_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table of peaks has it; torch.mps, unlike the other devices' modules, has no get_device_name."""
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M1 Max")
    found = peak(device_name(torch.device("mps")), "float32")
    assert found.per_s == pytest.approx(10.4e12)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(("git", *command), check=True)
    head = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=True).stdout.strip()
    assert git_commit() == head

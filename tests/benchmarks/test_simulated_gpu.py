"""The simulated GPU needs a PyTorch for CUDA 13; what it does with one is seen by the tests marked ``gpu``."""

import shutil
import subprocess
from ctypes import CDLL
from pathlib import Path

import pytest
from benchmarks.simulated_gpu.build import stubs


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_calls_that_are_not_simulated_are_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "stubs.c").write_text(stubs(["cublasStrsm_v2", "cudaIpcGetMemHandle"]))
    library = tmp_path / "stubs.so"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", str(tmp_path / "stubs.c"), "-o", str(library)], check=True)
    made = CDLL(str(library))
    assert [made.cublasStrsm_v2(), made.cudaIpcGetMemHandle(), made.cudaIpcGetMemHandle()] == [0, 801, 801]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert ["cublasStrsm_v2" in line for line in lines] == [True, False]
    assert "cudaIpcGetMemHandle" in lines[1]

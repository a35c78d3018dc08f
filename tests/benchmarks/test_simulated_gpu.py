"""The simulated GPU needs a PyTorch for CUDA 13; what it does with one is seen by the tests marked ``gpu``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from benchmarks.simulated_gpu import __main__ as simulated_gpu
from benchmarks.simulated_gpu.build import stubs
from stored_texts import assert_stored


@pytest.mark.parametrize(
    "words, cuda, name",
    [
        ([], "13.0", "benchmarks/refused: no command"),
        (["true"], None, "benchmarks/refused: a build for no CUDA"),
        (["true"], "12.8", "benchmarks/refused: a build for CUDA 12"),
    ],
)
def test_what_it_cannot_run_is_refused_in_one_line(
    words: list[str], cuda: str | None, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulated_gpu", *words])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert simulated_gpu.main() == 2
    assert_stored(name, {"stderr": capsys.readouterr().err}, version=torch.__version__)


def test_without_a_compiler_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulated_gpu", "true"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert simulated_gpu.main() == 2
    assert "compiled:" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_what_is_not_simulated_says_so_once_and_fails_if_it_is_cudas_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stubs.c").write_text(stubs(["cublasStrsm_v2", "cudaIpcGetMemHandle"]))
    library = tmp_path / "stubs.so"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", str(tmp_path / "stubs.c"), "-o", str(library)], check=True)
    made = CDLL(str(library))
    assert [made.cublasStrsm_v2(), made.cudaIpcGetMemHandle(), made.cudaIpcGetMemHandle()] == [0, 801, 801]
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert ["cublasStrsm_v2" in line for line in told] == [True, False]
    assert "cudaIpcGetMemHandle" in told[1]

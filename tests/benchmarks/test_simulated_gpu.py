"""The simulated GPU needs a PyTorch for CUDA 13; what it does with one is seen by the tests marked ``gpu``."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.simulated_gpu import __main__ as simulated_gpu
from benchmarks.simulated_gpu.build import stub


@pytest.mark.parametrize(
    "words, cuda, told",
    [
        ([], "13.0", "usage: python -m benchmarks.simulated_gpu COMMAND…\n"),
        (["true"], None, f"torch: expected a build for CUDA 13, given {torch.__version__}\n"),
        (["true"], "12.8", f"torch: expected a build for CUDA 13, given {torch.__version__}\n"),
    ],
)
def test_what_it_cannot_run_is_refused_in_one_line(
    words: list[str], cuda: str | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulated_gpu", *words])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert simulated_gpu.main() == 2
    assert capsys.readouterr().err == told


def test_what_is_not_simulated_is_said_of_cuda_and_computes_nothing_of_its_libraries() -> None:
    assert stub("cublasSgemv_v2") == "int cublasSgemv_v2() { return 0; }\n"
    assert stub("cudaIpcGetMemHandle") == 'int cudaIpcGetMemHandle() { return missing("cudaIpcGetMemHandle"); }\n'

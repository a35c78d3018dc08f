import shutil
from collections.abc import Sequence

import pytest

from lm_profiler.improve import candidates as module
from lm_profiler.improve.candidates import hardware
from tests.support.compared import ENVIRONMENT

GPU = ENVIRONMENT.model_copy(update={"device_type": "cuda", "device_name": "NVIDIA H100 80GB HBM3"})


def _has(monkeypatch: pytest.MonkeyPatch, programs: Sequence[str], triton: bool = True) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    monkeypatch.setattr(module, "find_spec", lambda name: object() if triton else None)


def test_a_gpu_has_what_its_sheet_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, ["gcc"])
    known = hardware(GPU)
    assert (known.half_precision, known.tf32, known.has_device, known.compiles) == ("bf16-mixed", True, True, "")


def test_of_a_gpu_that_nobody_knows_the_runs_will_tell() -> None:
    known = hardware(GPU.model_copy(update={"device_name": "a GPU of tomorrow"}))
    assert (known.half_precision, known.tf32) == (None, None)


def test_triton_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, ["g++"])
    assert "C compiler" in hardware(GPU).compiles
    _has(monkeypatch, ["clang"])
    assert hardware(GPU).compiles == ""
    monkeypatch.setenv("CC", "gcc-13")  # with it, triton looks for no other
    assert "C compiler" in hardware(GPU).compiles
    _has(monkeypatch, ["gcc"], triton=False)
    assert "triton" in hardware(GPU).compiles

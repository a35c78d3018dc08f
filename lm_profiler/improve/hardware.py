"""What the machine of a run has, as far as its record and this machine tell."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from lm_profiler.analysis.hardware.rates import Dtype, peak
from lm_profiler.improve.changes import Hardware
from lm_profiler.record.run import Environment

_MIXED: dict[Dtype, str] = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
_BFLOAT16_PRODUCTS = {"amx_bf16", "avx512_bf16", "bf16"}
"""Flags of /proc/cpuinfo: x86 (AMX, AVX-512), and ARM."""


def hardware(environment: Environment, cpuinfo: Path = Path("/proc/cpuinfo")) -> Hardware:
    """Of the machine that a run's ``environment`` is; it is taken to be this one."""
    on_cpu = environment.device_type == "cpu"
    name = environment.device_name
    rates = [dtype for dtype in ("float32", "tf32", *_MIXED) if peak(name, dtype) is not None]
    if on_cpu:
        half, tf32 = _of_cpu(cpuinfo), False
    elif rates:
        half, tf32 = next((word for dtype, word in _MIXED.items() if dtype in rates), ""), "tf32" in rates
    else:
        half, tf32 = None, None
    return Hardware(half, tf32, _compiles(on_cpu), environment.cpu_count, not on_cpu)


def _of_cpu(cpuinfo: Path) -> str | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    return "bf16-mixed" if flags & _BFLOAT16_PRODUCTS else "" if flags else None


def _compiles(on_cpu: bool) -> str:
    """Why torch.compile has no compiler here; "" where it has."""
    if on_cpu:
        compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
        return "" if any(map(shutil.which, filter(None, compilers))) else "there is no C++ compiler"
    if find_spec("triton") is None:
        return "triton is not installed"
    named = os.environ.get("CC")  # triton.runtime.build: with it, it looks for no other
    compilers = ["gcc", "clang"] if named is None else [named]
    return "" if any(map(shutil.which, compilers)) else "there is no C compiler, which triton needs"

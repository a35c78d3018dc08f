"""Find the changes that are worth a try, and what each could save at most.

The most that a change could save is read from the first setting's run, from the terms of its waterfall or else from its
phases: a change saves no more time than the part that it changes takes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm_profiler.analysis.hardware.roofline import Dtype, peak
from lm_profiler.analysis.improve.trials import Candidate
from lm_profiler.analysis.remedies.catalogue import tried_on
from lm_profiler.analysis.remedies.remedy import BY_WORKERS, OTHER_BATCH, UNKNOWN, FirstRun, Hardware, name_of
from lm_profiler.analysis.remedies.remedy_options import ATTENTION, WORKERS
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import Environment

_MIXED: dict[Dtype, str] = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
# flags of /proc/cpuinfo for bfloat16 matmuls: AMX and AVX-512 on x86, and ARM's
_BFLOAT16_MATMULS = {"amx_bf16", "avx512_bf16", "bf16"}


def hardware(environment: Environment, cpuinfo: Path = Path("/proc/cpuinfo")) -> Hardware:
    """Return what the machine of a run can do; it is assumed to be this machine."""
    on_cpu = environment.device_type == "cpu"
    name = environment.device_name
    rates = [dtype for dtype in ("float32", "tf32", *_MIXED) if peak(name, dtype) is not None]
    if on_cpu:
        half, tf32 = _cpu_precision(cpuinfo), False
    elif rates:
        half, tf32 = next((word for dtype, word in _MIXED.items() if dtype in rates), ""), "tf32" in rates
    else:
        half, tf32 = None, None
    return Hardware(half, tf32, _compiles(on_cpu), environment.cpu_count, not on_cpu)


def _cpu_precision(cpuinfo: Path) -> str | None:
    """Return the mixed precision for which the CPU has matmuls, "" for none, None where that is unknown."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    return "bf16-mixed" if flags & _BFLOAT16_MATMULS else "" if flags else None


def _compiles(on_cpu: bool) -> str:
    """Return why torch.compile has no compiler here, or "" where it has one."""
    if on_cpu:
        compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
        return "" if any(map(shutil.which, filter(None, compilers))) else "there is no C++ compiler"
    if find_spec("triton") is None:
        return "triton is not installed"
    named = os.environ.get("CC")  # with it, triton.runtime.build looks for no other
    compilers = ["gcc", "clang"] if named is None else [named]
    return "" if any(map(shutil.which, compilers)) else "there is no C compiler, which triton needs"


@dataclass(frozen=True)
class Refused:
    """A candidate that is not tried, and why."""

    candidate: Candidate
    why: str


def candidates(look: Entry, hardware: Hardware, free_batch: bool) -> tuple[list[Candidate], list[Refused]]:
    """Return the changes that the run of ``look`` has not made, and those of them that cannot work here.

    Args:
        look: The first setting's run, with its trace.
        hardware: What the machine can do.
        free_batch: Whether the number of samples in a step may change.
    """
    assert look.record is not None
    tried, refused = list[Candidate](), list[Refused]()
    for candidate, why in tried_on(FirstRun(look, look.record), hardware):
        if why:
            refused.append(Refused(candidate, why))
        elif free_batch or candidate.may_change != OTHER_BATCH:
            tried.append(candidate)
    return tried, refused


def asked_for(
    values: Mapping[str, Sequence[str]], known: Sequence[Candidate], option: Callable[[str], Any]
) -> list[Candidate]:
    """Return a candidate for each of the ``values`` of each option, except for values that the run has already.

    A ``known`` candidate with the same options is taken as it is, with its ceiling. Another value of an option in
    ``known`` takes group and ``may_change`` from there. Those of workers are known even if no candidate tries them.

    Args:
        values: The values of each option that a user asked for.
        known: Our own candidates.
        option: Returns the run's value of an option.
    """
    alike: dict[str, tuple[str, str | None]] = dict.fromkeys(WORKERS, ("num_workers", BY_WORKERS))
    alike |= {name: (one.group, one.may_change) for one in known for name in one.options}
    alike[ATTENTION] = (ATTENTION, UNKNOWN)  # a third kind, in a user's module, may compute anything
    wished = []
    for name, text in ((name, text) for name, texts in values.items() for text in texts):
        options = {**_needed(name, option), name: text}
        if not all(_same(option(each), value) for each, value in options.items()):
            same = next((one for one in known if one.options == options), None)
            first = next(iter(options))
            group, may_change = alike.get(first, (first, UNKNOWN))
            wished.append(same or Candidate(name_of(options), options, group, may_change=may_change))
    return wished


def _needed(name: str, option: Callable[[str], Any]) -> dict[str, str]:
    """Return the option that ``name`` needs to have an effect: a mode of torch.compile needs compilation."""
    compiled = name.removesuffix("_mode")
    return {compiled: "true"} if name.endswith(".compile_mode") and option(compiled) is False else {}


def _same(value: Any, text: str) -> bool:
    spelled = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return spelled == text


def worth_it(known: Sequence[Candidate], step_s: float | None, margin: float) -> tuple[list[Candidate], list[Refused]]:
    """Split candidates into those that could save at least ``margin`` of the step, and the others."""
    least_s = margin * (step_s or 0.0)
    # A candidate without a ceiling is tried: nothing is known against it.
    small = [one for one in known if one.ceiling_s is not None and one.ceiling_s < least_s]
    why = f"less than {margin:.0%} of the step could be saved"
    return [one for one in known if one not in small], [Refused(one, why) for one in small]

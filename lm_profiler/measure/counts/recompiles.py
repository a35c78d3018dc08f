"""Compilations by ``torch.compile``: their number, their functions, and whether a module is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lm_profiler.lightning_names import COMPILED_STEPS
from lm_profiler.torch_names import COMPILED_CALL, DYNAMO

_REMEMBERED = 64  # torch._dynamo.utils.DEFAULT_COMPILATION_METRICS_LIMIT


def recompilations() -> int:
    """Return the number of graphs that ``torch.compile`` has compiled in this process, first compilations included.

    0 if nothing was ever compiled; ``torch._dynamo`` is never imported to find out. A function without any operation
    compiles to no graph and is not counted, nor is the backward of a graph.
    """
    dynamo = DYNAMO.loaded()
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class TimedCompilation(NamedTuple):
    """One compilation of a graph or of its backward; instants are in seconds since the epoch."""

    began_s: float
    ended_s: float
    # ``forward (model.py:88): tensor 'x' size mismatch at index 0. expected 3, actual 4``, ; a first compilation
    # without a reason; None for a backward
    what: str | None


def compilations(
    since_s: float, remembered: int = _REMEMBERED
) -> list[TimedCompilation] | None:
    """Return the compilations that began ``since_s`` seconds after the epoch, or later; None if torch may have
    forgotten one."""
    dynamo = DYNAMO.loaded()
    entries = [] if dynamo is None else dynamo.get_compilation_metrics()
    later = [
        TimedCompilation(
            began_s=e.start_time_us * 1e-6,
            ended_s=e.end_time_us * 1e-6,
            what=_named(e) if e.co_name else None,
        )
        for e in entries
        if e.start_time_us and e.end_time_us and e.start_time_us * 1e-6 >= since_s
    ]
    return later if len(later) < remembered else None


def _named(entry: Any) -> str:
    """Return the function that was compiled, and why it had to be compiled again."""
    name = (
        f"{entry.co_name} ({Path(entry.co_filename or '').name}:{entry.co_firstlineno})"
    )
    # "0/1: reason" names the compiled version whose guard failed last; one line of it is enough for a person.
    _, _, reason = (entry.recompile_reason or "").partition("\n")[0].partition(": ")
    return f"{name}: {reason}" if reason else name


def is_compiled_in(module: nn.Module) -> bool:
    return any(is_compiled(part) for part in module.modules())


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` itself was compiled by any form of torch.compile, or by TorchScript."""
    return (
        is_wrapped_by_compiler(module)
        or COMPILED_CALL.get(module) is not None
        or COMPILED_STEPS.get_or(module)
        is not None  # Lightning compiled the steps themselves
        or isinstance(module, torch.jit.ScriptModule)
    )


def is_wrapped_by_compiler(module: nn.Module) -> bool:
    """Return whether ``module`` is what ``torch.compile(module)`` returns: the compiled module around the plain one."""
    # by name: importing it would import the compiler
    return type(module).__name__ == "OptimizedModule"

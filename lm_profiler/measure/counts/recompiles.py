"""Reads what ``torch.compile`` has compiled: how many graphs, when, which functions, and which modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lm_profiler.lightning_names import COMPILED_STEPS
from lm_profiler.torch_names import COMPILED_CALL, DYNAMO

# how many compilations torch remembers (torch._dynamo.utils.DEFAULT_COMPILATION_METRICS_LIMIT)
_REMEMBERED = 64


def recompilations() -> int:
    """Return the number of graphs that ``torch.compile`` has compiled in this process, first compilations included.

    0 if nothing was ever compiled: this does not import ``torch._dynamo``. A function without any operation compiles to
    no graph and does not count; neither does the backward of a graph.
    """
    dynamo = DYNAMO.loaded()
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class TimedCompilation(NamedTuple):
    """One compilation of a graph or of its backward; instants are in seconds since the epoch."""

    began_s: float
    ended_s: float
    # such as ``forward (model.py:88): tensor 'x' size mismatch at index 0. expected 3, actual 4``; without the reason
    # for a first compilation, None for a backward
    what: str | None


def compilations(
    since_s: float, remembered: int = _REMEMBERED
) -> list[TimedCompilation] | None:
    """Return the compilations that began at ``since_s``, in seconds since the epoch, or later.

    None if torch may have forgotten one: it keeps the last ``remembered``.
    """
    dynamo = DYNAMO.loaded()
    entries = [] if dynamo is None else dynamo.get_compilation_metrics()
    later: list[TimedCompilation] = []
    for entry in entries:
        if not entry.start_time_us or not entry.end_time_us:
            continue
        began_s = entry.start_time_us * 1e-6
        if began_s >= since_s:
            what = _description_of(entry) if entry.co_name else None
            later.append(TimedCompilation(began_s, entry.end_time_us * 1e-6, what))
    return later if len(later) < remembered else None


def _description_of(entry: Any) -> str:
    """Return the function that was compiled, and the reason if it was not the first time."""
    file_name = Path(entry.co_filename or "").name
    function = f"{entry.co_name} ({file_name}:{entry.co_firstlineno})"
    # A line is "0/1: reason", where 0/1 is a compiled version whose guard failed. The first line is the last failure.
    first_line = (entry.recompile_reason or "").partition("\n")[0]
    _, _, reason = first_line.partition(": ")
    return f"{function}: {reason}" if reason else function


def is_compiled_in(module: nn.Module) -> bool:
    """Return whether ``module``, or any module in it, was compiled."""
    return any(is_compiled(part) for part in module.modules())


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` itself was compiled by any form of torch.compile, or by TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    is_compiled_in_place = COMPILED_CALL.get(module) is not None
    # Lightning compiles the methods training_step, validation_step and so on.
    has_compiled_steps = COMPILED_STEPS.get_or(module) is not None
    return is_wrapped_by_compiler(module) or is_compiled_in_place or has_compiled_steps


def is_wrapped_by_compiler(module: nn.Module) -> bool:
    """Return whether ``module`` is what ``torch.compile(module)`` returns: the compiled module around the plain one."""
    # compared by name, because importing the class would import the compiler
    return type(module).__name__ == "OptimizedModule"

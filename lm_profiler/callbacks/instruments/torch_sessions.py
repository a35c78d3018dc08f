"""Sessions of torch's profiler: where one may begin or end, and what has to be done first.

torch allows one session per process. An operator or a ``record_function`` is a *range*: it stores a pointer into the
memory of the session in which it begins. When it ends, torch writes there if any session runs. So a range that begins
in one session and ends in the next one writes into freed memory, and the process crashes. This is a fault of torch
itself; two sessions of a program can have it too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from lm_profiler.torch_names import (
    GRAPH_TASK_ID,
    PREPARE_TRACE,
    PROFILER_ENABLED,
    START_TRACE,
)

_GENERATIONS = (0, 1, 2)  # of the garbage collector, that of the newest objects first
_NO_GRAPH_TASK = -1  # the id outside of a backward pass

# the functions of torch that call C++ code, by their files and names; that code has an open range and calls Python
_CALLERS_OF_RANGES = {
    (sys.modules[torch.autograd.Function.__module__].__file__, "apply"),
    (sys.modules[type(torch.ops).__module__].__file__, "__call__"),
}


def is_session_taken() -> bool:
    """Return whether a session of torch's profiler runs in this process, or is prepared, such as during its warm-up.

    torch reports only running sessions, so prepared ones are searched among all objects, which takes up to 0.1 s.
    """
    if PROFILER_ENABLED.get(autograd_profiler):
        return True
    return any(
        _is_open(session)
        for session in _objects_of(autograd_profiler.profile, gc.get_objects())
    )


def _is_open(session: autograd_profiler.profile) -> bool:
    """Return whether ``session`` was entered and has no results yet."""
    if not session.enabled:
        return False  # torch gives a disabled session no further attributes
    has_results = session.kineto_results is not None
    return session.entered and not has_results


def _objects_of(kind: type, objects: list[Any]) -> Iterator[Any]:
    # By type, because ``isinstance`` asks proxies for their ``__class__``, which may run code of the program.
    return (thing for thing in objects if issubclass(type(thing), kind))


def is_called_by_torch() -> bool:
    """Return whether C++ code of torch called the running code: a backward pass, or an operator written in Python.

    No session may begin or end there. The ranges of that code cannot be closed (``close_open_ranges``), and a backward
    pass restores the state of its thread afterwards: a session that began is lost, and one that ended is there again.
    """
    if GRAPH_TASK_ID.find()() != _NO_GRAPH_TASK:
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_name) in _CALLERS_OF_RANGES:
            return True
        if code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


def close_open_ranges() -> None:
    """Close every open ``record_function``, also those of the program, because the session changes.

    Their owners close them again later, which has no effect. The newest are closed first, because ranges nest.
    """
    for generation in _GENERATIONS:
        newest_first = gc.get_objects(generation)[::-1]
        for range_ in _objects_of(record_function, newest_first):
            has_begun = range_.record is not None
            if has_begun:
                record_function.__exit__(range_, None, None, None)


class _NoResults:
    """The results of a session that recorded nothing, with the methods that torch calls."""

    def events(self) -> list[Any]:
        return []

    def experimental_event_tree(self) -> list[Any]:
        return []

    def trace_start_ns(self) -> int:
        return 0

    def save(self, path: str) -> None:
        Path(path).write_text('{"traceEvents": []}')


def keep_from_starting(session: Any) -> None:
    """Make ``session`` record nothing. The program can still start, stop and read it.

    Args:
        session: ``profile``, ``emit_nvtx`` or ``emit_itt`` of torch.autograd.profiler, before it starts.
    """
    session.enabled = False  # nothing happens when it is entered, or when it ends
    if isinstance(session, autograd_profiler.profile):
        # torch.profiler calls these without a look at ``enabled``.
        for method in (PREPARE_TRACE, START_TRACE):
            setattr(session, method.name, lambda: None)
        no_results: Any = _NoResults()
        session.kineto_results = no_results

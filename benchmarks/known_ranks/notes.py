"""What a rank notes of itself in the loop, without marks of the profiler and without torch's flight recorder.

Instants are nanoseconds of the machine's monotonic clock, which all of its processes share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed

_GATHER, _SCATTER = (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
)
_BLOCKING = ("broadcast", "all_reduce", *_GATHER, *_SCATTER)
"""Calls that hold a rank until they are done: of the flag that Lightning sends before every batch, of the module
itself, and of FSDP2, whose calls torch has renamed."""


class Met(NamedTuple):
    """A collective: when this rank came to it, and when it could go on."""

    name: str
    came_ns: int
    left_ns: int


class Span(NamedTuple):
    """A phase of the loop."""

    phase: str
    began_ns: int
    ended_ns: int


@dataclass(eq=False)
class Notes:
    """``asked_ns``: when each batch was asked for; ``over_ns``: when what came before it was over, of which Lightning's
    flag is the last; in between the profiler is at work. ``spans`` of all phases but ``other``, and the collectives
    ``met``, in their order."""

    asked_ns: list[int] = field(default_factory=list)
    over_ns: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    met: list[Met] = field(default_factory=list)

    def next_batch(self) -> None:
        """One is asked for."""
        self.asked_ns.append(time.perf_counter_ns())
        self.over_ns.append(self.met[-1].left_ns)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """It lasts as long as the block."""
        began = time.perf_counter_ns()
        yield
        self.spans.append(Span(name, began, time.perf_counter_ns()))

    @contextmanager
    def hears_collectives(self) -> Iterator[None]:
        """Those that are called through ``torch.distributed``."""
        whole = {
            name: getattr(torch.distributed, name)
            for name in _BLOCKING
            if hasattr(torch.distributed, name)
        }
        for name, call in whole.items():
            setattr(torch.distributed, name, self._noted(name, call))
        try:
            yield
        finally:
            for name, call in whole.items():
                setattr(torch.distributed, name, call)

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            came = time.perf_counter_ns()
            answer = call(*args, **kwargs)
            self.met.append(Met(name, came, time.perf_counter_ns()))
            return answer

        return noted

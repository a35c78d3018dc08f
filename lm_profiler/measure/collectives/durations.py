"""How long each of NCCL's collectives takes on its stream, from the events that NCCL keeps when it is asked to.

On a GPU the host only enqueues: when it calls says nothing of when the device comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lm_profiler.measure.collectives.recorder import Arrivals, Dump, collectives
from lm_profiler.torch_names import TIME_COLLECTIVES, WORLD

_PATIENCE_S = 2.0
"""NCCL's watchdog reads the events every tenth of a second, that of torch 2.15 every second."""


def time_collectives() -> None:
    """From now on, of all groups; two events more a collective. Nothing ends it.

    Raises:
        RuntimeError: a backend cannot, or this torch.
    """
    for group in list(WORLD.find().pg_map):
        TIME_COLLECTIVES.of(group)()


def drain_timed(
    arrivals: Arrivals, sleep: Callable[[float], object] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> None:
    """Read the ring when the durations of what is new in it are known, or after two seconds. The device is done."""
    until = clock() + _PATIENCE_S
    while _untimed(arrivals.dump, arrivals.last) and clock() < until:
        sleep(0.05)
    arrivals.drain()


def _untimed(dump: Dump, after: int) -> bool:
    fresh = [entry for entry in dump() if entry["record_id"] > after]
    return any(call.duration_ns is None for call in collectives(fresh))

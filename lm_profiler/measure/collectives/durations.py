"""Has NCCL time each of its collectives on the device, and waits for the results.

On a GPU the host only enqueues: the time of its call does not tell when the device gets there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lm_profiler.measure.collectives.recorder import Arrivals, Dump, collectives
from lm_profiler.torch_names import TIME_COLLECTIVES, WORLD

_PATIENCE_S = 2.0  # seconds: NCCL's watchdog reads the events every tenth of a second, that of torch 2.15 every second


def time_collectives() -> None:
    """Switch timing on for all groups, at the cost of two events a collective. It cannot be switched off.

    Raises:
        RuntimeError: A backend or this torch cannot do it.
    """
    for group in list(WORLD.find().pg_map):
        TIME_COLLECTIVES.of(group)()


def drain_timed(
    arrivals: Arrivals, sleep: Callable[[float], object] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> None:
    """Read the ring once the durations of its new entries are known, or after two seconds; the device must be idle."""
    until = clock() + _PATIENCE_S
    while _untimed(arrivals.dump, arrivals.last) and clock() < until:
        sleep(0.05)
    arrivals.drain()


def _untimed(dump: Dump, after: int) -> bool:
    fresh = [entry for entry in dump() if entry["record_id"] > after]
    return any(call.duration_ns is None for call in collectives(fresh))

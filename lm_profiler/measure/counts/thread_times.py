"""How long a thread ran and how long it waited for a CPU, as Linux counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class ThreadTimes(NamedTuple):
    """Nanoseconds that the calling thread ran, and that it was ready and had no CPU, since it began."""

    ran_ns: int
    no_cpu_ns: int


def thread_times() -> ThreadTimes | None:
    """Return the thread's times; None where the system does not count (Documentation/scheduler/sched-stats.rst)."""
    # Asked first: it makes the kernel count up to now. The file is otherwise as old as the last tick, 1 to 10 ms;
    # getrusage counted up to now in older kernels, and does not in 6.18.
    ran_ns = time.thread_time_ns()
    try:
        _, waited, *_ = _SCHEDSTAT.read_bytes().split()
    except (OSError, ValueError):
        return None
    return ThreadTimes(ran_ns, int(waited))

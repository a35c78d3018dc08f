"""How long a thread ran and how long it waited for a CPU, as Linux counts."""

from __future__ import annotations

from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class ThreadTimes(NamedTuple):
    """Nanoseconds that the calling thread ran, and that it was ready and had no CPU, since it began."""

    ran_ns: int
    no_cpu_ns: int


def thread_times() -> ThreadTimes | None:
    """Return the thread's times; None where the system does not count (Documentation/scheduler/sched-stats.rst)."""
    # Brings the file up to date, which is otherwise as old as the kernel's last tick, 1 to 10 ms.
    getrusage(RUSAGE_THREAD)
    try:
        ran, waited, *_ = _SCHEDSTAT.read_bytes().split()
    except (OSError, ValueError):
        return None
    return ThreadTimes(int(ran), int(waited))

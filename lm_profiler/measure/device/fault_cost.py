"""What it costs this machine to map a page of new memory, measured after everything that is timed."""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

_BYTES = 16 * 2**20
_TIMES = 3
_FRESH = 6.0
"""Times a fault's cost that one took where the page was new to the machine too: its host had yet to give it memory."""


class FaultCost(NamedTuple):
    """CPU seconds of a minor page fault: of a small page, and of what the kernel maps at once in a large block.

    The two differ where huge pages are transparent (Documentation/admin-guide/mm/transhuge.rst).
    """

    small_s: float
    large_s: float

    @property
    def dearest_s(self) -> float:
        """What one may have cost in the run: after it, pages are touched that the machine has had before."""
        return max(self.large_s, _FRESH * self.small_s)


def fault_cost(clock: Callable[[], float] = time.thread_time) -> FaultCost | None:
    """Touch 16 MiB of new memory, page by page, a few times; None where that causes no fault.

    It is CPU time, which others on the machine do not lengthen.
    """
    small, large = (_cost(advice, clock) for advice in ("MADV_NOHUGEPAGE", None))
    return None if small is None or large is None else FaultCost(small, large)


def _cost(advice: str | None, clock: Callable[[], float]) -> float | None:
    """Seconds a fault, without what touching the same memory takes once it is mapped: of each the least."""
    touches = [touch for _ in range(_TIMES) if (touch := _touch(advice, clock)) is not None]
    if not touches:
        return None
    least_s = min(first_s for first_s, _ in touches) - min(again_s for _, again_s in touches)
    return max(least_s, 0.0)


def _touch(advice: str | None, clock: Callable[[], float]) -> tuple[float, float] | None:
    """Seconds a fault of the first touch, and of the second, which causes none."""
    with mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        if advice is not None and hasattr(mmap, advice):
            block.madvise(getattr(mmap, advice))
        faults, times = _faults(), [clock()]
        for _ in range(2):
            block[:: mmap.PAGESIZE] = bytes(_BYTES // mmap.PAGESIZE)
            times.append(clock())
        faults = _faults() - faults
    return ((times[1] - times[0]) / faults, (times[2] - times[1]) / faults) if faults else None


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

"""Whether somebody sets this machine's wall clock while a test runs. torch notes some instants by that clock alone."""

import time

from lm_profiler.measure.collective_calls import wall_ahead_ns

SURELY_SET_NS = 50_000
"""Half of the least change for which instants count as unknown."""


class WallClockCheck:
    """Compares the wall clock with the monotonic clock."""

    def __init__(self) -> None:
        self._ahead_ns = wall_ahead_ns(time.perf_counter_ns)

    def was_set(self) -> bool:
        """Return whether the wall clock was set since this check began."""
        return abs(wall_ahead_ns(time.perf_counter_ns) - self._ahead_ns) > SURELY_SET_NS

"""A ring like that of torch's flight recorder, and two clocks that a test sets."""

from typing import Any

from lm_profiler.measure.collective_calls import Arrivals

WALL_AHEAD_NS = 1_700_000_000_000_000_000


class Ring:
    """Notes calls like torch's flight recorder; ``now`` is the monotonic clock."""

    def __init__(self, size: int) -> None:
        self.size, self.now, self.ahead, self.made = size, 0, WALL_AHEAD_NS, 0
        self.entries: list[dict[str, Any]] = []

    def call(self, at_ns: int, name: str = "gloo:all_reduce", p2p: bool = False) -> None:
        self.now = at_ns
        self.entries.append(
            {
                "record_id": self.made,
                "process_group": ("0", "default_pg"),
                "collective_seq_id": self.made + 1,
                "profiling_name": name,
                "time_created_ns": at_ns + self.ahead,
                "is_p2p": p2p,
            }
        )
        self.made += 1
        del self.entries[: -self.size]

    def arrivals(self) -> Arrivals:
        return Arrivals(lambda: self.entries, lambda: self.now, lambda: self.now + self.ahead, self.size)

"""Measures how far the ranks' clocks differ, by round trips through the store of the process group.

Ranks of one machine share its monotonic clock, so that one rank of each machine is asked. A message arrives after it
was sent: the other clock's reading within a round trip bounds its offset from both sides, however long the way takes
(the on-wire calculation of NTP, RFC 5905 section 8).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

_ROUNDS = 10  # round trips of a comparison, of which the quickest counts

_QUARTZ = 5e-5  # the most that a clock may gain or lose: 50 ppm, as oscillators on boards are specified


class ClockReading(NamedTuple):
    """Another clock minus ours: ``ahead_ns`` at its own ``at_ns``, wrong by at most ``uncertainty_ns``."""

    at_ns: int
    ahead_ns: int
    uncertainty_ns: int


def clock_id() -> str:
    """Return a name of this process's monotonic clock: equal where it is the same clock, also across containers."""
    with suppress(OSError):
        # A time namespace may have an offset of its own (time_namespaces(7)).
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/time').readlink()}"
    return platform.node()


@dataclass(eq=False)
class ClockComparison:
    """Compares all ranks' clocks with rank 0's, each time that all ranks call ``compare``.

    ``readings`` has, on rank 0, the readings of each clock, one for each comparison that succeeded.
    """

    store: Any  # the key-value store that all ranks share
    rank: int  # this process's
    ranks: int  # how many there are
    patience_s: float  # how long a comparison waits for the others, in all
    clock: Callable[[], int] = time.perf_counter_ns
    own: str = field(default_factory=clock_id)  # the name of that clock
    readings: dict[str, list[ClockReading]] = field(default_factory=dict)
    _clocks: Sequence[str | None] | None = None
    _asked: Sequence[int] = ()
    _times: int = 0

    def compare(self) -> None:
        """Compare once more. Rank 0 waits for one rank of each other machine, and those wait for rank 0.

        Raises:
            RuntimeError: on another rank, where rank 0 did not answer in time.
        """
        until = time.monotonic() + self.patience_s
        if self._clocks is None:
            self._meet(until)
        self._times += 1
        for rank in self._asked:
            if self.rank == rank:
                self._answer(f"{self._times}/{rank}", until)
            elif self.rank == 0:
                with suppress(RuntimeError):  # that rank has ended, or its instruments were taken out
                    reading = self._ask(f"{self._times}/{rank}", until)
                    self.readings.setdefault((self._clocks or [])[rank] or "", []).append(reading)

    def of(self, rank: int, until_ns: int) -> tuple[ClockReading, ClockReading] | None:
        """Return the first and the last reading of the clock of ``rank``, on rank 0; None where it is unknown.

        With a single reading, the last one's uncertainty grows by the drift up to ``until_ns`` on that clock.
        """
        which = self._clocks[rank] if self._clocks is not None else None
        if which is not None and which == self.own:
            return ClockReading(0, 0, 0), ClockReading(0, 0, 0)
        if not (readings := self.readings.get(which or "")):
            return None
        first, last = readings[0], readings[-1]
        if len(readings) == 1:
            more_ns = round(max(until_ns - first.at_ns, 0) * _QUARTZ)
            last = first._replace(uncertainty_ns=first.uncertainty_ns + more_ns)
        return first, last

    def _meet(self, until: float) -> None:
        """Exchange the clocks' names; rank 0 chooses the first rank of each clock other than its own."""
        self.store.set(f"is/{self.rank}", self.own)
        if self.rank > 0:
            self._wait(["asked"], until)
            self._clocks, self._asked = (), [int(rank) for rank in self.store.get("asked").decode().split()]
            return
        keys = [f"is/{rank}" for rank in range(self.ranks)]
        # Half of the patience: the rest is for those that came and wait for an answer.
        with suppress(RuntimeError):  # ranks that are too late are not asked
            self._wait(keys, time.monotonic() + self.patience_s / 2)
        clocks = self._clocks = [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]
        self._asked = sorted({which: clocks.index(which) for which in clocks if which not in (None, self.own)}.values())
        self.store.set("asked", " ".join(map(str, self._asked)))

    def _ask(self, key: str, until: float) -> ClockReading:
        """Measure round trips; each side reads its clock after waiting, before it fetches the message."""
        readings = []
        for turn in range(_ROUNDS):
            sent = self.clock()
            self.store.set(f"{key}/ask/{turn}", "")
            self._wait([f"{key}/answer/{turn}"], until)
            back = self.clock()
            came, left = map(int, self.store.get(f"{key}/answer/{turn}").decode().split())
            # The other clock is ahead by at most ``came - sent``, and by at least ``left - back``.
            most, least = came - sent, left - back
            readings.append(ClockReading((came + left) // 2, (most + least) // 2, (most - least) // 2))
        return min(readings, key=lambda reading: reading.uncertainty_ns)

    def _answer(self, key: str, until: float) -> None:
        for turn in range(_ROUNDS):
            self._wait([f"{key}/ask/{turn}"], until)
            came = self.clock()
            self.store.set(f"{key}/answer/{turn}", f"{came} {self.clock()}")

    def _wait(self, keys: list[str], until: float) -> None:
        self.store.wait(keys, timedelta(seconds=max(until - time.monotonic(), 0.01)))

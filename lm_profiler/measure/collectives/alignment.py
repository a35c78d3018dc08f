"""How far the ranks' clocks are apart: messages through the store of the process group, there and back.

Ranks of one machine share its monotonic clock, so that of each machine one rank is asked. A message is there after it
was sent: the other clock's reading in between bounds how far that one is ahead, from both sides, whatever the way takes
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

_ROUNDS = 10
"""There and back, of which the quickest counts."""

_QUARTZ = 5e-5
"""What an oscillator may gain or lose, at most: 50 ppm, as those on boards are specified."""


class ClockReading(NamedTuple):
    """Another clock less ours: ``ahead_ns`` at ``at_ns`` of its own, off by ``uncertainty_ns`` at most."""

    at_ns: int
    ahead_ns: int
    uncertainty_ns: int


def clock_id() -> str:
    """Of the monotonic clock that this process reads: the same wherever it is the same clock, across containers too."""
    with suppress(OSError):
        # A time namespace may have an offset of its own (time_namespaces(7)).
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/time').readlink()}"
    return platform.node()


@dataclass(eq=False)
class ClockComparison:
    """Of all ranks' clocks with rank 0's, as often as all of them ask for it.

    Args:
        store: what all ranks see.
        rank: of this process.
        ranks: how many there are.
        patience_s: how long to wait for the others, in all.
        clock: of this process, in nanoseconds.
        own: which clock that is.

    ``readings`` are known on rank 0: of each clock, those of each comparison that succeeded.
    """

    store: Any
    rank: int
    ranks: int
    patience_s: float
    clock: Callable[[], int] = time.perf_counter_ns
    own: str = field(default_factory=clock_id)
    readings: dict[str, list[ClockReading]] = field(default_factory=dict)
    _clocks: Sequence[str | None] | None = None
    _asked: Sequence[int] = ()
    _times: int = 0

    def compare(self) -> None:
        """Once more. Rank 0 waits for one rank of each other machine; those wait for rank 0.

        Raises:
            RuntimeError: on another rank: rank 0 said nothing in time.
        """
        until = time.monotonic() + self.patience_s
        if self._clocks is None:
            self._meet(until)
        self._times += 1
        for rank in self._asked:
            if self.rank == rank:
                self._answer(f"{self._times}/{rank}", until)
            elif self.rank == 0:
                with suppress(RuntimeError):  # it has ended, or its instruments have
                    reading = self._ask(f"{self._times}/{rank}", until)
                    self.readings.setdefault((self._clocks or [])[rank] or "", []).append(reading)

    def of(self, rank: int, until_ns: int) -> tuple[ClockReading, ClockReading] | None:
        """The clock of ``rank`` when it was first and last compared; None where it is not known. On rank 0.

        Where it was compared once, how far it may be off grows up to ``until_ns`` of its own.
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
        """All say which clock they read; rank 0 says who is asked: the first rank of each clock that is not its own."""
        self.store.set(f"is/{self.rank}", self.own)
        if self.rank > 0:
            said = self._get("asked", until).decode()
            self._clocks, self._asked = (), [int(rank) for rank in said.split()]
            return
        keys = [f"is/{rank}" for rank in range(self.ranks)]
        with suppress(RuntimeError):  # who has not come by then is not asked
            self._wait(keys, time.monotonic() + self.patience_s / 2)
        clocks = self._clocks = [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]
        known = {which: clocks.index(which) for which in clocks if which is not None and which != self.own}
        self._asked = sorted(known.values())
        self.store.set("asked", " ".join(map(str, self._asked)))

    def _ask(self, key: str, until: float) -> ClockReading:
        """There and back; each side waits, and then looks at its clock before it asks for what was said."""
        best: ClockReading | None = None
        for turn in range(_ROUNDS):
            sent = self.clock()
            self.store.set(f"{key}/ask/{turn}", "")
            self._wait([f"{key}/answer/{turn}"], until)
            back = self.clock()
            came, left = map(int, self.store.get(f"{key}/answer/{turn}").decode().split())
            # It is ahead by no more than ``came - sent``, and by no less than ``left - back``.
            reading = ClockReading(
                (came + left) // 2, (came - sent + left - back) // 2, (came - sent - left + back) // 2
            )
            if best is None or reading.uncertainty_ns < best.uncertainty_ns:
                best = reading
        assert best is not None
        return best

    def _answer(self, key: str, until: float) -> None:
        for turn in range(_ROUNDS):
            self._wait([f"{key}/ask/{turn}"], until)
            came = self.clock()
            self.store.set(f"{key}/answer/{turn}", f"{came} {self.clock()}")

    def _get(self, key: str, until: float) -> bytes:
        self._wait([key], until)
        value: bytes = self.store.get(key)
        return value

    def _wait(self, keys: list[str], until: float) -> None:
        self.store.wait(keys, timedelta(seconds=max(until - time.monotonic(), 0.01)))

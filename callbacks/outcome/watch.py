"""A thread beside training that notices when no step ends any more: it tells where this rank is, and who is missing.

While steps end it reads one number a second, and nothing else. What it needs of the store goes over a connection of its
own, for training may be waiting in the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lm_profiler.callbacks.outcome.roll import Roll
from lm_profiler.callbacks.outcome.whereabouts import Whereabouts, latecomers, where_they_are

_BEAT_S = 1.0

_ASK_S = 1.0
"""Without a finished step for so long, the store is asked whether another rank has ended."""

_TELL_S, _TELL_STEPS = 10.0, 3.0
"""Without one for so long, and for so many times the longest step so far, this rank tells where it is."""

_SAY_S = 60.0
"""Then rank 0 says who is missing."""


@dataclass(eq=False)
class StallWatch:
    """Of one rank's run.

    Args:
        roll: what the ranks tell each other.
        steps: how many have ended.
        place: where this rank is.
        say: prints a line, and keeps it.
        limit_s: how long torch lets a collective wait; what is said is said before.
        clock: in seconds.

    ``over`` becomes true when another rank has ended and this one waits for nothing that can come.
    """

    roll: Roll
    steps: Callable[[], int]
    place: Callable[[], Whereabouts]
    say: Callable[[str], object]
    limit_s: float
    clock: Callable[[], float] = time.monotonic
    over: bool = field(default=False, init=False)
    _seen: int = -1
    _moved_s: float = 0.0
    _longest_s: float = 0.0
    _told: bool = False
    _said: bool = False
    _store: Any = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        threading.Thread(target=self._watch, name="lm_profiler-watch", daemon=True).start()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        with suppress(Exception):  # it tells nothing more, and training does not notice
            while not (self._ended.wait(_BEAT_S) or self.over):
                self.beat()

    def beat(self) -> None:
        """Look once.

        Raises:
            Exception: the store cannot be reached by a connection of its own.
        """
        now, steps = self.clock(), self.steps()
        if steps != self._seen:
            if self._seen > 0:
                self._longest_s = max(self._longest_s, now - self._moved_s)
            self._seen, self._moved_s, self._said = steps, now, False
            if self._told:
                self._told = False
                self.roll.place(None, self._store)
            return
        still_s = now - self._moved_s
        if still_s < _ASK_S:
            return
        if self._store is None:
            self._store = self.roll.exchange.store.clone()
        if self.roll.is_over(self._store):
            self.over = True
        elif still_s >= max(min(_TELL_S, self.limit_s / 4), _TELL_STEPS * self._longest_s):
            self._told = True
            self.roll.place(self.place(), self._store)
            if still_s >= min(_SAY_S, self.limit_s / 2) and self.roll.exchange.rank == 0 and not self._said:
                self._tell()

    def _tell(self) -> None:
        places = self.roll.places(self._store)
        if late := latecomers(places):
            self._said = True
            hosts = {rank: self.roll.host_of(rank, self._store) for rank in late}
            self.say(
                f"no step has ended for {self.clock() - self._moved_s:.0f} s: {where_they_are(places, late, hosts)}"
            )

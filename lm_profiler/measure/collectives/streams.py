"""Measures how long the computing stream waits for other streams, and notes when the host works on those.

FSDP issues its collectives early, on streams of its own, and has the computing stream wait where it needs the results.
The duration of a collective says little about that wait: two that queue behind each other both take long, while the
computing stream is busy.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch


class Stand(NamedTuple):
    """One wait of the computing stream, between two of its instants; the host enqueued it ``at_ns``."""

    at_ns: int
    since: torch.Event
    until: torch.Event


class StreamWaits:
    """Notes every wait of the current stream for another one from ``start`` to ``stop``, at two events each.

    Args:
        record: returns an instant of the current stream.
        clock: the host's clock of the marks.
        cuda: what has ``Stream``, ``current_stream`` and ``set_stream``; tests hand in their own.
    """

    def __init__(
        self,
        record: Callable[[], torch.Event],
        clock: Callable[[], int] = time.perf_counter_ns,
        cuda: Any = torch.cuda,
    ) -> None:
        self._record, self._clock, self._cuda = record, clock, cuda
        self._turns: list[tuple[int, bool]] = []
        self._undo = ExitStack()
        self.stands: list[Stand] = []

    def start(self) -> None:
        """Start; the stream that is current now counts as the computing one."""
        own = self._cuda.current_stream()
        wait_event, set_stream = self._cuda.Stream.wait_event, self._cuda.set_stream

        def waits(stream: Any, event: Any) -> None:
            if stream == own and self._cuda.current_stream() == own:
                at_ns, since = self._clock(), self._record()
                wait_event(stream, event)
                self.stands.append(Stand(at_ns, since, self._record()))
            else:
                wait_event(stream, event)

        def turns(stream: Any) -> None:
            set_stream(stream)
            if stream is not None:  # torch ignores None
                self._turns.append((self._clock(), stream != own))

        for place, name, new in ((self._cuda.Stream, "wait_event", waits), (self._cuda, "set_stream", turns)):
            self._undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, new)

    def stop(self) -> None:
        """Restore torch's functions; calling it twice does no harm."""
        self._undo.close()

    def beside(self, at_ns: int) -> bool:
        """Return whether the host was working on another stream at ``at_ns``."""
        turn = bisect_right(self._turns, (at_ns, True)) - 1
        return turn >= 0 and self._turns[turn][1]

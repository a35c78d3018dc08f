"""What the ranks of a run tell each other when it does not end well: how each of them ended, and who is missing.

They tell it in the run's folder, which not every node may see, and in the store, which ends with rank 0. Nothing here
waits without a limit, or raises because the other ranks, or the folder, are gone.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.whereabouts import Whereabouts, latecomers, where_they_are
from lm_profiler.measure.boundary import message_of
from lm_profiler.record.run import Failure, RankEnd, cause_of, end_file, read_as

RANK_LOST = "RankLost"
"""The type of the failure where a rank left no word of its own."""

_LOOK_S = 0.1

_GROUP_FAILED = re.compile(
    r"gloo|NCCL|ProcessGroup|Connection (closed|reset)|Broken pipe|Timed out waiting|[Ss]ocket|"
    r"remote (server|process)|TCPStore|wait timeout after|Watchdog",
)
"""What torch, gloo and NCCL say of a collective or a store whose other end is gone, or did not come in time."""

_DONE = "had no step left to do while the others had: do the ranks' loaders differ in length?"


def is_of_the_group(error: BaseException) -> bool:
    """Whether ``error`` says that another rank is gone or did not come, and nothing of why."""
    if type(error).__name__.startswith("Dist"):  # torch's own: DistBackendError, DistNetworkError, …
        return True
    return isinstance(error, (RuntimeError, OSError)) and _GROUP_FAILED.search(message_of(error)) is not None


@dataclass(eq=False)
class Roll:
    """Of one run. Alone, it has nothing to tell.

    Args:
        exchange: between the ranks.
        host: of this process.
        codes: exit codes of the ranks that this process started and that have ended.
        clock: seconds since 1970.
        pause: waits so many seconds.
    """

    exchange: Exchange
    host: str = ""
    codes: Callable[[], Mapping[int, int]] = dict
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    told: RankEnd | None = field(default=None, init=False)
    first_host: str | None = field(default=None, init=False)

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.exchange.store is None

    def present(self) -> None:
        """Leave the name of this host, for whoever misses this rank later."""
        if not self.alone:
            with suppress(Exception):
                self.exchange.store.set(self._key("host", self.exchange.rank), self.host)

    def mine(self, failure: Failure) -> Failure:
        """``failure`` with this rank and host, where there are others."""
        return failure if self.alone else failure.model_copy(update={"rank": self.exchange.rank, "host": self.host})

    def done(self) -> None:
        """Leave that this rank's steps are over, and went well."""
        if not self.alone:
            with suppress(Exception):
                self.exchange.store.set(self._key("done", self.exchange.rank), b"")

    def tell(self, end: RankEnd, folder: Path | None) -> None:
        """Leave how this rank ended, for the others and for good; once."""
        if self.alone or self.told is not None:
            return
        self.told = end
        if folder is not None:
            with suppress(OSError):
                end.write(folder / end_file(self.exchange.rank))
        with suppress(Exception):
            self.exchange.store.set(self._key("ended", self.exchange.rank), end.model_dump_json())
            self.exchange.store.set(self._key("over"), str(self.exchange.rank))

    def is_over(self, store: Any) -> bool:
        """Whether another rank has ended, or rank 0 is gone with its store; by a connection of the caller's own."""
        try:
            return bool(store.check([self._key("over")]))
        except Exception:
            return True

    def is_there(self) -> bool:
        """Whether rank 0 is, with its store."""
        try:
            self.exchange.store.check([self._key("over")])
        except Exception:
            return False
        return True

    def others(self, folder: Path | None, patience_s: float) -> tuple[dict[int, RankEnd], list[int]]:
        """How the other ranks ended that say so in time, and those that say nothing."""
        waiting = set(range(self.exchange.ranks)) - {self.exchange.rank}
        ends: dict[int, RankEnd] = {}
        until = self.clock() + patience_s
        with suppress(KeyboardInterrupt):  # whoever started the ranks ends them all; what is known by then is told
            while waiting:
                for rank in sorted(waiting):
                    if (end := self._end_of(rank, folder)) is not None:
                        ends[rank] = end
                waiting -= ends.keys()
                if self.clock() >= until or waiting <= self.codes().keys():
                    break
                self.pause(_LOOK_S)
        return ends, sorted(waiting)

    @property
    def has_lost(self) -> bool:
        """Whether a rank is known to have ended badly: who is interrupted then, follows it."""
        return any(self.codes().values())

    def cause(self, own: RankEnd, ends: Mapping[int, RankEnd], silent: list[int]) -> RankEnd:
        """What the run ended of: the earliest end that followed from no other; else who is gone; else who is late."""
        first = cause_of([own, *ends.values()])
        if first is not None:
            return first
        if silent:
            return self._gone(silent, own)
        places = self.places()
        late = latecomers(places)
        if not late:
            return own
        there = places.get(late[0]) or Whereabouts(None, "other", 0.0)
        failure = Failure(
            phase=there.phase,
            step=there.step,
            type=own.failure.type,
            message=f"a collective failed to which not every rank came: {where_they_are(places, late)}",
            rank=late[0],
            host=self.host_of(late[0]),
        )
        return own.model_copy(update={"failure": failure})

    def place(self, place: Whereabouts | None, store: Any) -> None:
        """Tell where this rank is while nothing moves; None: it does again. By a connection of the caller's own.

        Raises:
            Exception: the store is gone.
        """
        store.set(self._key("place", self.exchange.rank), "" if place is None else place.packed())

    def places(self, store: Any = None) -> dict[int, Whereabouts | None]:
        """Where each rank said that it is; None of one that said nothing."""
        store = self.exchange.store if store is None else store
        places: dict[int, Whereabouts | None] = dict.fromkeys(range(self.exchange.ranks))
        for rank in places:
            with suppress(Exception):
                if store.check([key := self._key("place", rank)]) and (text := store.get(key)):
                    places[rank] = Whereabouts.unpacked(text)
        return places

    def _gone(self, silent: list[int], own: RankEnd) -> RankEnd:
        """Of ranks that left no word, the one whose exit code is known, or the first."""
        codes = self.codes()
        rank = next((rank for rank in silent if codes.get(rank)), silent[0])
        how = _DONE if self._is_done(rank) else how_it_ended(codes.get(rank))
        more = f"; so did rank {', '.join(str(other) for other in silent if other != rank)}" if len(silent) > 1 else ""
        place = self.places()[rank]
        failure = Failure(
            phase=own.failure.phase if place is None else place.phase,
            step=own.failure.step if place is None else place.step,
            type=RANK_LOST,
            message=f"{how}{more}",
            rank=rank,
            host=self.host_of(rank),
        )
        return own.model_copy(update={"status": "failed", "failure": failure, "followed": False})

    def _end_of(self, rank: int, folder: Path | None) -> RankEnd | None:
        with suppress(Exception):
            if self.exchange.store.check([key := self._key("ended", rank)]):
                return RankEnd.model_validate_json(self.exchange.store.get(key))
        if folder is not None and (folder / end_file(rank)).exists():
            with suppress(Exception):
                return read_as(folder / end_file(rank), RankEnd, "a rank's end")
        return None

    def host_of(self, rank: int, store: Any = None) -> str | None:
        """The host that it ran on, as it said at the start."""
        store = self.exchange.store if store is None else store
        with suppress(Exception):
            if store.check([key := self._key("host", rank)]):
                return str(store.get(key).decode())
        return None if rank else self.first_host

    def _is_done(self, rank: int) -> bool:
        with suppress(Exception):
            return bool(self.exchange.store.check([self._key("done", rank)]))
        return False

    def _key(self, *what: object) -> str:
        return self.exchange.key("end", *what)


def codes_of(trainer: Any) -> dict[int, int]:
    """Exit codes of ranks that have ended: of those that this process started as commands of their own, or, in a rank
    that was started by multiprocessing, of those beside it that ended badly."""
    launcher = trainer.strategy.launcher
    if (known := getattr(launcher, "codes", None)) is not None:
        return dict(known)
    processes = getattr(launcher, "procs", [])
    ended = (
        (trainer.global_rank + n, process.poll()) for n, process in enumerate(processes, 1) if hasattr(process, "poll")
    )
    return {rank: code for rank, code in ended if code is not None}


def how_it_ended(code: int | None) -> str:
    """Of a process, by its exit code; None is unknown."""
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"

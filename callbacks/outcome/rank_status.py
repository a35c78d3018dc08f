"""What the ranks of a failing run tell each other: how each of them ended, and who is missing.

They leave it in two places: in the run's folder, which not every node may see, and in the store of torch's process
group, which ends with rank 0. Nothing here waits without a limit, or raises because other ranks or the folder are gone.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.rank_position import RankPosition, stragglers, where_they_are
from lm_profiler.measure.boundary import message_of
from lm_profiler.record.run import Failure, RankEnd, Status, cause_of, end_file, read_as

RANK_LOST = "RankLost"  # type of the failure where a rank ended without leaving a word

_LOOK_S = 0.1  # seconds between two looks for how the other ranks ended

_BEAT_S = 1.0  # seconds between two looks of the stall watch

_ASK_S = 1.0  # seconds without a finished step after which the store is asked whether another rank has ended

# a rank tells where it is after so many seconds, and so many times its longest step, without a finished step
_TELL_S, _TELL_STEPS = 10.0, 3.0

_SAY_S = 60.0  # seconds without a finished step after which rank 0 prints who is missing

# matches the messages of torch, gloo and NCCL about a collective or a store whose other end is gone or late
_GROUP_FAILED = re.compile(
    r"gloo|NCCL|ProcessGroup|Connection (closed|reset)|Broken pipe|Timed out waiting|[Ss]ocket|"
    r"remote (server|process)|TCPStore|wait timeout after|Watchdog",
)

_DONE = "had no step left to do while the others had: do the ranks' loaders differ in length?"


def is_of_the_group(error: BaseException) -> bool:
    """Return whether ``error`` says only that another rank is gone or did not come, and not why."""
    if type(error).__name__.startswith("Dist"):  # torch's own: DistBackendError, DistNetworkError, …
        return True
    return isinstance(error, (RuntimeError, OSError)) and _GROUP_FAILED.search(message_of(error)) is not None


@dataclass(eq=False)
class RankStatus:
    """How this rank ended, and what it knows of the others. A rank that is alone has nothing to tell.

    ``told`` is what this rank has left of its own end. ``first_host`` is the host of rank 0.
    """

    exchange: Exchange  # connects the ranks
    host: str = ""  # name of this process's host
    # returns the exit codes of ranks that this process started and that have ended
    codes: Callable[[], Mapping[int, int]] = dict
    clock: Callable[[], float] = time.time  # returns seconds since 1970
    pause: Callable[[float], None] = time.sleep  # waits so many seconds
    told: RankEnd | None = field(default=None, init=False)
    first_host: str | None = field(default=None, init=False)

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.exchange.store is None

    def present(self) -> None:
        """Leave the name of this host, for whoever misses this rank later."""
        self._leave("host", self.host)

    def done(self) -> None:
        """Leave that this rank's steps are over, and went well."""
        self._leave("done", "")

    def end_of(self, status: Status, failure: Failure, followed: bool) -> RankEnd:
        """Return how this rank ended, as of now; where there are others, the failure names this rank and its host.

        ``followed``: whether another rank's end is known to be the cause.
        """
        if not self.alone:
            failure = failure.model_copy(update={"rank": self.exchange.rank, "host": self.host})
        return RankEnd(status=status, failure=failure, at=self.clock(), followed=followed)

    def tell(self, end: RankEnd, folder: Path | None) -> None:
        """Leave how this rank ended in the folder and in the store, once."""
        if self.alone or self.told is not None:
            return
        self.told = end
        # The file first, because it outlives the store; "over" last, so that who sees it finds what was left before.
        if folder is not None:
            with suppress(OSError):
                end.write(folder / end_file(self.exchange.rank))
        self._leave("ended", end.model_dump_json())
        with suppress(Exception):
            self.exchange.store.set(self._key("over"), str(self.exchange.rank))

    def is_over(self, store: Any) -> bool:
        """Return whether another rank has ended, or rank 0 is gone, by the caller's own connection to the store."""
        try:
            return bool(store.check([self._key("over")]))
        except Exception:
            return True

    def is_there(self) -> bool:
        """Return whether rank 0 is there, with its store."""
        try:
            self.exchange.store.check([self._key("over")])
        except Exception:
            return False
        return True

    def others(self, folder: Path | None, patience_s: float) -> tuple[dict[int, RankEnd], list[int]]:
        """Return how other ranks ended, as far as they tell within ``patience_s``, and the ranks that do not."""
        waiting = set(range(self.exchange.ranks)) - {self.exchange.rank}
        ends: dict[int, RankEnd] = {}
        until = self.clock() + patience_s
        with suppress(KeyboardInterrupt):  # whoever started the ranks ends them all; what is known by then is told
            while waiting:
                for rank in sorted(waiting):
                    if (end := self._end_of(rank, folder)) is not None:
                        ends[rank] = end
                waiting -= ends.keys()
                # A rank whose exit code is known has ended: what it has not told by now never comes.
                if self.clock() >= until or waiting <= self.codes().keys():
                    break
                self.pause(_LOOK_S)
        return ends, sorted(waiting)

    @property
    def has_lost(self) -> bool:
        """Return whether a rank is known to have ended badly: an interrupt of this one then follows from that."""
        return any(self.codes().values())

    def cause(self, own: RankEnd, ends: Mapping[int, RankEnd], silent: list[int]) -> RankEnd:
        """Return the end that caused the others: the first that followed from none, or that of a missing rank."""
        # Clocks of machines differ, so an end that followed is left out whatever its time.
        first = cause_of([own, *ends.values()])
        if first is not None:
            return first
        if silent:
            return self._gone(silent, own)
        positions = self.places()
        late = stragglers(positions)
        if not late:
            return own
        there = positions.get(late[0]) or RankPosition(None, "other", 0.0)
        failure = Failure(
            phase=there.phase,
            step=there.step,
            type=own.failure.type,
            message=f"a collective failed to which not every rank came: {where_they_are(positions, late)}",
            rank=late[0],
            host=self.host_of(late[0]),
        )
        return own.model_copy(update={"failure": failure})

    def place(self, place: RankPosition | None, store: Any) -> None:
        """Tell where this rank is while no step ends; None says that steps end again.

        Args:
            place: this rank's position.
            store: a connection of the caller's own.

        Raises:
            Exception: the store is gone.
        """
        store.set(self._key("place", self.exchange.rank), b"" if place is None else place.packed())

    def places(self, store: Any = None) -> dict[int, RankPosition | None]:
        """Return where each rank said that it is; None for one that said nothing."""
        places: dict[int, RankPosition | None] = dict.fromkeys(range(self.exchange.ranks))
        for rank in places:
            with suppress(ValueError):
                if text := self._left(rank, "place", store):
                    places[rank] = RankPosition.unpacked(text)
        return places

    def host_of(self, rank: int, store: Any = None) -> str | None:
        """Return the host of ``rank``, as it said at the start."""
        if (host := self._left(rank, "host", store)) is not None:
            return host.decode()
        return None if rank else self.first_host

    def _gone(self, silent: list[int], own: RankEnd) -> RankEnd:
        """Return the end of one of the ``silent`` ranks: the first with a bad exit code, or the first of all."""
        codes = self.codes()
        rank = next((rank for rank in silent if codes.get(rank)), silent[0])
        how = how_it_ended(codes.get(rank)) if self._left(rank, "done") is None else _DONE
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
        with suppress(ValueError):
            if (text := self._left(rank, "ended")) is not None:
                return RankEnd.model_validate_json(text)
        with suppress(Exception):
            if folder is not None and (folder / end_file(rank)).exists():
                return read_as(folder / end_file(rank), RankEnd, "a rank's end")
        return None

    def _leave(self, what: str, value: str) -> None:
        """Leave ``value`` in the store under this rank's number, where there are others and the store is there."""
        if not self.alone:
            with suppress(Exception):
                self.exchange.store.set(self._key(what, self.exchange.rank), value)

    def _left(self, rank: int, what: str, store: Any = None) -> bytes | None:
        """Return what ``rank`` left; None where it left nothing, or the store is gone."""
        store = self.exchange.store if store is None else store
        with suppress(Exception):
            if store.check([key := self._key(what, rank)]):
                return bytes(store.get(key))
        return None

    def _key(self, *what: object) -> str:
        return self.exchange.key("end", *what)


def codes_of(trainer: Any) -> dict[int, int]:
    """Return the exit codes, by rank, of ranks that have ended and that this process can ask about.

    In a rank that was started by multiprocessing these are its siblings that ended badly; otherwise the ranks that this
    process started as commands of their own.
    """
    launcher = trainer.strategy.launcher
    if (known := getattr(launcher, "codes", None)) is not None:
        return dict(known)
    processes = getattr(launcher, "procs", [])
    ended = (
        (trainer.global_rank + n, process.poll()) for n, process in enumerate(processes, 1) if hasattr(process, "poll")
    )
    return {rank: code for rank, code in ended if code is not None}


def how_it_ended(code: int | None) -> str:
    """Return in words how a process ended, from its exit code; None is unknown."""
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(eq=False)
class StallWatch:
    """A thread beside training that tells where this rank is, and who is missing, when no step ends any more.

    While steps end it reads one number a second, and nothing else. It reaches the store over a connection of its own,
    because training may be waiting in the other.

    ``over`` becomes true when another rank has ended and this one waits for nothing that can come.
    """

    status: RankStatus  # what the ranks tell each other
    steps: Callable[[], int]  # returns how many steps have ended
    place: Callable[[], RankPosition]  # returns where this rank is
    say: Callable[[str], object]  # prints a line, and adds it to the notes
    limit_s: float  # seconds that torch lets a collective wait; the watch speaks before they are over
    clock: Callable[[], float] = time.monotonic  # returns seconds
    over: bool = field(default=False, init=False)
    _seen: int = -1
    _moved_s: float = 0.0
    _longest_s: float = 0.0
    _told: bool = False
    _said: bool = False
    _store: Any = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="lm_profiler-watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        with suppress(Exception):  # without its store the watch ends in silence; training must not notice
            while not (self._ended.wait(_BEAT_S) or self.over):
                self.beat()

    def beat(self) -> None:
        """Look once.

        Raises:
            Exception: the store cannot be reached by a connection of its own.
        """
        now, steps = self.clock(), self.steps()
        if steps != self._seen:
            if self._seen > 0:  # the first step may compile, and says nothing of how long steps take
                self._longest_s = max(self._longest_s, now - self._moved_s)
            self._seen, self._moved_s, self._said = steps, now, False
            if self._told:
                self._told = False
                self.status.place(None, self._store)
            return
        still_s = now - self._moved_s
        if still_s < _ASK_S:
            return
        if self._store is None:
            # A wait in the shared connection holds its lock until the other rank comes.
            self._store = self.status.exchange.store.clone()
        if self.status.is_over(self._store):
            self.over = True
        elif still_s >= max(min(_TELL_S, self.limit_s / 4), _TELL_STEPS * self._longest_s):
            self._told = True
            self.status.place(self.place(), self._store)
            if still_s >= min(_SAY_S, self.limit_s / 2) and self.status.exchange.rank == 0 and not self._said:
                self._tell()

    def _tell(self) -> None:
        positions = self.status.places(self._store)
        if late := stragglers(positions):
            self._said = True
            hosts = {rank: self.status.host_of(rank, self._store) for rank in late}
            still_s = self.clock() - self._moved_s
            self.say(f"no step has ended for {still_s:.0f} s: {where_they_are(positions, late, hosts)}")

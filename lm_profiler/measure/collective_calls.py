"""Reads torch's flight recorder: a ring buffer with every collective call of this process and its wall-clock time.

It is on unless ``TORCH_FR_BUFFER_SIZE`` is 0, on every backend, and costs the same whether it is read or not. On a GPU
the host only enqueues, and the time of its call does not tell when the device gets there: NCCL is told to time its
calls there, and waits of the computing stream are timed by ``StreamWaits``.
"""

from __future__ import annotations

import os
import pickle
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from lm_profiler.torch_names import DDP_FACTS, FLIGHT_RECORDER, NCCL_RECORDER, TIME_COLLECTIVES, WORLD

Dump = Callable[[], Sequence[Mapping[str, Any]]]  # the ring's entries, oldest first

_TRIES = 20  # attempts to read two clocks at the same time; the closest counts, and is within a microsecond

_PATIENCE_S = 2.0  # seconds: NCCL's watchdog reads the events every tenth of a second, in torch 2.15 every second
_LOOK_S = 0.05  # seconds between two looks

# NTP slews wall clock and monotonic clock alike (clock_gettime(2)). If they drift apart by more than this share of the
# time and this constant, the wall clock was set.
_DRIFT, _JITTER_NS = 1e-5, 100_000


class CollectiveCall(NamedTuple):
    """One collective call."""

    group: str  # the group's name
    number: int  # its sequence number, the same on all ranks of the group
    name: str  # the operation
    wall_ns: int  # when it was called
    duration_ns: int | None = None  # how long it took on the device, where that was timed


def flight_recorder(device_type: str) -> Dump | None:
    """Return a reader of this process's ring for collectives of ``device_type``; None if this torch has none.

    Reading takes some 10 µs per entry and leaves the ring unchanged. NCCL has its own ring. Call it once the
    process group exists: torch 2.15 records that through hooks, in a ring of another name.
    """
    if not torch.distributed.is_available():
        return None
    backend = _hooked(device_type)
    dump = (NCCL_RECORDER if device_type == "cuda" and backend is None else FLIGHT_RECORDER).find_or(None)
    if dump is None:  # a build without NCCL lacks one of them
        return None
    of = {} if backend is None else {"backend": backend}
    # collectives of all states, without stacks
    return lambda: pickle.loads(dump(True, False, False, **of)).get("entries", [])


def _hooked(device_type: str) -> str | None:
    """Return the backend of ``device_type`` if torch records it through hooks, else None."""
    group = torch.distributed.group.WORLD
    world = WORLD.find_or(None)
    if group is None or group not in getattr(world, "pg_flight_recorder_hooks", ()):
        return None
    backends = dict(of.split(":") for of in torch.distributed.get_backend_config(group).split(","))
    return str(backends[device_type])


def ring_size() -> int:
    """Return the capacity of the ring, as torch's ``FlightRecorder.hpp`` reads it."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        with suppress(KeyError, ValueError):
            return int(os.environ[name])
    return 2000


def collectives(entries: Iterable[Mapping[str, Any]]) -> Iterator[CollectiveCall]:
    """Yield the collective calls among ``entries``, without point-to-point calls, for which no other rank waits."""
    for entry in entries:
        if not entry.get("is_p2p"):
            took_ms = entry.get("duration_ms")
            yield CollectiveCall(
                str(entry["process_group"][0]),
                entry["collective_seq_id"],
                entry["profiling_name"],
                entry["time_created_ns"],
                None if took_ms is None else round(took_ms * 1e6),
            )


def pending(entries: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the oldest of ``entries`` that has not ended, as in ``gloo:broadcast number 7``; None where all have."""
    calls = (each for each in entries if not each.get("retired", True))
    return next((f"{each['profiling_name']} number {each['collective_seq_id']}" for each in calls), None)


def wall_ahead_ns(clock: Callable[[], int], wall: Callable[[], int] = time.time_ns) -> int:
    """Return the wall clock minus ``clock``, from the closest of several readings."""
    readings = ((clock(), wall(), clock()) for _ in range(_TRIES))
    before, at, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return at - (before + after) // 2


@dataclass(eq=False)
class Arrivals:
    """Collects the ring's calls before they are overwritten, and converts their instants to ``clock``."""

    dump: Dump  # reads the ring
    clock: Callable[[], int] = time.perf_counter_ns  # the host's clock of the marks
    wall: Callable[[], int] = time.time_ns  # the ring's clock
    room: int = field(default_factory=ring_size)  # the capacity of the ring
    calls: list[CollectiveCall] = field(default_factory=list)  # calls since the first reading
    at_ns: list[int] = field(default_factory=list)  # instants of ``calls``
    lost: bool = False  # whether entries were overwritten before they were read
    clock_was_set: bool = False  # whether the wall clock was set, so that the instants cannot be trusted
    last: int = -1  # the number of the newest entry that was read
    _ahead: tuple[int, int] | None = None

    def drain(self) -> int:
        """Read new entries, and return how many there were; not all of them are collectives."""
        entries = self.dump()
        now, ahead_ns = self.clock(), wall_ahead_ns(self.clock, self.wall)
        was_at, was_ahead_ns = self._ahead or (now, ahead_ns)
        first, last = self._ahead is None, self.last
        self._ahead = (now, ahead_ns)
        if abs(ahead_ns - was_ahead_ns) > _DRIFT * (now - was_at) + _JITTER_NS:
            self.clock_was_set = True
        fresh = [entry for entry in entries if entry["record_id"] > last]
        if not fresh:
            return 0
        self.lost |= not first and fresh[0]["record_id"] > last + 1
        self.last = fresh[-1]["record_id"]
        calls = list(collectives(fresh))
        self.calls += calls
        self.at_ns += [call.wall_ns - ahead_ns for call in calls]
        return len(fresh)


def time_collectives() -> None:
    """Switch timing on for all groups, at the cost of two events a collective. It cannot be switched off."""
    for group in list(WORLD.find().pg_map):
        TIME_COLLECTIVES.of(group)()


def drain_timed(arrivals: Arrivals, sleep: Callable[[float], object] = time.sleep) -> None:
    """Read the ring once the durations of its new entries are known, or after two seconds; the device must be idle."""
    for _ in range(round(_PATIENCE_S / _LOOK_S)):
        fresh = (entry for entry in arrivals.dump() if entry["record_id"] > arrivals.last)
        if all(call.duration_ns is not None for call in collectives(fresh)):
            break
        sleep(_LOOK_S)
    arrivals.drain()


def reduces_in_backward(wrapped: object) -> bool:
    """Return whether gradients are exchanged during backward, so that ranks wait only for the last exchange.

    So DDP does. A wrapper that says when it finishes may say otherwise (``training.data_parallel``).
    """
    if isinstance(wrapped, DistributedDataParallel):
        return True
    return bool(getattr(wrapped, "reduces_in_backward", hasattr(wrapped, "finish_gradient_synchronization")))


def most_reductions(wrapped: object) -> int | None:
    """Return how many all-reduces DDP calls in a backward at most: one for each of its buckets.

    None where ``wrapped`` is no DDP, or has a communication hook of the user's, which may call anything.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    known = DDP_FACTS.of(wrapped)()
    if known.get("comm_hook"):
        return None
    unused = wrapped.find_unused_parameters  # then DDP never rebuilds its first buckets, and reduces what was used
    told = known.get("rebuilt_bucket_sizes" if known.get("has_rebuilt_buckets") else "bucket_sizes" if unused else "")
    return told.count(",") + 1 + unused if told else None


class Stand(NamedTuple):
    """One wait of the computing stream, between two of its instants; the host enqueued it ``at_ns``."""

    at_ns: int
    since: torch.Event
    until: torch.Event


class StreamWaits:
    """Notes every wait of the current stream for another one from ``start`` to ``stop``, at two events each.

    FSDP issues its collectives early, on its own streams, and has the computing stream wait where it needs the
    results. The duration of a collective says little about that wait: two that queue behind each other both take long,
    while the computing stream is busy.

    ``record`` returns an instant of the current stream, ``clock`` is the host's of the marks.
    """

    def __init__(
        self, record: Callable[[], torch.Event], clock: Callable[[], int] = time.perf_counter_ns, cuda: Any = torch.cuda
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

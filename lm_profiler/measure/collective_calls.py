"""Reads torch's flight recorder: a ring buffer with every collective call of this process and its wall-clock time.

It is on unless ``TORCH_FR_BUFFER_SIZE`` is 0, on every backend, and costs the same whether it is read or not. On a GPU
the host only enqueues a call, so its time does not show when the device executes it. There NCCL times its calls, and
``StreamWaits`` times the waits of the computing stream.
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

from lm_profiler.torch_names import (
    DDP_FACTS,
    FLIGHT_RECORDER,
    NCCL_RECORDER,
    TIME_COLLECTIVES,
    WORLD,
)

# returns the ring's entries, the oldest first
Dump = Callable[[], Sequence[Mapping[str, Any]]]

# attempts to read two clocks at the same time; the pair that took least time counts, which is below a microsecond
_TRIES = 20

# How long to wait for durations: NCCL's watchdog reads the events every tenth of a second, in torch 2.15 every second.
_PATIENCE_S = 2.0
_RETRY_S = 0.05  # the pause between two readings of the ring

# NTP slews wall clock and monotonic clock alike (clock_gettime(2)). If they drift apart by more than this share of the
# elapsed time and this constant, the wall clock was set.
_DRIFT = 1e-5
_JITTER_NS = 100_000  # because one clock is read after the other


class CollectiveCall(NamedTuple):
    """One collective call."""

    group: str  # the name of the process group
    number: int  # its sequence number, the same on all ranks of the group
    name: str  # the operation
    wall_ns: int  # when it was called
    # the duration of the call on the device, if it was timed
    duration_ns: int | None = None


def flight_recorder(device_type: str) -> Dump | None:
    """Return a reader of this process's ring for collectives of ``device_type``; None if this torch has no ring.

    Reading takes some 10 µs per entry and does not change the ring. NCCL has its own ring. Call this when the process
    group exists, because torch 2.15 may record the group through hooks, in another ring.
    """
    if not torch.distributed.is_available():
        return None
    backend = _hooked_backend(device_type)
    options = {}
    if backend is not None:
        options["backend"] = backend
    has_own_ring = device_type == "cuda" and backend is None
    recorder = NCCL_RECORDER if has_own_ring else FLIGHT_RECORDER
    dump = recorder.find_or(None)
    if dump is None:  # such as in a build without NCCL
        return None

    def read_entries() -> Sequence[Mapping[str, Any]]:
        """Return the recorded collectives, each as torch's dictionary of its fields."""
        # the arguments of torch: include collectives, include stack traces, only calls that are active
        ring = pickle.loads(dump(True, False, False, **options))
        entries: Sequence[Mapping[str, Any]] = ring.get("entries", [])
        return entries

    return read_entries


def _hooked_backend(device_type: str) -> str | None:
    """Return the backend of ``device_type`` if torch records it through hooks, else None."""
    group = torch.distributed.group.WORLD
    world = WORLD.find_or(None)
    if group is None or group not in getattr(world, "pg_flight_recorder_hooks", ()):
        return None
    # such as "cpu:gloo,cuda:nccl"
    pairs = torch.distributed.get_backend_config(group).split(",")
    backends = dict(pair.split(":") for pair in pairs)
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
        if entry.get("is_p2p"):
            continue
        duration_ms = entry.get("duration_ms")
        duration_ns = None if duration_ms is None else round(duration_ms * 1e6)
        yield CollectiveCall(
            group=str(entry["process_group"][0]),
            number=entry["collective_seq_id"],
            name=entry["profiling_name"],
            wall_ns=entry["time_created_ns"],
            duration_ns=duration_ns,
        )


def oldest_pending_call(entries: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the oldest call that has not ended, such as ``gloo:broadcast number 7``; None if all have ended.

    ``entries`` begin with the oldest call.
    """
    for entry in entries:
        has_ended = entry.get("retired", True)
        if not has_ended:
            return f"{entry['profiling_name']} number {entry['collective_seq_id']}"
    return None


def wall_ahead_ns(
    clock: Callable[[], int], wall: Callable[[], int] = time.time_ns
) -> int:
    """Return the wall clock minus ``clock``, from the fastest of several readings of both."""
    shortest_ns: int | None = None
    ahead_ns = 0
    for _ in range(_TRIES):
        begin_ns = clock()
        wall_ns = wall()
        end_ns = clock()
        if shortest_ns is None or end_ns - begin_ns < shortest_ns:
            shortest_ns = end_ns - begin_ns
            ahead_ns = wall_ns - (begin_ns + end_ns) // 2
    return ahead_ns


class _ClockReading(NamedTuple):
    """Two clocks, read at the same time."""

    at_ns: int  # the host's clock
    ahead_ns: int  # the wall clock minus the host's clock


def _was_set_between(earlier: _ClockReading, later: _ClockReading) -> bool:
    """Return whether the wall clock was set between two readings, because it drifted more than clocks do."""
    drift_ns = abs(later.ahead_ns - earlier.ahead_ns)
    elapsed_ns = later.at_ns - earlier.at_ns
    return drift_ns > _DRIFT * elapsed_ns + _JITTER_NS


@dataclass(eq=False)
class Arrivals:
    """Collects collective calls from torch's flight recorder, a ring buffer, before they are overwritten.

    Their instants are converted to ``clock``.
    """

    dump: Dump  # reads torch's flight recorder
    clock: Callable[[], int] = time.perf_counter_ns  # the host's clock of the marks
    wall: Callable[[], int] = time.time_ns  # the clock of the recorder
    # the number of entries that the recorder holds
    capacity: int = field(default_factory=ring_size)
    # the collective calls that were read
    calls: list[CollectiveCall] = field(default_factory=list)
    at_ns: list[int] = field(default_factory=list)  # when each of ``calls`` was made
    lost: bool = False  # whether entries were overwritten before they were read
    # whether the wall clock was set, so that the instants cannot be trusted
    clock_was_set: bool = False
    newest_record: int = -1  # the number of the newest entry that was read
    # the clocks at the last reading of the recorder
    _clocks: _ClockReading | None = None

    def read_ring(self) -> int:
        """Read new entries, and return how many there were; not all of them are collectives."""
        entries = self.dump()
        clocks = _ClockReading(self.clock(), wall_ahead_ns(self.clock, self.wall))
        is_first_reading = self._clocks is None
        if self._clocks is not None and _was_set_between(self._clocks, clocks):
            self.clock_was_set = True
        self._clocks = clocks

        new_entries = []
        for entry in entries:
            if entry["record_id"] > self.newest_record:
                new_entries.append(entry)
        if not new_entries:
            return 0
        # Entries before the first reading are not needed.
        has_gap = new_entries[0]["record_id"] > self.newest_record + 1
        if has_gap and not is_first_reading:
            self.lost = True
        self.newest_record = new_entries[-1]["record_id"]
        for call in collectives(new_entries):
            self.calls.append(call)
            self.at_ns.append(call.wall_ns - clocks.ahead_ns)
        return len(new_entries)


def time_collectives() -> None:
    """Switch on NCCL's timing for all groups, at the cost of two events per collective. It cannot be switched off."""
    for group in list(WORLD.find().pg_map):
        TIME_COLLECTIVES.get(group)()


def read_timed_ring(
    arrivals: Arrivals, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Read torch's flight recorder (a ring buffer of collectives) once the durations of new entries are known.

    After two seconds it is read in any case. The device must be idle.
    """
    for _ in range(round(_PATIENCE_S / _RETRY_S)):
        new_entries = []
        for entry in arrivals.dump():
            if entry["record_id"] > arrivals.newest_record:
                new_entries.append(entry)
        if all(call.duration_ns is not None for call in collectives(new_entries)):
            break
        sleep(_RETRY_S)
    arrivals.read_ring()


def reduces_in_backward(wrapped: object) -> bool:
    """Return whether gradients are exchanged during backward, so that ranks wait only for the last exchange.

    DDP does that. So does a wrapper with ``finish_gradient_synchronization`` (``training.data_parallel``), unless its
    attribute ``reduces_in_backward`` is False.
    """
    if isinstance(wrapped, DistributedDataParallel):
        return True
    finishes_later = hasattr(wrapped, "finish_gradient_synchronization")
    return bool(getattr(wrapped, "reduces_in_backward", finishes_later))


def most_reductions(wrapped: object) -> int | None:
    """Return how many all-reduces DDP calls in a backward pass at most: one for each of its buckets.

    None if ``wrapped`` is not DDP, or has a communication hook of the user, which may make any calls.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    facts = DDP_FACTS.get(wrapped)()
    if facts.get("comm_hook"):
        return None
    # With this option DDP never rebuilds its first buckets.
    reduces_what_was_used = wrapped.find_unused_parameters
    sizes: str | None = None  # the sizes of the buckets, with commas between them
    if facts.get("has_rebuilt_buckets"):
        sizes = facts.get("rebuilt_bucket_sizes")
    elif reduces_what_was_used:
        sizes = facts.get("bucket_sizes")
    if not sizes:
        return None
    buckets = sizes.count(",") + 1
    if reduces_what_was_used:
        return buckets + 1  # one more call exchanges which parameters were used
    return buckets


class StreamWait(NamedTuple):
    """One wait of the computing stream."""

    at_ns: int  # when the host enqueued it
    begin: torch.Event  # the stream's event before the wait
    end: torch.Event  # the instant of the stream after the wait


class StreamWaits:
    """Notes every wait of the computing stream for another stream from ``start`` to ``stop``, by two events each.

    FSDP issues its collectives early, on its own streams, and the computing stream waits when it needs the results. The
    duration of a collective hardly shows that wait: two collectives in a queue both take long, while the computing
    stream is busy.

    Args:
        record: returns an instant of the current stream.
        clock: the host's clock of the marks.
        cuda: has the functions of ``torch.cuda``.
    """

    def __init__(
        self,
        record: Callable[[], torch.Event],
        clock: Callable[[], int] = time.perf_counter_ns,
        cuda: Any = torch.cuda,
    ) -> None:
        self._record = record
        self._clock = clock
        self._cuda = cuda
        # when the stream was set (ns), and whether to another one
        self._switches: list[tuple[int, bool]] = []
        self._undo = ExitStack()
        self.waits: list[StreamWait] = []

    def start(self) -> None:
        """Start noting waits; the current stream counts as the computing stream."""
        computing_stream = self._cuda.current_stream()
        wait_event = self._cuda.Stream.wait_event
        set_stream = self._cuda.set_stream

        def noting_wait_event(stream: Any, event: Any) -> None:
            """Let ``stream`` wait for ``event``, and note the wait if it is that of the computing stream."""
            # The events below are recorded on the current stream, so it must be the one that waits.
            is_computing = (
                stream == computing_stream
                and self._cuda.current_stream() == computing_stream
            )
            if not is_computing:
                wait_event(stream, event)
                return
            at_ns = self._clock()
            begin = self._record()
            wait_event(stream, event)
            self.waits.append(StreamWait(at_ns, begin, self._record()))

        def noting_set_stream(stream: Any) -> None:
            """Set the current stream, and note when, and whether it is another one than the computing stream."""
            set_stream(stream)
            if stream is not None:  # torch ignores None
                self._switches.append((self._clock(), stream != computing_stream))

        self._replace(self._cuda.Stream, "wait_event", noting_wait_event)
        self._replace(self._cuda, "set_stream", noting_set_stream)

    def _replace(self, owner: Any, name: str, function: Callable[..., object]) -> None:
        """Replace a function of ``owner`` until ``stop``."""
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)

    def stop(self) -> None:
        """Restore torch's functions; may be called twice."""
        self._undo.close()

    def is_on_other_stream(self, at_ns: int) -> bool:
        """Return whether the host was working on another stream at ``at_ns``."""
        switches_before = bisect_right(self._switches, (at_ns, True))
        if switches_before == 0:
            return False
        _, is_other_stream = self._switches[switches_before - 1]
        return is_other_stream

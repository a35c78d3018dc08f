"""Reads the counters of this process between steps, and computes figures of each step from them after the run.

A step costs two system calls: getrusage(2) of the process, and a read of ``/proc/thread-self/schedstat`` for the thread
that trains (Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import sub
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lm_profiler.measure.counts.recompiles import TimedCompilation, compilations
from lm_profiler.record.run_record import StepCounters
from lm_profiler.torch_names import READY

_SCHEDSTAT = Path("/proc/thread-self/schedstat")

# The most CPU time, in seconds, that a minor page fault takes: clearing a huge page of 2 MiB at 4 GB/s. A small page
# takes a thousandth of that; the number of huge ones is unknown, so the kernel's CPU time is often the closer bound.
DEAREST_FAULT_S = 0.5e-3

# seconds by which the time of day may drift from the clock of the steps; beyond that its instants are not used
_APART_S = 1e-3

_USAGE = ("ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw")
_of_process = partial(getrusage, RUSAGE_SELF)

# a step's number, usage of the process, times of the thread, the allocator's retries and segments
Reading = tuple[int, Any, bytes, Sequence[int]]
# a step's number, begin and end, usage of the process, times of the thread, the allocator's retries and segments
Raw = tuple[int, int, int, Any, bytes, Sequence[int]]


class GarbageCollection(NamedTuple):
    """One garbage collection of ``generation`` 0, 1 or 2: all of Python's threads stand still meanwhile."""

    began_ns: int
    ended_ns: int
    generation: int
    own_share: float = 0.0  # of the objects whose number brought it about, the share that this profiler made


@dataclass(eq=False)
class GarbageLog:
    """The garbage collections between ``start`` and ``stop``, in nanoseconds of ``clock``.

    A signal handler may run inside a callback of the collector. Python drops what it raises there and tells
    ``sys.unraisablehook``, so that Ctrl-C would be lost: ``held`` keeps it, and ``StepReader`` raises it.
    """

    clock: Callable[[], int]
    collections: list[GarbageCollection] = field(default_factory=list)
    held: BaseException | None = None
    own_objects: int = 0  # that this profiler has made since the last collection, and keeps
    _own_share: float = 0.0
    _began_ns: int = 0
    _others: Any = None

    def start(self) -> None:
        self.stop()
        self.collections, self.held, self.own_objects = [], None, 0
        self._others, sys.unraisablehook = sys.unraisablehook, self._hold
        gc.callbacks.append(self._told)

    def stop(self) -> None:
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)
        if sys.unraisablehook == self._hold:
            sys.unraisablehook = self._others

    def _told(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = self.clock()
            # Python collects once so many objects were made; a program may call for it earlier.
            threshold = gc.get_threshold()[0]
            is_automatic = 0 < threshold < gc.get_count()[0]
            self._own_share = min(self.own_objects / threshold, 1.0) if is_automatic else 0.0
            self.own_objects = 0
        else:
            ended_ns = self.clock()
            self.collections.append(GarbageCollection(self._began_ns, ended_ns, info["generation"], self._own_share))

    def add_own_objects(self, count_before: int) -> None:
        """Note that the number of young objects has changed from ``count_before`` by what this profiler did."""
        made = gc.get_count()[0] - count_before
        if made > 0:  # else a collection came in between
            self.own_objects += made

    def _hold(self, dropped: Any) -> None:
        # By the code that it passed: from Python 3.14 on the hook is not given the callback.
        first = None if dropped.exc_traceback is None else dropped.exc_traceback.tb_frame
        if first is not None and first.f_code is GarbageLog._told.__code__:
            self.held = dropped.exc_value
        else:
            self._others(dropped)


@dataclass(eq=False)
class StepReader:
    """Reads the counters at the end of each step, from ``start`` to ``stop``."""

    clock: Callable[[], int]  # the clock of the marks, in nanoseconds
    # retries and segments of the device's allocator so far; empty where it does not count them
    allocator: Callable[[], Sequence[int]] = tuple
    usage: Callable[[], Any] = _of_process  # usage of the process, as getrusage(2) has it
    compilations: Sequence[TimedCompilation] | None = None  # those of the same time; None where they are not known
    _read: list[Reading] = field(default_factory=list)
    _when: dict[int, tuple[int, int]] = field(default_factory=dict)
    _file: int | None = None
    _began_s: float = 0.0
    _ahead_s: float = 0.0

    def __post_init__(self) -> None:
        self._garbage = GarbageLog(self.clock)

    def add_own_objects(self, count_before: int) -> None:
        self._garbage.add_own_objects(count_before)

    @property
    def collections(self) -> Sequence[GarbageCollection]:
        return self._garbage.collections

    def start(self) -> None:
        self._read, self._when = [], {}
        with suppress(OSError):  # not Linux, or a kernel that does not count
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        self._garbage.start()
        self._began_s, self._ahead_s = time.time(), self._ahead()
        now = self.clock()
        self.place(0, now, now)
        self.read(0)

    @property
    def raw(self) -> list[Raw]:
        """The readings of each step so far; the first, of step 0, is where the readings start."""
        return [(step, *self._when[step], *rest) for step, *rest in self._read if step in self._when]

    def place(self, step: int, began_ns: int, ended_ns: int) -> None:
        self._when[step] = began_ns, ended_ns

    def read(self, step: int) -> None:
        """Read the counters of ``step``, which has just ended; raise what a signal handler raised in a collection."""
        # getrusage brings the file up to date, which is otherwise as old as the kernel's last tick, 1 to 10 ms.
        usage = self.usage()
        thread = b"" if self._file is None else os.pread(self._file, 80, 0)
        self._read.append((step, usage, thread, self.allocator()))
        if (held := self._garbage.held) is not None:
            self._garbage.held = None
            raise held

    def take(self) -> tuple[list[Reading], Sequence[GarbageCollection], Sequence[TimedCompilation] | None]:
        """Return the readings, collections and compilations since the last call, and forget them."""
        read, self._read = self._read, []
        collections, self._garbage.collections = self._garbage.collections, []
        compiled = self._compilations()
        self._began_s, self._ahead_s = time.time(), self._ahead()
        return read, collections, compiled

    def stop(self) -> None:
        self._garbage.stop()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.compilations = self._compilations()

    def _ahead(self) -> float:
        """Return the seconds by which the clock of the steps is ahead of the time of day."""
        return self.clock() * 1e-9 - time.time()

    def _compilations(self) -> list[TimedCompilation] | None:
        """Return the compilations on the clock of the steps; torch notes them by the time of day."""
        ahead_s, known = self._ahead(), compilations(self._began_s)
        if known is None or abs(ahead_s - self._ahead_s) > _APART_S:
            return [] if known == [] else None
        return [TimedCompilation(one.began_s + ahead_s, one.ended_s + ahead_s, one.what) for one in known]


# returns the GPU's clock rate and throttle reasons between two instants, in seconds on the clock of the readings
ReadGpu = Callable[[float, float], tuple[float | None, list[str] | None]]


def step_counters(
    raw: Sequence[Raw],
    collections: Sequence[GarbageCollection] = (),
    compilations: Sequence[TimedCompilation] | None = (),
    rank: int = 0,
    gpu: ReadGpu | None = None,
    saved_ns: Sequence[int] = (),
) -> list[StepCounters]:
    """Return the counters of each step: of each reading but the first, which is where the steps begin.

    ``collections`` and ``compilations`` (None is unknown) are those of the same time, on the clock of the readings.
    ``saved_ns`` is when each checkpoint began and ended, in turn.
    """
    garbage = [_TimeSpan(one.began_ns * 1e-9, one.ended_ns * 1e-9, one.generation) for one in collections]
    own_garbage = [
        _TimeSpan(one.began_ns * 1e-9, (one.began_ns + one.own_share * (one.ended_ns - one.began_ns)) * 1e-9, None)
        for one in collections
    ]
    compiled = None if compilations is None else disjoint(compilations)
    ends = zip(saved_ns[::2], saved_ns[1::2], strict=False)
    saved = [_TimeSpan(began_ns * 1e-9, ended_ns * 1e-9, None) for began_ns, ended_ns in ends]
    figures = []
    for before, after in pairwise(raw):
        began_s, ended_s = after[1] * 1e-9, after[2] * 1e-9
        gc_s, generation = _overlap(garbage, began_s, ended_s)
        compile_s, what = (None, None) if compiled is None else _overlap(compiled, began_s, ended_s)
        clock_hz, reasons = (None, None) if gpu is None else gpu(began_s, ended_s)
        counted = StepCounters(
            step=after[0],
            rank=rank,
            wall_s=ended_s - began_s,
            between_s=began_s - before[2] * 1e-9,
            gc_s=gc_s,
            gc_generation=generation,
            gc_own_s=_overlap(own_garbage, began_s, ended_s)[0],
            compile_s=compile_s,
            compiled=what,
            checkpoint_s=_overlap(saved, began_s, ended_s)[0],
            sm_clock_hz=clock_hz,
            throttled=reasons,
        )
        figures.append(counted.model_copy(update=_since(before, after)))
    return figures


def _since(before: Raw, after: Raw) -> dict[str, float | None]:
    wall_s = max((after[2] - before[2]) * 1e-9, 1e-9)
    user_s, system_s, minor, major, waited, lost = (getattr(after[3], of) - getattr(before[3], of) for of in _USAGE)
    ran_s, no_cpu_s = _thread(before[4], after[4])
    # Faults of several threads pass at the same time: divide by the threads that ran on average.
    threads = max((user_s + system_s) / wall_s, 1.0)
    retries, segments = map(sub, after[5], before[5]) if after[5] and before[5] else (None, None)
    return {
        "cpu_wait_s": no_cpu_s,
        "asleep_s": None if ran_s is None or no_cpu_s is None else max(wall_s - ran_s - no_cpu_s, 0.0),
        "cpu_s": user_s + system_s,
        "system_s": system_s,
        "fault_s": min(minor * DEAREST_FAULT_S, system_s) / threads,
        "minor_faults": minor,
        "major_faults": major,
        "voluntary_switches": waited,
        "involuntary_switches": lost,
        "alloc_retries": retries,
        "new_segments": segments,
    }


def _thread(before: bytes, after: bytes) -> tuple[float | None, float | None]:
    if not before or not after:
        return None, None
    ran, waited = (int(now) - int(then) for then, now in zip(before.split()[:2], after.split()[:2], strict=True))
    return ran * 1e-9, waited * 1e-9


class _TimeSpan(NamedTuple):
    began_s: float
    ended_s: float
    what: Any


def _overlap(spans: Sequence[_TimeSpan], began_s: float, ended_s: float) -> tuple[float, Any]:
    """Return the seconds of ``spans``, ordered and disjoint, within two instants, and what the longest of them is."""
    inside = []
    for at in range(bisect_left(spans, began_s, key=lambda span: span.ended_s), len(spans)):
        span = spans[at]
        if span.began_s >= ended_s:
            break
        inside.append((min(span.ended_s, ended_s) - max(span.began_s, began_s), span.what))
    named = [each for each in inside if each[1] is not None]
    return sum(each[0] for each in inside), max(named, key=lambda each: each[0])[1] if named else None


def disjoint(compilations: Sequence[TimedCompilation]) -> list[_TimeSpan]:
    """Return the compilations in order and disjoint: a nested one counts only outside of the other."""
    spans, last_s = list[_TimeSpan](), 0.0
    for one in sorted(compilations, key=lambda each: each.began_s):
        spans.append(_TimeSpan(max(one.began_s, last_s), max(one.ended_s, last_s), one.what))
        last_s = max(last_s, one.ended_s)
    return spans


class ThreadTimes(NamedTuple):
    """Nanoseconds that the calling thread ran, and that it was ready but had no CPU, since it began."""

    ran_ns: int
    no_cpu_ns: int


def thread_times() -> ThreadTimes | None:
    """Return the thread's times; None where the system does not count."""
    # Asked first: it makes the kernel count up to now. The file is otherwise as old as the last tick, 1 to 10 ms;
    # getrusage counted up to now in older kernels, and does not in 6.18.
    ran_ns = time.thread_time_ns()
    try:
        _, waited, *_ = _SCHEDSTAT.read_bytes().split()
    except (OSError, ValueError):
        return None
    return ThreadTimes(ran_ns, int(waited))


def ready_batches(iterator: Iterator[Any], workers: int | None) -> int | None:
    """Return how many prefetched batches a DataLoader's ``iterator`` holds in its queue; 0 without workers.

    None for an iterator that is not torch's own, or where its queue does not know its length (macOS). Takes
    microseconds and never blocks. Left out: batches that came out of order, and those that are not pinned yet.
    """
    if type(iterator).__module__ != DataLoader.__module__:
        return None
    if workers == 0:
        return 0
    try:
        return int(READY.of(iterator).qsize())
    except NotImplementedError:
        return None

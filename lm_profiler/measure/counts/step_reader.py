"""Reads the operating system's counters of this process between steps; computes figures of each step after the run.

Each step costs two system calls: getrusage(2) of the process, and a read of ``/proc/thread-self/schedstat`` for the
thread that trains (Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lm_profiler.measure.counts.recompiles import TimedCompilation, compilations
from lm_profiler.record.counter_table import FIGURES, CounterTable
from lm_profiler.torch_names import READY

_SCHEDSTAT = Path("/proc/thread-self/schedstat")

# The most CPU time, in seconds, that a minor page fault takes: clearing a huge page of 2 MiB at 4 GB/s. A small page
# takes a thousandth of that. The number of huge pages is unknown, so the kernel's CPU time is often the tighter bound.
DEAREST_FAULT_S = 0.5e-3

# the most seconds by which the time of day may drift from the clock of the steps; if it drifts more, compilations are
# unknown, because torch notes them by the time of day
_MOST_DRIFT_S = 1e-3

# the fields of getrusage(2) that are used: CPU time in user mode and in the kernel, minor and major page faults,
# voluntary and involuntary context switches
_USAGE = ("ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw")
_read_usage = attrgetter(*_USAGE)
_process_usage = partial(getrusage, RUSAGE_SELF)


class Reading(NamedTuple):
    """The readings at the end of a step."""

    step: int
    usage: Any  # the resource usage of the process, as getrusage(2) returns it
    # the content of schedstat for the thread that trains; empty if the system does not provide it
    thread: bytes
    allocator: Sequence[int]  # the allocator's retries and segments


class TimedReading(NamedTuple):
    """A ``Reading``, and the times at which its step began and ended."""

    step: int
    began_ns: int
    ended_ns: int
    usage: Any
    thread: bytes
    allocator: Sequence[int]


class GarbageCollection(NamedTuple):
    """One garbage collection; all threads of Python wait while it runs."""

    began_ns: int
    ended_ns: int
    generation: int  # 0, 1 or 2
    # Python collects when a number of objects has been made; this is the share of them that this profiler made
    own_share: float = 0.0


@dataclass(eq=False)
class GarbageLog:
    """The garbage collections between ``start`` and ``stop``, in nanoseconds of ``clock``.

    A signal handler may run while the garbage collector calls ``_note_collection``. Python discards an exception that
    the handler raises there, and passes it to ``sys.unraisablehook``: Ctrl-C would be lost. So the hook keeps the
    exception in ``signal_error``, and ``StepReader`` raises it.
    """

    clock: Callable[[], int]
    collections: list[GarbageCollection] = field(default_factory=list)
    signal_error: BaseException | None = None
    # the number of objects that this profiler has made since the last collection and still keeps
    own_objects: int = 0
    _own_share: float = 0.0  # ``own_share`` of the running collection
    _began_ns: int = 0  # when the running collection began
    _replaced_hook: Any = None  # ``sys.unraisablehook`` before ``start``
    _is_stopped: bool = False

    def start(self) -> None:
        """Begin to note collections, and to keep the exceptions of signal handlers that Python would discard."""
        self.stop()
        self._is_stopped = False
        self.collections = []
        self.signal_error = None
        self.own_objects = 0
        self._replaced_hook = sys.unraisablehook
        sys.unraisablehook = self._keep_signal_error
        gc.callbacks.append(self._note_collection)

    def stop(self) -> None:
        """Note no further collections, and restore ``sys.unraisablehook`` unless the program has replaced it since."""
        if self._note_collection in gc.callbacks:
            gc.callbacks.remove(self._note_collection)
        self._is_stopped = True
        if sys.unraisablehook == self._keep_signal_error:
            sys.unraisablehook = _hook_in_use(self._replaced_hook)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        """Note a collection: Python calls this as the collection starts and as it stops (``phase``)."""
        if phase == "start":
            self._began_ns = self.clock()
            # Python collects when the number of new objects exceeds a threshold; a program may collect at any time.
            threshold = gc.get_threshold()[0]
            new_objects = gc.get_count()[0]
            is_automatic = 0 < threshold < new_objects
            self._own_share = 0.0
            if is_automatic:
                self._own_share = min(self.own_objects / threshold, 1.0)
            self.own_objects = 0
        else:
            ended_ns = self.clock()
            self.collections.append(
                GarbageCollection(
                    began_ns=self._began_ns,
                    ended_ns=ended_ns,
                    generation=info["generation"],
                    own_share=self._own_share,
                )
            )

    def add_own_objects(self, count_before: int) -> None:
        """Note the objects that this profiler has made since the collector's count was ``count_before``."""
        new_objects = gc.get_count()[0] - count_before
        if new_objects > 0:  # else a collection has reset the count
            self.own_objects += new_objects

    def _keep_signal_error(self, unraisable: Any) -> None:
        """Keep an exception that was raised inside ``_note_collection``; pass others to the replaced hook."""
        # A program may keep this hook and restore it after ``stop``; then it only passes exceptions on.
        if unraisable.exc_traceback is not None and not self._is_stopped:
            # From Python 3.14 on the hook does not receive the callback that raised, so its code is compared.
            outermost_code = unraisable.exc_traceback.tb_frame.f_code
            if outermost_code is GarbageLog._note_collection.__code__:
                self.signal_error = unraisable.exc_value
                return
        self._replaced_hook(unraisable)


def _hook_in_use(hook: Any) -> Any:
    """Return ``hook``; if it belongs to a stopped log, return the hook that this log had replaced."""
    log = getattr(hook, "__self__", None)
    while isinstance(log, GarbageLog) and log._is_stopped:
        hook = log._replaced_hook
        log = getattr(hook, "__self__", None)
    return hook


class TakenReadings(NamedTuple):
    """What a ``StepReader`` has read in some steps."""

    readings: list[Reading]
    collections: Sequence[GarbageCollection]
    compilations: Sequence[TimedCompilation] | None  # None if they are unknown


@dataclass(eq=False)
class StepReader:
    """Reads the counters at the end of each step, from ``start`` to ``stop``."""

    clock: Callable[[], int]  # the clock of the marks, in nanoseconds
    # retries and segments of the device's allocator so far; empty if it does not count them
    allocator: Callable[[], Sequence[int]] = tuple
    # returns the usage of the process, as getrusage(2) does
    usage: Callable[[], Any] = _process_usage
    # compilations by torch.compile between ``start`` and ``stop``; None if they are unknown
    compilations: Sequence[TimedCompilation] | None = None
    _readings: list[Reading] = field(default_factory=list)
    # the number of a step to when it began and ended (ns)
    _instants: dict[int, tuple[int, int]] = field(default_factory=dict)
    # the descriptor of the open schedstat; None if the system has none
    _file: int | None = None
    # the time of day when the clocks were last compared; compilations since then were not returned yet
    _compared_at_s: float = 0.0
    # how far the clock of the steps was ahead of the time of day at that moment, in seconds
    _clock_ahead_s: float = 0.0

    def __post_init__(self) -> None:
        self.garbage = GarbageLog(self.clock)

    @property
    def collections(self) -> Sequence[GarbageCollection]:
        return self.garbage.collections

    def start(self) -> None:
        """Begin with a reading of step 0, which is where step 1 begins."""
        self._readings = []
        self._instants = {}
        with suppress(OSError):  # not Linux, or a kernel without schedstat
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        self.garbage.start()
        self._compare_clocks()
        now_ns = self.clock()
        self.note_instants(0, now_ns, now_ns)
        self.read(0)

    @property
    def timed_readings(self) -> list[TimedReading]:
        """The readings of all steps whose times are noted, after that of step 0."""
        rows: list[TimedReading] = []
        for step, usage, thread, allocator in self._readings:
            if step in self._instants:
                began_ns, ended_ns = self._instants[step]
                rows.append(
                    TimedReading(step, began_ns, ended_ns, usage, thread, allocator)
                )
        return rows

    def note_instants(self, step: int, began_ns: int, ended_ns: int) -> None:
        """Note when ``step`` began and ended; it is known only after its counters were read."""
        self._instants[step] = began_ns, ended_ns

    def read(self, step: int) -> None:
        """Read the counters of ``step``, which has just ended; raise what a signal handler raised in a collection."""
        # getrusage first: it has the kernel update schedstat, which is otherwise as old as the last tick, 1 to 10 ms.
        usage = self.usage()
        thread = b"" if self._file is None else os.pread(self._file, 80, 0)
        self._readings.append(Reading(step, usage, thread, self.allocator()))
        signal_error = self.garbage.signal_error
        if signal_error is not None:
            self.garbage.signal_error = None
            raise signal_error

    def take(self) -> TakenReadings:
        """Return what was read since the last call, and forget it."""
        readings = self._readings
        self._readings = []
        collections = self.garbage.collections
        self.garbage.collections = []
        # The clocks are compared after this, because it returns the compilations since they were last compared.
        compiled = self._compilations()
        self._compare_clocks()
        return TakenReadings(readings, collections, compiled)

    def stop(self) -> None:
        """Stop reading, and keep the compilations since the last ``take``."""
        self.garbage.stop()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self.compilations = self._compilations()

    def _compare_clocks(self) -> None:
        """Note the time of day, and by how much the clock of the steps is ahead of it now."""
        self._compared_at_s = time.time()
        self._clock_ahead_s = self._seconds_ahead()

    def _seconds_ahead(self) -> float:
        """Return the seconds by which the clock of the steps is ahead of the time of day."""
        return self.clock() * 1e-9 - time.time()

    def _compilations(self) -> list[TimedCompilation] | None:
        """Return the compilations since the clocks were compared, with instants on the clock of the steps.

        torch notes them by the time of day. None if they are unknown.
        """
        ahead_s = self._seconds_ahead()
        by_time_of_day = compilations(self._compared_at_s)
        if by_time_of_day is None:
            return None
        if not by_time_of_day:
            return []
        drift_s = abs(ahead_s - self._clock_ahead_s)
        if drift_s > _MOST_DRIFT_S:
            return None
        return [
            TimedCompilation(
                began_s=compilation.began_s + ahead_s,
                ended_s=compilation.ended_s + ahead_s,
                what=compilation.what,
            )
            for compilation in by_time_of_day
        ]


# takes two instants, in seconds on the clock of the readings; returns the GPU's clock rate and throttle reasons between
ReadGpu = Callable[[float, float], tuple[float | None, list[str] | None]]


def step_counters(
    readings: Sequence[TimedReading],
    collections: Sequence[GarbageCollection] = (),
    compilations: Sequence[TimedCompilation] | None = (),
    rank: int = 0,
    gpu: ReadGpu | None = None,
    checkpoint_instants_ns: Sequence[int] = (),
) -> CounterTable:
    """Return the counters of each step.

    Args:
        readings: one per step, after one for the beginning of the first step.
        collections: garbage collections of the same time, on the clock of the readings.
        compilations: compilations of the same time, on the same clock; None if they are unknown.
        rank: the rank of this process.
        gpu: returns the GPU's clock rate and throttle reasons of a step; None without a GPU.
        checkpoint_instants_ns: when each checkpoint began and ended, in turn.
    """
    if len(readings) < 2:
        return CounterTable(rank)
    count = len(readings) - 1
    steps = _Steps(
        began_s=np.array([reading.began_ns for reading in readings[1:]]) * 1e-9,
        ended_s=np.array([reading.ended_ns for reading in readings[1:]]) * 1e-9,
    )
    previous_ended_s = np.array([reading.ended_ns for reading in readings[:-1]]) * 1e-9
    garbage = [
        _TimeSpan(
            began_s=collection.began_ns * 1e-9,
            ended_s=collection.ended_ns * 1e-9,
            label=collection.generation,
        )
        for collection in collections
    ]
    own_garbage = [_own_span(collection) for collection in collections]
    collecting = _overlap(garbage, steps)
    compiling = _Overlap(np.full(count, np.nan), {})
    if compilations is not None:
        compiling = _overlap(disjoint(compilations), steps)
    clocks_hz, throttled = _gpu_readings(gpu, steps)

    columns = {
        "wall_s": steps.ended_s - steps.began_s,
        "between_s": steps.began_s - previous_ended_s,
        "gc_s": collecting.seconds,
        "gc_own_s": _overlap(own_garbage, steps).seconds,
        "compile_s": compiling.seconds,
        "checkpoint_s": _overlap(
            _checkpoint_spans(checkpoint_instants_ns), steps
        ).seconds,
        "sm_clock_hz": clocks_hz,
        **_counted_by_system(readings),
    }
    numbers = [reading.step for reading in readings[1:]]
    labels: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    labels_by_name = {
        "gc_generation": collecting.labels,
        "compiled": compiling.labels,
        "throttled": throttled,
    }
    for name, labels_by_index in labels_by_name.items():
        for index, label in labels_by_index.items():
            labels[numbers[index]][name] = label
    return CounterTable(
        rank=rank,
        steps=np.array(numbers, np.int64),
        figures=np.column_stack([columns[name] for name in FIGURES]),
        labels=labels,
    )


class _Steps(NamedTuple):
    """When each of n successive steps began and ended."""

    began_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]


def _gpu_readings(
    gpu: ReadGpu | None, steps: _Steps
) -> tuple[NDArray[np.float64], dict[int, list[str]]]:
    """Return the GPU's clock rate in each step, NaN if unknown; and by the index of a step its throttle reasons."""
    clocks_hz = np.full(len(steps.began_s), np.nan)
    throttled: dict[int, list[str]] = {}
    if gpu is None:
        return clocks_hz, throttled
    spans = zip(steps.began_s.tolist(), steps.ended_s.tolist(), strict=True)
    for index, (began_s, ended_s) in enumerate(spans):
        clock_hz, reasons = gpu(began_s, ended_s)
        if clock_hz is not None:
            clocks_hz[index] = clock_hz
        if reasons is not None:
            throttled[index] = reasons
    return clocks_hz, throttled


def _own_span(collection: GarbageCollection) -> _TimeSpan:
    """Return the part of a collection that this profiler causes: its first ``own_share``."""
    own_ns = collection.own_share * (collection.ended_ns - collection.began_ns)
    return _TimeSpan(
        began_s=collection.began_ns * 1e-9,
        ended_s=(collection.began_ns + own_ns) * 1e-9,
        label=None,
    )


def _checkpoint_spans(instants_ns: Sequence[int]) -> list[_TimeSpan]:
    """Return when checkpoints were saved; ``instants_ns`` alternates between begins and ends."""
    # The last checkpoint may have no end yet.
    begins_and_ends = zip(instants_ns[::2], instants_ns[1::2], strict=False)
    return [
        _TimeSpan(began_s=began_ns * 1e-9, ended_s=ended_ns * 1e-9, label=None)
        for began_ns, ended_ns in begins_and_ends
    ]


def _counted_by_system(
    readings: Sequence[TimedReading],
) -> dict[str, NDArray[np.float64]]:
    """Return what the system counted from each reading to the next one, by the fields of ``StepCounters``."""
    ended_s = np.array([reading.ended_ns for reading in readings]) * 1e-9
    wall_s = np.maximum(np.diff(ended_s), 1e-9)
    # by the names of getrusage(2), which counts since the process began
    usage = np.array([_read_usage(reading.usage) for reading in readings], dtype=float)
    used = dict(zip(_USAGE, np.diff(usage, axis=0).T, strict=True))
    system_s = used["ru_stime"]
    cpu_s = used["ru_utime"] + system_s
    # The kernel does not report the time of page faults. An upper bound is their number times the longest that one
    # takes, and another is the time in the kernel. Several threads may have faults at the same time, so the bound is
    # divided by the mean number of threads that ran.
    threads = np.maximum(cpu_s / wall_s, 1.0)
    fault_s = np.minimum(used["ru_minflt"] * DEAREST_FAULT_S, system_s) / threads
    times_ns = [_thread_times(reading.thread) for reading in readings]
    ran_s, cpu_wait_s = np.diff(np.array(times_ns, dtype=float), axis=0).T * 1e-9
    allocated = [reading.allocator or (np.nan, np.nan) for reading in readings]
    retries, segments = np.diff(np.array(allocated, dtype=float), axis=0).T
    return {
        "cpu_wait_s": cpu_wait_s,
        "asleep_s": np.maximum(wall_s - ran_s - cpu_wait_s, 0.0),
        "cpu_s": cpu_s,
        "system_s": system_s,
        "fault_s": fault_s,
        "minor_faults": used["ru_minflt"],
        "major_faults": used["ru_majflt"],
        "voluntary_switches": used["ru_nvcsw"],
        "involuntary_switches": used["ru_nivcsw"],
        "alloc_retries": retries,
        "new_segments": segments,
    }


class _TimeSpan(NamedTuple):
    began_s: float
    ended_s: float
    label: Any  # the name of what happened in the span; None if it has no name


class _Overlap(NamedTuple):
    seconds: NDArray[
        np.float64
    ]  # for each step, how many seconds of the spans lie in it
    # by the index of a step, the label of the longest span in it
    labels: dict[int, Any]


def _overlap(spans: Sequence[_TimeSpan], steps: _Steps) -> _Overlap:
    """Return how many seconds of ``spans`` lie in each step, and the label of the longest of the spans in it.

    The spans are in order and do not overlap.
    """
    seconds = np.zeros(len(steps.began_s))
    longest_s: dict[int, float] = {}
    labels: dict[int, Any] = {}
    # by span, the first step that ends after it began, and the first one that begins after it ended
    first_steps = np.searchsorted(steps.ended_s, [span.began_s for span in spans])
    end_steps = np.searchsorted(steps.began_s, [span.ended_s for span in spans])
    for span, first, end in zip(spans, first_steps, end_steps, strict=True):
        for index in range(first, end):
            began_s = max(span.began_s, float(steps.began_s[index]))
            ended_s = min(span.ended_s, float(steps.ended_s[index]))
            seconds[index] += ended_s - began_s
            is_longest = ended_s - began_s > longest_s.get(index, -1.0)
            if span.label is not None and is_longest:
                longest_s[index] = ended_s - began_s
                labels[index] = span.label
    return _Overlap(seconds, labels)


def disjoint(compilations: Sequence[TimedCompilation]) -> list[_TimeSpan]:
    """Return the times of the compilations, in order and without overlaps.

    A compilation within another one adds only the time that is not covered yet.
    """
    spans: list[_TimeSpan] = []
    covered_s = 0.0  # the end of the spans so far
    for compilation in sorted(compilations, key=attrgetter("began_s")):
        began_s = max(compilation.began_s, covered_s)
        ended_s = max(compilation.ended_s, covered_s)
        spans.append(_TimeSpan(began_s, ended_s, compilation.what))
        covered_s = ended_s
    return spans


def seconds_compiling(since_s: float) -> float | None:
    """Return how many seconds torch.compile has compiled since the time of day ``since_s``; None if unknown."""
    compiled = compilations(since_s)
    if compiled is None:
        return None
    spans = disjoint(compiled)
    return sum(span.ended_s - span.began_s for span in spans)


class ThreadTimes(NamedTuple):
    """The times of a thread since it began."""

    ran_ns: int  # time for which the thread ran on a CPU
    no_cpu_ns: int  # ready to run, but waiting for a CPU


def _thread_times(schedstat: bytes) -> tuple[float, float]:
    """Return the times (ns) in the content of schedstat, which are those of ``ThreadTimes``; NaN if it is empty."""
    if not schedstat:
        return np.nan, np.nan
    ran, waited = schedstat.split()[:2]
    return float(ran), float(waited)


def thread_times() -> ThreadTimes | None:
    """Return the times of the calling thread; None if the system does not provide them."""
    # thread_time first: it has the kernel update the file, which is otherwise as old as the last tick, 1 to 10 ms.
    # getrusage did that in older kernels, but not in 6.18.
    ran_ns = time.thread_time_ns()
    try:
        _, waited, *_ = _SCHEDSTAT.read_bytes().split()
    except (OSError, ValueError):
        return None
    return ThreadTimes(ran_ns, int(waited))


def ready_batches(iterator: Iterator[Any], workers: int | None) -> int | None:
    """Return how many prefetched batches a DataLoader's ``iterator`` holds in its queue; 0 without workers.

    None for an iterator that is not torch's own, or if its queue has no length (macOS). Takes microseconds and never
    blocks. Batches that arrived out of order and batches that are not pinned yet do not count.
    """
    if type(iterator).__module__ != DataLoader.__module__:
        return None
    if workers == 0:
        return 0
    try:
        return int(READY.get(iterator).qsize())
    except NotImplementedError:
        return None

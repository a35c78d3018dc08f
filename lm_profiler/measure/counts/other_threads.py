"""Measures the other Python threads of the process, and how long the training thread waits for Python's global lock.

Only the thread that holds the lock runs Python code. A thread that computes in Python keeps it until another thread has
waited for ``sys.getswitchinterval()``, 5 ms. An operator of torch releases the lock, so the training thread may wait as
long after each operator. A thread that computes in C code without the lock delays nobody.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread

from lm_profiler.measure.counts.step_reader import ThreadTimes, thread_times
from lm_profiler.measure.user_code import user_line
from lm_profiler.record.run_record import OtherThreads

_OWN_NAMES = "lm_profiler"  # how the names of our own threads begin
# Of Linux's clock of a thread's CPU time, MAKE_THREAD_CPUCLOCK in include/linux/posix-timers_types.h: the lowest bits.
# ``time.pthread_getcpuclockid`` makes the same number, but may crash for a thread that has ended.
_CLOCK_OF_THREAD = 0b110
_LEAST_SHARE = 0.1  # of the time, which other threads must compute to be worth pauses
_PAUSES = 8
_PAUSE_S = 0.2e-3  # long enough for another thread to wake up and take the lock


def cpu_time_ns(thread: Thread) -> int | None:
    """Return the CPU time of ``thread`` since it began; None if it has ended, or if the system does not report it."""
    if sys.platform != "linux" or thread.native_id is None:
        return None
    try:
        return time.clock_gettime_ns(~thread.native_id << 3 | _CLOCK_OF_THREAD)
    except OSError:
        return None


@dataclass(eq=False)
class OtherThreadsReader:
    """Reads the CPU times of the process's other Python threads in some steps; called by the training thread."""

    clock: Callable[[], int] = time.perf_counter_ns
    cpu_time_ns: Callable[[Thread], int | None] = cpu_time_ns
    # returns the times of the training thread; None means unknown
    training_thread: Callable[[], ThreadTimes | None] = thread_times
    pause: Callable[[float], object] = time.sleep
    _began_ns: int = 0
    _cpu_ns_before: dict[Thread, int] = field(default_factory=dict)
    # how often each thread was seen in a line of the program: file, line, function
    _lines: dict[Thread, Counter[tuple[str, int, str]]] = field(default_factory=dict)

    def begin(self) -> None:
        """Read the CPU time of each other thread, except for our own threads."""
        self._cpu_ns_before = {}
        self._lines = {}
        for thread in threading.enumerate():
            is_training_thread = thread.ident == threading.get_ident()
            if is_training_thread or thread.name.startswith(_OWN_NAMES):
                continue
            cpu_ns = self.cpu_time_ns(thread)
            if cpu_ns is not None:
                self._cpu_ns_before[thread] = cpu_ns
                self._lines[thread] = Counter()
        self._began_ns = self.clock()

    def sample_lines(self) -> None:
        """Note the innermost line of the program in which each of the threads is now."""
        if not self._lines:
            return
        frames = sys._current_frames()
        for thread, lines in self._lines.items():
            frame = frames.get(thread.ident or 0)
            line = None
            if frame is not None:
                line = user_line(frame)
            if line is not None:
                lines[line] += 1

    def result(self, steps: int) -> OtherThreads | None:
        """Return the times per step, of ``steps`` steps since ``begin``; None if the threads hardly computed."""
        wall_ns = self.clock() - self._began_ns
        ran_ns: dict[Thread, int] = {}
        for thread, cpu_ns_before in self._cpu_ns_before.items():
            cpu_ns = self.cpu_time_ns(thread)
            if cpu_ns is not None:
                ran_ns[thread] = cpu_ns - cpu_ns_before
        total_ns = sum(ran_ns.values())
        if total_ns < _LEAST_SHARE * wall_ns or not total_ns:
            return None
        busiest = max(ran_ns, key=lambda thread: ran_ns[thread])
        file = line = function = None
        lines = self._lines[busiest]
        if lines:
            file, line, function = lines.most_common(1)[0][0]
        return OtherThreads(
            ran_s=total_ns * 1e-9 / steps,
            lock_wait_s=self._lock_wait_s(),
            busiest=busiest.name,
            file=file,
            line=line,
            function=function,
        )

    def _lock_wait_s(self) -> float:
        """Pause some times, and return by how much a mean pause was too long: then the thread waited for the lock."""
        before = self.training_thread()
        began_ns = self.clock()
        for _ in range(_PAUSES):
            self.pause(_PAUSE_S)
        paused_ns = self.clock() - began_ns
        after = self.training_thread()
        if before is not None and after is not None:
            paused_ns -= after.no_cpu_ns - before.no_cpu_ns
        return max(paused_ns * 1e-9 / _PAUSES - _PAUSE_S, 0.0)

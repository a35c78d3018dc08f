"""Reads the counters of this process between steps; ``step_counters`` computes figures from them after the run.

A step costs two system calls: getrusage(2) of the process, and a read of ``/proc/thread-self/schedstat`` for the thread
that trains (Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from resource import RUSAGE_SELF, getrusage
from typing import Any

from lm_profiler.measure.counts.garbage import GarbageCollection, GarbageLog
from lm_profiler.measure.counts.recompiles import TimedCompilation, compilations

_SCHEDSTAT = "/proc/thread-self/schedstat"

# seconds by which the time of day may drift from the clock of the steps; beyond that its instants are not used
_APART_S = 1e-3

_of_process = partial(getrusage, RUSAGE_SELF)

# a step's number, usage of the process, times of the thread, the allocator's retries and segments
Reading = tuple[int, Any, bytes, Sequence[int]]

# a step's number, begin and end, usage of the process, times of the thread, the allocator's retries and segments
Raw = tuple[int, int, int, Any, bytes, Sequence[int]]


@dataclass(eq=False)
class StepReader:
    """Reads the counters at the end of each step, from ``start`` to ``stop``.

    ``collections`` and ``compilations`` are those of the same time; the latter is None where they are not known.
    """

    clock: Callable[[], int]  # the clock of the marks, in nanoseconds
    # retries and segments of the device's allocator so far; empty where it does not count them
    allocator: Callable[[], Sequence[int]] = tuple
    usage: Callable[[], Any] = _of_process  # usage of the process, as getrusage(2) has it
    compilations: Sequence[TimedCompilation] | None = None
    _read: list[Reading] = field(default_factory=list)
    _when: dict[int, tuple[int, int]] = field(default_factory=dict)
    _file: int | None = None
    _began_s: float = 0.0
    _ahead_s: float = 0.0

    def __post_init__(self) -> None:
        self._garbage = GarbageLog(self.clock)

    @property
    def collections(self) -> Sequence[GarbageCollection]:
        """The garbage collections so far."""
        return self._garbage.collections

    def start(self) -> None:
        """Start reading; called in the thread that trains."""
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
        """The readings of each step that was placed; the first, of step 0, is where the readings start."""
        return [(step, *self._when[step], *rest) for step, *rest in self._read if step in self._when]

    def place(self, step: int, began_ns: int, ended_ns: int) -> None:
        """Set when ``step`` began and ended, which is known once its marks are read."""
        self._when[step] = began_ns, ended_ns

    def read(self, step: int) -> None:
        """Read the counters of ``step``, which has just ended.

        Raises:
            BaseException: What a signal handler raised while garbage was collected.
        """
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
        """Stop reading; calling it twice does no harm."""
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

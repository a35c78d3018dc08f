"""Divides the time that Python runs in a step among the lines of the program's own code."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.user_code import TORCH, package_of
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import PythonTime

# Most calls and returns to follow. Each costs one or two microseconds, so a step takes at most 0.4 s longer.
MOST_EVENTS = 200_000

_KEPT = 16  # most lines in the result

# What following may cost beyond the calibrated cost, as a multiple of it: calls of an unusual kind, with cold caches.
_MOST_BEYOND = 3.0

_TRIALS = 3

_INSIDE = "torch in a library"
Line = tuple[str, int, str]  # file, line and function


@dataclass(eq=False)
class FollowedTime:
    """The time of one line, and how long the thread ran in it; both include the cost of following."""

    clock_ns: int = 0
    ran_ns: int = 0
    calls: int = 0
    intervals: int = 0  # between two events, each of which holds the cost of following once


@dataclass(eq=False)
class PythonTimes:
    """Follows calls and returns of one thread, from ``start`` to ``stop``, and subtracts the cost of following.

    The time between two events goes to the program's line that runs, and to one of: ``python``, its own code;
    ``torch``, operators that it calls itself; ``library``, Python code of torch's; another package by its name; or a C
    function by its name. A C function may wait, so its time is read from the clock; all other time is what the thread
    ran, which other programs cannot lengthen.
    """

    phase: Callable[[], int]  # returns the part of the step that runs now, as an index of ``PARTS``
    clock: Callable[[], int]  # returns nanoseconds
    ran: Callable[[], int] = time.thread_time_ns  # returns the nanoseconds that this thread ran
    part: Guard = UNGUARDED  # guards what training calls here
    _cost: FollowingCost = field(default_factory=lambda: FollowingCost())
    _followed: dict[tuple[int, Line, str], FollowedTime] = field(default_factory=lambda: defaultdict(FollowedTime))
    # each call's frame whose line has the time, if any, and what it is; the first stands for what no call is around
    _stack: list[tuple[FrameType | None, str]] = field(default_factory=lambda: [(None, "")])
    _left: int = MOST_EVENTS
    _last_ns: int = 0
    _last_ran_ns: int = 0

    def start(self) -> bool:
        """Start to follow; returns False where another profiler already follows this thread."""
        if sys.getprofile() is not None:
            return False
        self._cost = following_cost(self.clock, self.ran)
        self._last_ns, self._last_ran_ns = self.clock(), self.ran()
        sys.setprofile(self._event)
        return True

    def stop(self) -> None:
        if getattr(sys.getprofile(), "__self__", None) is self:
            sys.setprofile(None)
        del self._stack[1:]

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        # Outside of the program's code, as in an optimizer of torch's, no clock is read: that is half of the cost.
        owner, what = self._stack[-1]
        if owner is not None:
            now_ns, ran_ns = self.clock(), self.ran()
        try:
            if owner is not None:
                followed = self._followed[self.phase(), _line_of(owner), what]
                followed.intervals += 1
                followed.clock_ns += now_ns - self._last_ns
                followed.ran_ns += ran_ns - self._last_ran_ns
            if event in ("call", "c_call"):
                self._enter(frame, arg if event == "c_call" else None)
            elif len(self._stack) > 1:  # functions that were entered before the start are not on the stack
                self._stack.pop()
            self._left -= 1
            if self._left <= 0:
                self.stop()
            if self._stack[-1][0] is not None:  # what passed since the reading above is the cost of following
                self._last_ran_ns, self._last_ns = self.ran(), self.clock()
        except BaseException as error:
            self.stop()
            self.part.failed(error)

    def _enter(self, frame: FrameType, function: Any) -> None:
        owner, inside = self._stack[-1]
        if function is not None:
            what = inside if owner is None else _name_of(function) or inside
            if what == "torch" and inside != "python":
                what = _INSIDE if inside == TORCH else inside
        elif what := package_of(frame.f_code.co_filename):
            pass
        else:
            what = "python"
            if owner is None or not frame.f_code.co_name.startswith("<"):  # a lambda counts as the function it is in
                owner = frame
        self._stack.append((owner, what))
        if owner is not None:
            self._followed[self.phase(), _line_of(owner), what].calls += 1

    def shares(self, untraced_s: Mapping[str, float] | None = None) -> list[PythonTime]:
        """Return the lines with most time, the longest first, without the operators that torch's own modules call.

        ``untraced_s`` is how long the thread ran in each phase of a step that is not followed. The lines of a phase
        together cannot take longer than that: what they take beyond it is the cost of following, event by event.
        """
        rows = []
        beyond = self._beyond(untraced_s or {})
        for (phase, (file, line, function), what), followed in self._followed.items():
            cost_ns, scale = beyond.get(phase, (0.0, 1.0))
            own_ns = self._cost.own_clock_ns(followed) if "." in what else self._cost.own_ran_ns(followed, what)
            seconds = scale * (own_ns - cost_ns * followed.intervals) * 1e-9
            if phase >= len(PARTS) or what == _INSIDE or seconds <= 0.0:
                continue
            place = {"phase": PARTS[phase], "file": file, "line": line, "function": function, "what": what}
            rows.append(PythonTime.model_validate({**place, "seconds": seconds, "calls": followed.calls}))
        return sorted(rows, key=lambda row: -row.seconds)[:_KEPT]

    def _beyond(self, untraced_s: Mapping[str, float]) -> dict[int, tuple[float, float]]:
        """Return for each phase what an event costs beyond the calibrated cost (ns), and by what to scale the rest."""
        total_ns: defaultdict[int, float] = defaultdict(float)
        intervals: defaultdict[int, int] = defaultdict(int)
        for (phase, _, what), followed in self._followed.items():
            total_ns[phase] += max(self._cost.own_ran_ns(followed, what), 0.0)
            intervals[phase] += followed.intervals
        beyond = {}
        for phase, ran_ns in total_ns.items():
            most_s = untraced_s.get(PARTS[phase]) if phase < len(PARTS) else None
            if most_s is None or ran_ns <= most_s * 1e9:
                continue
            cost_ns = min((ran_ns - most_s * 1e9) / intervals[phase], _MOST_BEYOND * self._cost.event_ran_ns)
            rest_ns = ran_ns - cost_ns * intervals[phase]
            beyond[phase] = cost_ns, min(most_s * 1e9 / max(rest_ns, 1.0), 1.0)
        return beyond


@dataclass(frozen=True)
class FollowingCost:
    """What following costs: from one event to the next, by each clock, and by what factor Python runs slower."""

    event_ns: float = 0.0
    event_ran_ns: float = 0.0
    slower: float = 1.0  # Python 3.11 leaves its faster instructions while a thread is followed

    def own_clock_ns(self, followed: FollowedTime) -> float:
        return followed.clock_ns - self.event_ns * followed.intervals

    def own_ran_ns(self, followed: FollowedTime, what: str) -> float:
        own_ns = followed.ran_ns - self.event_ran_ns * followed.intervals
        is_c_function = "." in what or what in ("torch", _INSIDE)
        return own_ns if is_c_function else own_ns / self.slower


def following_cost(clock: Callable[[], int], ran: Callable[[], int]) -> FollowingCost:
    """Measure what following costs on this thread.

    Reading the clocks is the least of it. The interpreter makes a frame object and a call for each event, which calls
    of small functions show; and it runs the code in between slower, which a loop without calls shows.
    """
    reading_ns = _reading_cost_ns(clock, ran)
    loop_ns, loop_intervals = _followed_ns(_loop, clock, ran)
    loop_ns -= loop_intervals * reading_ns[1]
    slower = max(loop_ns / max(_untraced_ns(_loop, ran), 1), 1.0)
    followed_ns, intervals = _followed_ns(_small_calls, clock, ran)
    event_ran_ns = (followed_ns - slower * _untraced_ns(_small_calls, ran)) / max(intervals, 1)
    event_ran_ns = max(event_ran_ns, reading_ns[1])
    return FollowingCost(reading_ns[0] + event_ran_ns - reading_ns[1], event_ran_ns, slower)


def _untraced_ns(work: Callable[[], object], ran: Callable[[], int]) -> int:
    """Return the least time that the thread runs in ``work``."""
    times_ns = []
    for _ in range(_TRIALS):
        began_ns = ran()
        work()
        times_ns.append(ran() - began_ns)
    return min(times_ns)


def _followed_ns(work: Callable[[], object], clock: Callable[[], int], ran: Callable[[], int]) -> tuple[float, int]:
    """Return the same while it is followed, of what lies between events, and between how many."""
    times_ns = []
    for _ in range(_TRIALS):
        trial = PythonTimes(lambda: 0, clock, ran)
        trial._stack = [(sys._getframe(), "python")]
        trial._last_ns, trial._last_ran_ns = clock(), ran()
        sys.setprofile(trial._event)
        work()
        sys.setprofile(None)
        ran_ns = sum(followed.ran_ns for followed in trial._followed.values())
        times_ns.append((ran_ns, sum(followed.intervals for followed in trial._followed.values())))
    return min(times_ns)


def _reading_cost_ns(clock: Callable[[], int], ran: Callable[[], int]) -> tuple[float, float]:
    """Return the same of reading the clocks alone: the median over calls that take some 20 ns themselves."""
    read_ns: list[tuple[int, int, int, int]] = []
    sys.setprofile(lambda *_: read_ns.append((clock(), ran(), ran(), clock())))
    for _ in range(200):
        len("")
    sys.setprofile(None)
    now_ns, now_ran_ns, last_ran_ns, last_ns = np.array(read_ns).T
    return float(np.median(now_ns[1:] - last_ns[:-1])), float(np.median(now_ran_ns[1:] - last_ran_ns[:-1]))


def _loop() -> None:
    """Run instructions of several kinds, without calls."""
    values: dict[int, int] = {}
    total = 0
    for number in range(2000):
        values[number % 10] = number
        if number in values:
            total += values[number % 10] % 3


def _small_calls() -> None:
    for number in range(300):
        isinstance(number, int)
        _returned(number)


def _returned(value: int, *, is_kept: bool = True) -> int:
    return value if is_kept else 0


def _line_of(frame: FrameType) -> Line:
    code = frame.f_code
    name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
    return code.co_filename, frame.f_lineno or code.co_firstlineno, name


def _name_of(function: Any) -> str:
    """Return ``torch`` for operators and tensor methods, a name like ``time.sleep``, or nothing for builtins."""
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or getattr(type(owner), "__module__", "") or ""
    if "torch" in (module.partition(".")[0], type(owner).__module__.partition(".")[0]):
        return "torch"
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", "?"))
    return "" if module in ("builtins", "") else f"{module}.{name}"

"""Divides the time that Python runs in a step among the lines of the program's own code."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.tape import OTHER
from lm_profiler.measure.user_code import TORCH, package_of
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import PRINTING, OuterCall, PythonTime

# Most calls and returns to follow. Each costs one or two microseconds, so a step takes at most 0.4 s longer.
MOST_EVENTS = 200_000

_MOST_LINES = 16  # in the result

# What following may cost beyond the calibrated cost, as a multiple of it: calls of an unusual kind, with cold caches.
_MOST_EXTRA_COST = 3.0

_TRIALS = 3  # measurements, of which the least counts

# activities of a line; another one is the name of a package, or of a C function
_PYTHON = "python"  # its own code
_OPERATORS = "torch"  # operators that it calls itself
_BUILTIN = "builtin"  # a function of C in ``builtins``, such as ``sorted``: it counts as Python, but runs no slower
_INNER_OPERATORS = "torch in a library"  # operators that Python code of torch's calls
# makes the text of a tensor, with operators: no model needs it
_PRINTING_FILE = "/torch/_tensor_str.py"

Line = tuple[str, int, str]  # file, line and function


@dataclass(eq=False)
class FollowedTime:
    """The time of one line, and how long the thread ran in it; both include the cost of following."""

    clock_ns: int = 0
    ran_ns: int = 0
    calls: int = 0
    # between two events, each of which holds the cost of following once
    intervals: int = 0


class _FollowedCall(NamedTuple):
    """A call that is followed: the frame whose line has its time, if any, and the activity of that line."""

    owner: FrameType | None
    activity: str


class _RunningCall(NamedTuple):
    """A call of the program's code from outside of it: by the loop, or by a library."""

    phase: int
    function: Line
    depth: int  # of the stack while it runs
    begin_ns: int


_OUTERMOST = _FollowedCall(owner=None, activity="")  # what no call is around


@dataclass(eq=False)
class PythonTimes:
    """Follows calls and returns of one thread, from ``start`` to ``stop``, and subtracts the cost of following.

    The time between two events goes to the program's line that runs, and to one of its activities: ``python``, its own
    code; ``torch``, operators that it calls itself; ``library``, Python code of torch's; ``printing of tensors``, all
    that makes their text; another package by its name; or a C function by its name. A C function may wait, so its time
    is read from the clock; all other time is what the thread ran, which other programs cannot lengthen.
    """

    # returns the part of the step that runs now, as an index of ``PARTS``
    phase: Callable[[], int]
    clock: Callable[[], int]  # returns nanoseconds
    # returns the nanoseconds that this thread ran
    thread_clock: Callable[[], int] = time.thread_time_ns
    guard: Guard = UNGUARDED  # guards what training calls here
    _cost: FollowingCost = field(default_factory=lambda: FollowingCost())
    # by phase, line and activity
    _followed: dict[tuple[int, Line, str], FollowedTime] = field(
        default_factory=lambda: defaultdict(FollowedTime)
    )
    # by phase and function: the nanoseconds of its calls from outside of the program's code, with all that they call
    _outer_ns: defaultdict[tuple[int, Line], int] = field(
        default_factory=lambda: defaultdict(int)
    )
    _outer_call: _RunningCall | None = None  # that runs
    _stack: list[_FollowedCall] = field(default_factory=lambda: [_OUTERMOST])
    _events_left: int = MOST_EVENTS
    # the phase in which following ended because of ``MOST_EVENTS``; None if it did not
    _cut_phase: int | None = None
    _last_ns: int = 0
    _last_ran_ns: int = 0

    def start(self) -> bool:
        """Start to follow; returns False if another profiler already follows this thread."""
        if sys.getprofile() is not None:
            return False
        self._cost = following_cost(self.clock, self.thread_clock)
        self._last_ns = self.clock()
        self._last_ran_ns = self.thread_clock()
        sys.setprofile(self._event)
        return True

    def stop(self) -> None:
        is_following = getattr(sys.getprofile(), "__self__", None) is self
        if is_following:
            sys.setprofile(None)
        del self._stack[1:]

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Handle a call or return that Python reports: the time since the last event goes to the line that ran."""
        # the line and the activity that ran until this event
        owner, activity = self._stack[-1]
        # Outside of the program's code, as in an optimizer of torch's, no clock is read: that is half of the cost.
        if owner is not None:
            now_ns = self.clock()
            ran_ns = self.thread_clock()
        try:
            if owner is not None:
                followed = self._followed[self.phase(), _line_of(owner), activity]
                followed.intervals += 1
                followed.clock_ns += now_ns - self._last_ns
                followed.ran_ns += ran_ns - self._last_ran_ns
            if event == "call":
                self._enter(self._call_of_python(frame))
            elif event == "c_call":
                self._enter(self._call_of_c(argument))
            elif len(self._stack) > 1:
                # functions that were entered before the start are not on the stack
                self._stack.pop()
                self._end_outer_call()
            self._events_left -= 1
            if self._events_left <= 0:
                self._cut_phase = self.phase()
                self.stop()
            if self._stack[-1].owner is not None:
                # what passed since the reading above is the cost of following
                self._last_ran_ns = self.thread_clock()
                self._last_ns = self.clock()
        except BaseException as error:
            self.stop()
            self.guard.handle(error)

    def _end_outer_call(self) -> None:
        """Add the time of the outer call that has just returned, if one has."""
        outer = self._outer_call
        if outer is not None and len(self._stack) < outer.depth:
            self._outer_ns[outer.phase, outer.function] += self.clock() - outer.begin_ns
            self._outer_call = None

    def _enter(self, call: _FollowedCall) -> None:
        self._stack.append(call)
        if call.owner is not None and self._outer_call is None:
            file, _, name = _line_of(call.owner)
            function = (file, call.owner.f_code.co_firstlineno, name)
            self._outer_call = _RunningCall(
                self.phase(), function, len(self._stack), self.clock()
            )
        if call.owner is not None:
            self._followed[self.phase(), _line_of(call.owner), call.activity].calls += 1

    def _call_of_python(self, frame: FrameType) -> _FollowedCall:
        """Return to which line and activity the time of a Python function goes, which ``frame`` begins to run."""
        caller = self._stack[-1]
        file = frame.f_code.co_filename
        package = package_of(file)
        if file.endswith(_PRINTING_FILE) or (package and caller.activity == PRINTING):
            return _FollowedCall(caller.owner, PRINTING)
        if package:
            return _FollowedCall(caller.owner, package)
        # a lambda counts as the function it is in
        is_inner_function = frame.f_code.co_name.startswith("<")
        if caller.owner is not None and is_inner_function:
            return _FollowedCall(caller.owner, _PYTHON)
        return _FollowedCall(frame, _PYTHON)

    def _call_of_c(self, function: Any) -> _FollowedCall:
        """Return to which line and activity the time of a C ``function`` goes."""
        caller = self._stack[-1]
        if caller.owner is None:
            return caller
        is_called_by_program = caller.activity in (_PYTHON, _BUILTIN)
        name = _name_of(function)
        if not name:
            return (
                _FollowedCall(caller.owner, _BUILTIN)
                if is_called_by_program
                else caller
            )
        if name != _OPERATORS or is_called_by_program:
            return _FollowedCall(caller.owner, name)
        if caller.activity == TORCH:
            return _FollowedCall(caller.owner, _INNER_OPERATORS)
        return caller

    def shares(self, untraced_s: Mapping[str, float] | None = None) -> list[PythonTime]:
        """Return the lines with most time, the longest first, without the operators that torch's own modules call.

        ``untraced_s`` is how long the thread ran in each phase of a step that is not followed. The lines of a phase
        together cannot take longer than that: what they take beyond it is the cost of following, event by event. In
        the phase in which following ended with the most events, what came after is taken to be like what came before.
        """
        seconds: defaultdict[tuple[int, Line, str], float] = defaultdict(float)
        calls: defaultdict[tuple[int, Line, str], int] = defaultdict(int)
        corrections = self._corrections(untraced_s or {})
        for (phase, line, activity), followed in self._followed.items():
            if phase >= len(PARTS) or activity == _INNER_OPERATORS:
                continue
            correction = corrections.get(phase, _NO_CORRECTION)
            own_ns = (
                self._cost.own_ns(followed, activity)
                - correction.event_ns * followed.intervals
            )
            place = (phase, line, _PYTHON if activity == _BUILTIN else activity)
            seconds[place] += correction.scale * own_ns * 1e-9
            if activity != _BUILTIN:
                calls[place] += followed.calls
        rows = []
        for place, own_s in seconds.items():
            if own_s > 0.0:
                rows.append(_row(*place, own_s, calls[place]))
        rows.sort(key=attrgetter("seconds"), reverse=True)
        return rows[:_MOST_LINES]

    def outer_calls(self) -> list[OuterCall]:
        """Return the functions that are called outside of all phases, with all that they call, the longest first.

        Their seconds include the cost of following: they only compare with each other.
        """
        calls = []
        for (phase, (file, number, function)), ns in self._outer_ns.items():
            if phase == OTHER:
                calls.append(
                    OuterCall(
                        outer_function=function,
                        file=file,
                        line=number,
                        seconds=ns * 1e-9,
                    )
                )
        calls.sort(key=attrgetter("seconds"), reverse=True)
        return calls[:_MOST_LINES]

    def _corrections(self, untraced_s: Mapping[str, float]) -> dict[int, _Correction]:
        """Return the corrections of the phases whose lines take longer together than the phase does when no call is
        followed.

        And of the phase in which following was cut off, whose lines take too little together.
        """
        ran_ns: defaultdict[int, float] = defaultdict(float)
        intervals: defaultdict[int, int] = defaultdict(int)
        for (phase, _, activity), followed in self._followed.items():
            ran_ns[phase] += max(self._cost.own_ran_ns(followed, activity), 0.0)
            intervals[phase] += followed.intervals

        corrections = {}
        for phase, phase_ran_ns in ran_ns.items():
            if phase >= len(PARTS) or PARTS[phase] not in untraced_s:
                continue
            most_ns = untraced_s[PARTS[phase]] * 1e9
            if phase_ran_ns <= most_ns:
                if phase == self._cut_phase and phase_ran_ns > 0.0:
                    rest_factor = most_ns / phase_ran_ns
                    corrections[phase] = _Correction(event_ns=0.0, scale=rest_factor)
                continue
            excess_ns = (phase_ran_ns - most_ns) / intervals[phase]
            event_ns = min(excess_ns, _MOST_EXTRA_COST * self._cost.event_ran_ns)
            rest_ns = phase_ran_ns - event_ns * intervals[phase]
            scale = min(most_ns / max(rest_ns, 1.0), 1.0)
            corrections[phase] = _Correction(event_ns, scale)
        return corrections


class _Correction(NamedTuple):
    """What an event costs beyond the calibrated cost, and by what the rest of the time is scaled."""

    event_ns: float
    scale: float


_NO_CORRECTION = _Correction(event_ns=0.0, scale=1.0)


def _row(
    phase: int, line: Line, activity: str, seconds: float, calls: int
) -> PythonTime:
    """Return a row of the record; ``phase`` is an index of ``PARTS``."""
    file, number, function = line
    return PythonTime(
        phase=PARTS[phase],
        file=file,
        line=number,
        function=function,
        what=activity,
        seconds=seconds,
        calls=calls,
    )


@dataclass(frozen=True)
class FollowingCost:
    """The cost of tracing Python: per event, on each clock, and the factor by which Python runs slower."""

    event_ns: float = 0.0
    event_ran_ns: float = 0.0
    # Python 3.11 leaves its faster instructions while a thread is followed
    slower: float = 1.0

    def own_ns(self, followed: FollowedTime, activity: str) -> float:
        """Return the time of a line without the cost of following."""
        may_wait = "." in activity  # a C function, by its name
        if may_wait:
            return followed.clock_ns - self.event_ns * followed.intervals
        return self.own_ran_ns(followed, activity)

    def own_ran_ns(self, followed: FollowedTime, activity: str) -> float:
        """Return how long the thread ran in a line, without the cost of following."""
        own_ns = followed.ran_ns - self.event_ran_ns * followed.intervals
        is_c_function = "." in activity or activity in (
            _OPERATORS,
            _INNER_OPERATORS,
            _BUILTIN,
        )
        if is_c_function:
            return own_ns
        return own_ns / self.slower


def following_cost(
    clock: Callable[[], int], thread_clock: Callable[[], int]
) -> FollowingCost:
    """Measure what following costs on this thread.

    Reading the clocks is the smallest part of this cost. The interpreter makes a frame object and a call for each
    event, which calls of small functions show; and it runs the code in between slower, which a loop without calls
    shows.
    """
    reading = _reading_cost(clock, thread_clock)

    loop = _followed_trial(_run_sample_instructions, clock, thread_clock)
    loop_ns = loop.ran_ns - loop.intervals * reading.ran_ns
    untraced_loop_ns = max(_untraced_ns(_run_sample_instructions, thread_clock), 1)
    slower = max(loop_ns / untraced_loop_ns, 1.0)

    calls = _followed_trial(_small_calls, clock, thread_clock)
    calls_cost_ns = calls.ran_ns - slower * _untraced_ns(_small_calls, thread_clock)
    event_ran_ns = max(calls_cost_ns / max(calls.intervals, 1), reading.ran_ns)
    beside_reading_ns = event_ran_ns - reading.ran_ns
    return FollowingCost(reading.clock_ns + beside_reading_ns, event_ran_ns, slower)


def _untraced_ns(work: Callable[[], object], thread_clock: Callable[[], int]) -> int:
    """Return the least time that the thread runs in ``work``."""
    times_ns = []
    for _ in range(_TRIALS):
        begin_ns = thread_clock()
        work()
        times_ns.append(thread_clock() - begin_ns)
    return min(times_ns)


class _FollowedTrial(NamedTuple):
    """How long the thread ran between the events of a trial, and the number of intervals between them."""

    ran_ns: int
    intervals: int


def _followed_trial(
    work: Callable[[], object],
    clock: Callable[[], int],
    thread_clock: Callable[[], int],
) -> _FollowedTrial:
    """Return the trial with the least time that the thread runs in ``work`` while it is followed."""
    trials = []
    for _ in range(_TRIALS):
        times = PythonTimes(lambda: 0, clock, thread_clock)
        times._stack = [_FollowedCall(sys._getframe(), _PYTHON)]
        times._last_ns = clock()
        times._last_ran_ns = thread_clock()
        sys.setprofile(times._event)
        work()
        sys.setprofile(None)
        followed = times._followed.values()
        ran_ns = sum(line.ran_ns for line in followed)
        intervals = sum(line.intervals for line in followed)
        trials.append(_FollowedTrial(ran_ns, intervals))
    return min(trials)


class _ReadingCost(NamedTuple):
    """What reading the clocks alone takes, by each clock."""

    clock_ns: float
    ran_ns: float


def _reading_cost(
    clock: Callable[[], int], thread_clock: Callable[[], int]
) -> _ReadingCost:
    """Return the median cost over calls that take some 20 ns themselves."""
    readings: list[tuple[int, int, int, int]] = []
    sys.setprofile(
        lambda *_: readings.append((clock(), thread_clock(), thread_clock(), clock()))
    )
    for _ in range(200):
        len("")
    sys.setprofile(None)
    begin_ns, begin_ran_ns, end_ran_ns, end_ns = np.array(readings).T
    between_ns = begin_ns[1:] - end_ns[:-1]
    between_ran_ns = begin_ran_ns[1:] - end_ran_ns[:-1]
    return _ReadingCost(float(np.median(between_ns)), float(np.median(between_ran_ns)))


def _run_sample_instructions() -> None:
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


def _returned(value: int, *, unchanged: bool = True) -> int:
    return value if unchanged else 0


def _line_of(frame: FrameType) -> Line:
    code = frame.f_code
    function = code.co_name
    if sys.version_info >= (3, 11):
        function = code.co_qualname
    return code.co_filename, frame.f_lineno or code.co_firstlineno, function


def _name_of(function: Any) -> str:
    """Return ``torch`` for operators and tensor methods, a name like ``time.sleep``, or nothing for builtins."""
    owner = getattr(function, "__self__", None)
    owner_module = type(owner).__module__
    module = getattr(function, "__module__", None) or owner_module or ""
    packages = (module.partition(".")[0], owner_module.partition(".")[0])
    if "torch" in packages:
        return _OPERATORS
    if module in ("builtins", ""):
        return ""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", "?")
    return f"{module}.{name}"

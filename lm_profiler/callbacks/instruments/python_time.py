"""Attributes the time that Python runs in a step to the lines of the program's own code."""

from __future__ import annotations

import os
import resource
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from lm_profiler.analysis.remedies.slow_calls import SlowCall
from lm_profiler.callbacks.instruments.data_calls import DataCalls
from lm_profiler.callbacks.instruments.function_calls import (
    Elapsed,
    FunctionCalls,
    Line,
    function_of,
)
from lm_profiler.callbacks.instruments.slow_lines import SlowLines
from lm_profiler.measure.boundary import UNGUARDED, Guard, comes_from_outside
from lm_profiler.measure.checksums import weights_checksum
from lm_profiler.measure.clocks.tape import DATA, OTHER
from lm_profiler.measure.user_code import (
    LIGHTNING,
    OURS,
    TORCH,
    installed_package,
    package_of,
    qualified_name,
)
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    EXCHANGE,
    NEEDED_FORWARDS,
    PRINTING,
    ForwardKind,
    LargeResult,
    OuterCall,
    PythonTime,
    RepeatedResult,
)

# The most calls and returns that are followed in a step. Each costs one or two microseconds, so the step takes at most
# 0.4 s longer.
MOST_EVENTS = 200_000

_MOST_LINES = 16  # the most lines in the result
_requires_grad = attrgetter("requires_grad")

# The most that following an event may cost beyond the calibrated cost, as a multiple of it. Unusual calls and cold
# caches cost more.
_MOST_EXTRA_COST = 3.0

# A C function that is off the CPU for a shorter time is not checked for what it waited for.
_SHORT_NS = 50_000

_TRIALS = 3  # measurements of a cost, of which the smallest counts

# What a line is doing. Other activities are the name of a package, or of a C function.
_PYTHON = "python"  # runs its own code
_OPERATORS = "torch"  # runs operators that it calls itself
_BUILTIN = "builtin"  # runs a C function of ``builtins``, such as ``sorted``; counts as Python, but is not slowed down
_INNER_OPERATORS = "torch in a library"  # runs operators that torch's Python code calls
# activities of torch's Python code, such as that of a module
_LIBRARY_OF_TORCH = (TORCH, _INNER_OPERATORS)
# activities that are shown as others
_SHOWN_AS = {_BUILTIN: _PYTHON, _INNER_OPERATORS: _OPERATORS}
# the code that makes the text of a tensor, by calling operators that no model needs
_PRINTING_FILE = "/torch/_tensor_str.py"

# packages that exchange data with other processes or threads, and wait for them
_EXCHANGING_PACKAGES = (
    "concurrent", "multiprocess", "multiprocessing", "queue", "ray", "selectors", "socket", "subprocess", "zmq",
)  # fmt: skip
# the same for C functions, by the beginning of their names
_EXCHANGING_FUNCTIONS = (
    "_multiprocessing.",
    "_socket.",
    "posix.wait",
    "select.",
    "socket.",
)
# the descriptors of the program's input and output, which are no exchange even if they are pipes
_PIPES_OF_PROGRAM = range(3)

# Linux alone has the usage of a thread.
_RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)


@dataclass(eq=False)
class FollowedTime:
    """The time of one activity of a line, including the cost of following its calls."""

    clock_ns: int = 0  # time on the clock
    ran_ns: int = 0  # time for which the thread ran
    calls: int = 0
    # the number of intervals between events that the time consists of; each includes the cost of one event
    intervals: int = 0


class _FollowedCall(NamedTuple):
    """A call on the stack of calls that are followed."""

    # the frame whose line gets the time of the call; None outside of the program's code
    owner: FrameType | None
    activity: str  # the current activity of that line


class _OuterCall(NamedTuple):
    """A call of the program's code from outside of it: by the loop, or by a library."""

    phase: int
    function: Line
    depth: int  # the depth of the stack while it runs


class _Place(NamedTuple):
    """Where the time between two events went."""

    phase: int
    line: Line
    activity: str
    outer_function: Line | None  # of the outer call that ran, if one did
    # the line of the program's own loop that ran or called what ran, outside of all phases; None if it is unknown
    loop_line: Line | None = None


class _CallOfLoop(NamedTuple):
    """Which function of the program ran outside of all phases, and the line of the loop that called it."""

    function: Line | None
    loop_line: Line | None


class _ForwardCall(NamedTuple):
    """The first call of the forward pass of a module outside of all phases, by a line of the loop."""

    module_ref: Callable[[], nn.Module | None]
    # whether the program's code calls it, and not the module's ``__call__``
    is_direct: bool
    has_gradients: bool  # whether autograd records it if a weight requires a gradient
    passes_gradients: bool  # whether an argument gets a gradient from it
    weights_get_gradients: bool
    # of the weights; None if they cannot be read
    checksum: tuple[int, ...] | None


class _OuterForwards:
    """The forward passes that are called outside of all phases; for each line of the loop only the first is noted.

    The arguments are those of ``PythonTimes``.
    """

    def __init__(
        self,
        is_trained: Callable[[nn.Module], bool] | None,
        may_follow: Callable[[nn.Module], bool] | None,
    ) -> None:
        self._is_trained = is_trained
        self._may_follow = may_follow
        # by file and function, and the line of the program's loop that calls it
        self._calls: dict[tuple[str, str], dict[Line | None, _ForwardCall]] = (
            defaultdict(dict)
        )
        # by the line of the program's loop that calls it, directly or through other functions
        self._calls_of_loop: dict[Line, _ForwardCall] = {}

    def note(self, frame: FrameType, loop_line: Line | None) -> None:
        """Note how ``loop_line`` calls the forward pass that ``frame`` runs, if it is that of a module."""
        file, _, function = _line_of(frame)
        calls = self._calls[file, function]
        if loop_line in calls:
            return
        call = _forward_call(frame)
        if call is not None:
            calls[loop_line] = call

    def note_of_loop(self, frame: FrameType, loop_line: Line) -> None:
        """Note the forward pass that ``frame`` runs, if it is the first one that ``loop_line`` calls."""
        if loop_line in self._calls_of_loop:
            return
        call = _forward_call(frame)
        if call is not None:
            self._calls_of_loop[loop_line] = call

    def kinds_by_function(
        self,
    ) -> dict[tuple[str, str], dict[Line | None, ForwardKind]]:
        """Return what is special about the noted forward passes, by file and function, and by the line of the loop.

        It reads all weights.
        """
        kinds_by_function: dict[tuple[str, str], dict[Line | None, ForwardKind]] = {}
        for function, calls in self._calls.items():
            kinds: dict[Line | None, ForwardKind] = {}
            for loop_line, call in calls.items():
                kind = self._kind_of_call(call)
                if kind is not None and kind != "acting":
                    kinds[loop_line] = kind
            kinds_by_function[function] = kinds
        return kinds_by_function

    def kinds_by_loop_line(self) -> dict[Line, ForwardKind]:
        """Return what is special about the noted forward passes, by the line of the loop. It reads all weights."""
        kinds: dict[Line, ForwardKind] = {}
        for loop_line, call in self._calls_of_loop.items():
            kind = self._kind_of_call(call)
            if kind is not None and kind != "unmarked":
                kinds[loop_line] = kind
        return kinds

    def kinds_by_call(self) -> Callable[[_CallOfLoop], ForwardKind | None]:
        """Return a function that returns what is special about the forward pass of a call; None if nothing is.

        It reads all weights.
        """
        kinds_by_function = self.kinds_by_function()
        kinds_by_loop_line = self.kinds_by_loop_line()

        def kind_of(call: _CallOfLoop) -> ForwardKind | None:
            kind: ForwardKind | None = None
            if call.function is not None:
                file, _, name = call.function
                kind = kinds_by_function.get((file, name), {}).get(call.loop_line)
            if kind is None and call.loop_line is not None:
                kind = kinds_by_loop_line.get(call.loop_line)
            return kind

        return kind_of

    def _kind_of_call(self, call: _ForwardCall) -> ForwardKind | None:
        """Return the kind of a forward pass; None if it is unknown, or if nothing is special about it."""
        module = call.module_ref()
        if module is None or self._is_trained is None:
            return None
        if self._is_trained(module):
            if not call.has_gradients:
                return "acting"
            return "unmarked" if call.is_direct else None
        if call.checksum is None:
            return None
        # A mean of models, or the target network of reinforcement learning, need not change in this step.
        may_follow = self._may_follow is not None and self._may_follow(module)
        if may_follow or call.checksum != weights_checksum(module):
            return None if call.passes_gradients else "following"
        if call.passes_gradients:
            return "passing_unfrozen" if call.weights_get_gradients else "passing"
        return "unfrozen" if call.weights_get_gradients else "untrained"


_OUTERMOST = _FollowedCall(owner=None, activity="")  # the bottom of the stack


def voluntary_switches() -> int | None:
    """Return how often the calling thread has given up the CPU to wait for something; None if that is unknown."""
    if _RUSAGE_THREAD is None:
        return None
    return resource.getrusage(_RUSAGE_THREAD).ru_nvcsw


def _counts_of_waits_are_known() -> bool:
    """Return whether ``voluntary_switches`` counts a wait; some sandboxes report 0."""
    switches = voluntary_switches()
    time.sleep(1e-4)
    return switches is not None and voluntary_switches() != switches


@dataclass(eq=False)
class PythonTimes:
    """Follows the calls and returns of one thread, from ``start`` to ``stop``, and subtracts the cost of following.

    An event is a call or a return, as ``sys.setprofile`` reports it. The time between two events goes to the program's
    line that runs, and to one of its activities: ``python``, its own code; ``torch``, operators that it calls itself;
    ``library``, Python code of torch; ``printing of tensors``, whatever makes their text; another package by its name;
    or a C function by its name. A C function may wait, so its time is read from the clock, unless it only waited for a
    CPU. All other time is the CPU time of the thread, which other programs cannot lengthen.
    """

    # returns the part of the step that runs now, as an index of ``PARTS``
    phase: Callable[[], int]
    clock: Callable[[], int]  # returns nanoseconds
    # returns the nanoseconds that this thread ran
    thread_clock: Callable[[], int] = time.thread_time_ns
    # returns how often this thread has given up the CPU to wait for something; None means unknown
    switches: Callable[[], int | None] = voluntary_switches
    guard: Guard = UNGUARDED  # guards what training calls here
    # return whether an optimizer trains a module, and whether its weights may follow those of a trained one; None if
    # that is not known
    is_trained: Callable[[nn.Module], bool] | None = None
    may_follow: Callable[[nn.Module], bool] | None = None
    # whether arguments and results of functions are read, to find results that are computed again
    compares_results: bool = True
    _cost: FollowingCost = field(default_factory=lambda: FollowingCost())
    _followed: dict[_Place, FollowedTime] = field(
        default_factory=lambda: defaultdict(FollowedTime)
    )
    # the outer call that runs now
    _outer_call: _OuterCall | None = None
    _stack: list[_FollowedCall] = field(default_factory=lambda: [_OUTERMOST])
    _slow_lines: SlowLines = field(default_factory=SlowLines)
    _slow_calls: dict[Line, SlowCall] = field(default_factory=dict)
    _data_calls: DataCalls = field(default_factory=DataCalls)
    # the time of all lines so far
    _elapsed: Elapsed = field(default_factory=Elapsed)
    # the frame of the function with the program's own loop; None if it made no call outside of all phases
    _loop_frame: FrameType | None = None
    # the line of that function that makes the call which runs; None if the function is in an installed package
    _loop_line: Line | None = None
    _events_left: int = MOST_EVENTS
    # the phase in which ``MOST_EVENTS`` ended the following; None if that limit was not reached
    _cut_phase: int | None = None
    # the clock, and the time that the thread had run, after the last event
    _last_ns: int = 0
    _last_ran_ns: int = 0
    # what ``switches`` returned before the C function that runs now; None means unknown
    _last_switches: int | None = None
    _knows_waits: bool = False  # whether ``switches`` counts waits

    def __post_init__(self) -> None:
        self._outer_forwards = _OuterForwards(self.is_trained, self.may_follow)
        self._function_calls: FunctionCalls | None = None
        if self.compares_results:
            self._function_calls = FunctionCalls(self.clock)

    def start(self) -> bool:
        """Start to follow; returns False if another profiler already follows this thread."""
        if sys.getprofile() is not None:
            return False
        self._cost = following_cost(self.clock, self.thread_clock)
        self._knows_waits = _counts_of_waits_are_known()
        self._last_ns = self.clock()
        self._last_ran_ns = self.thread_clock()
        sys.setprofile(self._handle_event)
        return True

    def stop(self) -> None:
        """Stop following, unless another profiler has replaced this one; what was measured is kept."""
        is_following = getattr(sys.getprofile(), "__self__", None) is self
        if is_following:
            sys.setprofile(None)
        if self._function_calls is not None:
            self._function_calls.stop()
        del self._stack[1:]
        self._loop_frame = None
        self._loop_line = None

    def _handle_event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Handle a call or return that Python reports: add the time since the last event to the line that ran.

        ``frame``, ``event`` and ``argument`` are as ``sys.setprofile`` passes them. Two times are kept: that on the
        clock, and the CPU time of this thread (``ran_ns``).
        """
        # the line and the activity that ran until this event
        owner, activity = self._stack[-1]
        # Outside of the program's code, as in torch's optimizers, no clock is read, which saves half of the cost.
        if owner is not None:
            now_ns = self.clock()
            ran_ns = self.thread_clock()
        try:
            if owner is not None and self._is_followed(owner):
                self._add_interval(
                    owner, activity, now_ns - self._last_ns, ran_ns - self._last_ran_ns
                )
            if event == "call":
                self._enter(self._call_of_python(frame))
            elif event == "c_call":
                self._enter(self._call_of_c(argument, frame))
            elif len(self._stack) > 1:
                # a return; functions that were called before ``start`` are not on the stack
                self._end_call(argument if event == "return" else None)
            self._events_left -= 1
            if self._events_left <= 0:
                self._cut_phase = self.phase()
                self.stop()
            owner, activity = self._stack[-1]
            if owner is not None:
                if self._knows_waits and _may_wait(activity):
                    self._last_switches = self.switches()
                # The time since the readings above is part of the cost of following, and goes to no line.
                self._last_ran_ns = self.thread_clock()
                self._last_ns = self.clock()
        except BaseException as error:
            self.stop()
            self.guard.handle(error)

    def _end_call(self, result: Any) -> None:
        """Take the call that ends from the stack; ``result`` is None for a C function."""
        depth = len(self._stack)
        if self._function_calls is not None:
            self._function_calls.end(self.phase(), depth, result, self._elapsed)
        self._data_calls.end(depth, result)
        self._stack.pop()
        self._end_outer_call()

    def _add_interval(
        self, owner: FrameType, activity: str, interval_ns: int, ran_ns: int
    ) -> None:
        """Add the time since the last event, in which ``owner`` ran its current line with ``activity``.

        The clock has advanced by ``interval_ns``, and the thread has run for ``ran_ns`` of them.
        """
        off_cpu_ns = interval_ns - ran_ns
        if off_cpu_ns > _SHORT_NS and self._waited_only_for_cpu(activity):
            interval_ns = ran_ns
        followed = self._followed[self._place_of(owner, activity)]
        followed.intervals += 1
        followed.clock_ns += interval_ns
        followed.ran_ns += ran_ns
        interval = FollowedTime(interval_ns, ran_ns, calls=0, intervals=1)
        own_ns = self._cost.own_ns(interval, activity)
        self._elapsed = Elapsed(self._elapsed.ns + own_ns, self._elapsed.intervals + 1)
        if self.phase() == DATA:
            self._data_calls.total_ns += own_ns

    def _waited_only_for_cpu(self, activity: str) -> bool:
        """Return whether ``activity``, which has just run, may wait, but was off the CPU without waiting.

        Another program then had the CPU: one such call would look like a costly function.
        """
        if not self._knows_waits or not _may_wait(activity):
            return False
        return self.switches() == self._last_switches

    def _place_of(self, owner: FrameType, activity: str) -> _Place:
        """Return the place that gets the time in which ``owner`` runs its current line with ``activity``.

        If that line makes a call that is slow in a known way, this is noted, too.
        """
        phase = self.phase()
        outer = self._outer_call
        outer_function = None
        if outer is not None and outer.phase == phase:
            outer_function = outer.function
        line = _line_of(owner)
        slow_call = self._slow_lines.call_of(owner)
        if slow_call is not None:
            self._slow_calls.setdefault(line, slow_call)
        loop_line = None
        if phase == OTHER and self._loop_line is not None:
            loop_line = line if owner is self._loop_frame else self._loop_line
        return _Place(phase, line, activity, outer_function, loop_line)

    def _end_outer_call(self) -> None:
        """Forget the outer call if it has returned, or if another phase has begun within it."""
        outer = self._outer_call
        if outer is None:
            return
        has_returned = len(self._stack) < outer.depth
        if has_returned or self.phase() != outer.phase:
            self._outer_call = None

    def _enter(self, call: _FollowedCall) -> None:
        """Put a ``call`` that begins onto the stack, and count it.

        Without an outer call, the program's code is called by the loop or by a library: then this is the outer call.
        """
        self._end_outer_call()
        self._stack.append(call)
        if call.owner is None or not self._is_followed(call.owner):
            return
        if self._outer_call is None and call.owner is not self._loop_frame:
            file, _, name = _line_of(call.owner)
            function = (file, call.owner.f_code.co_firstlineno, name)
            self._outer_call = _OuterCall(
                phase=self.phase(), function=function, depth=len(self._stack)
            )
        self._followed[self._place_of(call.owner, call.activity)].calls += 1

    def _call_of_python(self, frame: FrameType) -> _FollowedCall:
        """Return which line and activity get the time of the Python function that ``frame`` begins to run.

        The first rule that applies decides.
        """
        caller = self._caller_of(frame.f_back)
        file = frame.f_code.co_filename
        package = package_of(file)
        is_called_by_printing = package and caller.activity == PRINTING
        if file.endswith(_PRINTING_FILE) or is_called_by_printing:
            return _FollowedCall(caller.owner, PRINTING)
        phase = self.phase()
        is_outer_forward = phase == OTHER and frame.f_code.co_name == "forward"
        if is_outer_forward and self._loop_line is not None:
            self._outer_forwards.note_of_loop(frame, self._loop_line)
        # Our hooks also call functions of the program and its libraries, which are not ours.
        is_called_by_us = caller.activity == OURS and package not in (TORCH, LIGHTNING)
        if package and is_called_by_us:
            return caller
        is_called_by_exchange = package and caller.activity == EXCHANGE
        if package in _EXCHANGING_PACKAGES or is_called_by_exchange:
            return _FollowedCall(caller.owner, EXCHANGE)
        if not package and phase == DATA and self._is_called_by_program(caller):
            # a tokenizer of a package of models, for example: only the program's line can be changed
            package = installed_package(file)
        if package == LIGHTNING and not _begins_logging(frame, caller):
            # It runs the training, such as the closure of an optimizer or ``manual_backward``.
            package = TORCH
        if package:
            return _FollowedCall(caller.owner, package)
        # It is a function of the program. A lambda or comprehension, whose name is like ``<lambda>``, counts as the
        # function that contains it.
        is_inner_function = frame.f_code.co_name.startswith("<")
        if caller.owner is not None:
            slow_call = self._slow_lines.call_of(caller.owner)
            is_of_slow_call = slow_call is not None and slow_call.calls_program
            if is_inner_function or is_of_slow_call:
                return _FollowedCall(caller.owner, _PYTHON)
        if is_outer_forward:
            self._outer_forwards.note(frame, self._loop_line)
        depth = len(self._stack) + 1
        if phase == DATA:
            self._data_calls.begin(function_of(frame), depth)
        if self._function_calls is not None:
            self._function_calls.begin(frame, phase, depth, self._elapsed)
        return _FollowedCall(frame, _PYTHON)

    def _is_called_by_program(self, caller: _FollowedCall) -> bool:
        """Return whether the line of ``caller`` is in a file of the program, and not in an installed package."""
        if caller.owner is None:
            return False
        return not installed_package(caller.owner.f_code.co_filename)

    def _is_followed(self, owner: FrameType) -> bool:
        """Return whether the line that ``owner`` runs is followed now; the loop's own lines only outside of phases."""
        return owner is not self._loop_frame or self.phase() == OTHER

    def _caller_of(self, frame: FrameType | None) -> _FollowedCall:
        """Return the followed call in which ``frame`` makes a call: the innermost one, or that of the program's loop.

        The function that contains the program's own loop was called before ``start``, so it is not on the stack.
        Outside of all phases it is followed all the same.
        """
        caller = self._stack[-1]
        if self.phase() != OTHER:
            # Within a phase the line of the loop is not followed: what it calls is the phase itself.
            is_of_loop = caller.owner is not None and caller.owner is self._loop_frame
            return _OUTERMOST if is_of_loop else caller
        if len(self._stack) > 1 or frame is None:
            return caller
        # ``frame`` was called before ``start``. If it runs the program's own code, it contains the loop.
        if package_of(frame.f_code.co_filename):
            return caller
        self._loop_frame = frame
        # The loop of an installed package, such as transformers' Trainer, is not the user's to change.
        is_installed = installed_package(frame.f_code.co_filename)
        self._loop_line = None if is_installed else _line_of(frame)
        return _FollowedCall(frame, _PYTHON)

    def _call_of_c(self, function: Any, frame: FrameType) -> _FollowedCall:
        """Return which line and activity get the time of a C ``function`` that ``frame`` calls.

        The line stays that of the caller. A function that the program's own code calls is an activity of its own.
        Within a library, builtins and operators count as the library's activity. Operators that torch's Python code
        calls, and all other functions, are activities of their own.
        """
        caller = self._caller_of(frame)
        if caller.owner is None or caller.activity in (OURS, EXCHANGE):
            return caller
        name = _name_of(function)
        if name.startswith(_EXCHANGING_FUNCTIONS) or _is_of_pipe(name, function):
            return _FollowedCall(caller.owner, EXCHANGE)
        is_builtin = not name
        is_called_by_program = caller.activity in (_PYTHON, _BUILTIN)
        if is_called_by_program:
            return _FollowedCall(caller.owner, _BUILTIN if is_builtin else name)
        if is_builtin:
            return caller
        if name != _OPERATORS:
            return _FollowedCall(caller.owner, name)
        if caller.activity == TORCH:
            return _FollowedCall(caller.owner, _INNER_OPERATORS)
        return caller

    def shares(
        self, undisturbed_s: Mapping[str, float] | None = None
    ) -> list[PythonTime]:
        """Return the lines that take most time, the longest first.

        In the phases, the operators that torch's own modules call are left out, because they are the model. The
        profiler's instruments are left out, too.

        ``undisturbed_s`` is how long the thread runs in each phase of a step that is not followed. The lines of a phase
        together cannot take longer, so any excess is a further cost of following, in proportion to the number of
        events. If ``MOST_EVENTS`` ended the following within a phase, the rest of the phase is assumed to be like
        what was followed.
        """
        # both by phase, line and activity
        seconds: defaultdict[tuple[int, Line, str], float] = defaultdict(float)
        calls: defaultdict[tuple[int, Line, str], int] = defaultdict(int)
        corrections = self._corrections_by_phase(undisturbed_s or {})
        for place, followed in self._followed.items():
            phase, line, activity, *_ = place
            is_outside = phase >= len(PARTS)
            is_of_model = activity == _INNER_OPERATORS and phase != OTHER
            if is_outside or is_of_model or activity == OURS:
                continue
            correction = corrections.get(phase, _NO_CORRECTION)
            shown_activity = _SHOWN_AS.get(activity, activity)
            seconds[phase, line, shown_activity] += self._own_s(
                followed, activity, correction
            )
            if activity != _BUILTIN:
                calls[phase, line, shown_activity] += followed.calls

        forward_kinds = self._outer_forwards.kinds_by_function()
        rows = []
        for (phase, line, activity), own_s in seconds.items():
            if own_s > 0.0:
                calls_of_line = calls[phase, line, activity]
                row = _row(phase, line, activity, own_s, calls_of_line)
                if phase == OTHER:
                    kinds = forward_kinds.get((row.file, row.function), {})
                    forward = _kind_of_function(kinds.values())
                    row = row.model_copy(update={"forward": forward})
                rows.append(row)
        rows.sort(key=attrgetter("seconds"), reverse=True)
        return rows[:_MOST_LINES]

    def _own_s(
        self, followed: FollowedTime, activity: str, correction: _Correction
    ) -> float:
        """Return the seconds of ``followed`` without the cost of following."""
        extra_cost_ns = correction.event_ns * followed.intervals
        own_ns = self._cost.own_ns(followed, activity) - extra_cost_ns
        if _is_slowed_down(activity):
            own_ns *= correction.scale_of_python
        return correction.scale * own_ns * 1e-9

    def outer_calls(
        self, undisturbed_s: Mapping[str, float] | None = None
    ) -> list[OuterCall]:
        """Return the functions of the program that are called outside of all phases, the longest first.

        Their seconds include all that they call. ``undisturbed_s`` is as in ``shares``.
        """
        corrections = self._corrections_by_phase(undisturbed_s or {})
        correction = corrections.get(OTHER, _NO_CORRECTION)
        seconds: defaultdict[_CallOfLoop, float] = defaultdict(float)
        # the part of ``seconds`` in which libraries exchange data with other processes
        exchange_s: defaultdict[_CallOfLoop, float] = defaultdict(float)
        for place, followed in self._followed.items():
            if place.phase != OTHER or place.activity == OURS:
                continue
            call_of_loop = _CallOfLoop(place.outer_function, place.loop_line)
            own_s = max(self._own_s(followed, place.activity, correction), 0.0)
            seconds[call_of_loop] += own_s
            if place.activity == EXCHANGE:
                exchange_s[call_of_loop] += own_s
        forward_kinds = self._outer_forwards.kinds_by_call()
        rows = []
        for call_of_loop, total_s in seconds.items():
            function, loop_line = call_of_loop
            if function is None and loop_line is None:
                continue
            facts = {
                "forward": forward_kinds(call_of_loop),
                "exchange_s": exchange_s[call_of_loop],
            }
            row = _outer_call_row(function, loop_line, total_s)
            rows.append(row.model_copy(update=facts))
        rows.sort(key=attrgetter("seconds"), reverse=True)
        return rows[:_MOST_LINES]

    def slow_calls(
        self, undisturbed_s: Mapping[str, float] | None = None
    ) -> list[PythonTime]:
        """Return the lines with a call that is slow in a known way, the longest first; ``what`` names the call.

        ``undisturbed_s`` is as in ``shares``.
        """
        seconds: defaultdict[tuple[int, Line], float] = defaultdict(float)
        calls: defaultdict[tuple[int, Line], int] = defaultdict(int)
        corrections = self._corrections_by_phase(undisturbed_s or {})
        for place, followed in self._followed.items():
            slow_call = self._slow_calls.get(place.line)
            if slow_call is None or place.phase >= len(PARTS):
                continue
            if not _may_be_of_call(place.activity, slow_call):
                continue
            correction = corrections.get(place.phase, _NO_CORRECTION)
            activity = place.activity
            if _is_slowed_down(activity) and not slow_call.is_python:
                # most of the time is that of compiled code
                activity = _BUILTIN
            own_s = self._own_s(followed, activity, correction)
            seconds[place.phase, place.line] += max(own_s, 0.0)
            calls[place.phase, place.line] += followed.calls
        rows = []
        for (phase, line), line_s in seconds.items():
            name = self._slow_calls[line].name
            rows.append(_row(phase, line, name, line_s, calls[phase, line]))
        rows.sort(key=attrgetter("seconds"), reverse=True)
        return rows[:_MOST_LINES]

    def data_calls(
        self, undisturbed_s: Mapping[str, float] | None = None
    ) -> list[OuterCall]:
        """Return the functions of the program that make a batch, the longest first, with the time of what they call.

        A generator is such a function: it runs within the function that asks it for an element. The times are scaled
        so that they add up to the time of the phase, if that is in ``undisturbed_s`` (as in ``shares``).
        """
        data = self._data_calls
        phase_s = (undisturbed_s or {}).get(PARTS[DATA], data.total_ns * 1e-9)
        calls = []
        for (file, number, function), function_ns in data.ns_by_function.items():
            if function_ns > 0.0 and data.total_ns > 0.0:
                calls.append(
                    OuterCall(
                        outer_function=function,
                        file=file,
                        line=number,
                        seconds=function_ns / data.total_ns * phase_s,
                    )
                )
        calls.sort(key=attrgetter("seconds"), reverse=True)
        return calls[:_MOST_LINES]

    def large_results(
        self, undisturbed_s: Mapping[str, float] | None = None
    ) -> list[LargeResult]:
        """Return the functions that make a batch and return more than its samples need, the longest first.

        The times are scaled as in ``data_calls``.
        """
        data_s = self._data_calls.total_ns * 1e-9
        phase_s = (undisturbed_s or {}).get(PARTS[DATA], data_s)
        rows = []
        for results in self._data_calls.large_results():
            file, number, function = results.function
            rows.append(
                LargeResult(
                    function=function,
                    file=file,
                    line=number,
                    seconds=results.share_of_time * phase_s,
                    shape=_shape_text(results.shape),
                    used_shape=_shape_text(results.used_shape),
                    used_share=results.used_share,
                )
            )
        rows.sort(key=attrgetter("seconds"), reverse=True)
        return rows[:_MOST_LINES]

    def repeated_results(
        self, undisturbed_s: Mapping[str, float] | None = None
    ) -> list[RepeatedResult]:
        """Return the functions of the program that computed a result again, the longest first.

        ``undisturbed_s`` is as in ``shares``.
        """
        corrections = self._corrections_by_phase(undisturbed_s or {})
        rows = []
        results_again = []
        if self._function_calls is not None:
            results_again = self._function_calls.results()
        for results in results_again:
            if results.phase >= len(PARTS):
                continue
            correction = corrections.get(results.phase, _NO_CORRECTION)
            extra_cost_ns = correction.event_ns * results.repeated_intervals
            own_ns = correction.scale * (results.repeated_ns - extra_cost_ns)
            file, number, function = results.function
            rows.append(
                RepeatedResult(
                    phase=PARTS[results.phase],
                    file=file,
                    line=number,
                    function=function,
                    calls=results.calls,
                    repeats=results.repeats,
                    seconds=max(own_ns, 0.0) * 1e-9,
                    has_gradients=results.has_gradients,
                )
            )
        rows.sort(key=attrgetter("seconds"), reverse=True)
        return rows[:_MOST_LINES]

    def _corrections_by_phase(
        self, undisturbed_s: Mapping[str, float]
    ) -> dict[int, _Correction]:
        """Return the corrections of the times of lines, by phase; phases without need of one are missing.

        ``undisturbed_s`` is how long the thread runs in each phase of a step that is not followed. The corrected times
        of a phase's lines add up to that:

            corrected time = scale * (time without the calibrated cost - event_ns * events)

        Python's own code has a factor ``scale_of_python`` in addition.
        """
        followed_ns: defaultdict[int, float] = defaultdict(float)
        python_ns: defaultdict[int, float] = defaultdict(float)
        intervals: defaultdict[int, int] = defaultdict(int)
        for place, followed in self._followed.items():
            own_ran_ns = self._cost.own_ran_ns(followed, place.activity)
            followed_ns[place.phase] += max(own_ran_ns, 0.0)
            if _is_slowed_down(place.activity):
                python_ns[place.phase] += max(own_ran_ns, 0.0)
            intervals[place.phase] += followed.intervals

        corrections = {}
        for phase, phase_followed_ns in followed_ns.items():
            is_outside = phase >= len(PARTS)
            if is_outside or PARTS[phase] not in undisturbed_s:
                continue
            undisturbed_ns = undisturbed_s[PARTS[phase]] * 1e9
            if phase_followed_ns > undisturbed_ns:
                corrections[phase] = self._correction_of_excess(
                    phase_followed_ns, undisturbed_ns, intervals[phase]
                )
            elif phase == self._cut_phase and phase_followed_ns > 0.0:
                # Following ended within this phase, so its lines have only a part of its time: scale it to the whole.
                corrections[phase] = _Correction(
                    event_ns=0.0, scale=undisturbed_ns / phase_followed_ns
                )
            elif python_ns[phase] > 0.0:
                # What seems to be Python's own code may be a compiled function whose call Python does not report, such
                # as an operator on arrays. Following does not slow it down.
                missing_ns = undisturbed_ns - phase_followed_ns
                factor = 1.0 + missing_ns / python_ns[phase]
                corrections[phase] = _Correction(
                    event_ns=0.0,
                    scale=1.0,
                    scale_of_python=min(factor, self._cost.slower),
                )
        return corrections

    def _correction_of_excess(
        self, followed_ns: float, undisturbed_ns: float, intervals: int
    ) -> _Correction:
        """Return the correction of a phase whose lines ran longer together than the phase runs when not followed.

        Each of the ``intervals`` between events includes the cost of one event.
        """
        excess_per_event_ns = (followed_ns - undisturbed_ns) / intervals
        most_event_ns = _MOST_EXTRA_COST * self._cost.event_ran_ns
        event_ns = min(excess_per_event_ns, most_event_ns)
        # Beyond that limit the excess has another cause, so it is removed from all lines in proportion to their time.
        rest_ns = followed_ns - event_ns * intervals
        scale = min(undisturbed_ns / max(rest_ns, 1.0), 1.0)
        return _Correction(event_ns, scale)


class _Correction(NamedTuple):
    """A correction of the times of the lines of a phase."""

    event_ns: float  # the cost of an event beyond the calibrated cost
    scale: float  # the factor for the time that is left without that cost
    scale_of_python: float = 1.0  # a further factor for Python's own code


_NO_CORRECTION = _Correction(event_ns=0.0, scale=1.0)


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(str(length) for length in shape)


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


def _outer_call_row(
    function: Line | None, loop_line: Line | None, seconds: float
) -> OuterCall:
    """Return a row of the record; without a ``function``, it is of what the line of the loop calls itself."""
    # at least one of them is known
    file, number, name = function or loop_line or ("", 0, "")
    return OuterCall(
        outer_function="" if function is None else name,
        file=file,
        line=number,
        seconds=seconds,
        loop_file=None if loop_line is None else loop_line[0],
        loop_line=None if loop_line is None else loop_line[1],
    )


@dataclass(frozen=True)
class FollowingCost:
    """The cost of following the calls of a thread."""

    event_ns: float = 0.0  # the cost of an event, on the clock
    event_ran_ns: float = 0.0  # the cost of an event, in CPU time of the thread
    # The factor by which Python's own code runs slower: from 3.11 on, Python does not use its fast instructions while
    # a thread is followed.
    slower: float = 1.0

    def own_ns(self, followed: FollowedTime, activity: str) -> float:
        """Return the time of a line without the cost of following."""
        if _may_wait(activity):
            # It may wait, so the clock counts.
            return followed.clock_ns - self.event_ns * followed.intervals
        return self.own_ran_ns(followed, activity)

    def own_ran_ns(self, followed: FollowedTime, activity: str) -> float:
        """Return how long the thread ran in a line, without the cost of following."""
        own_ns = followed.ran_ns - self.event_ran_ns * followed.intervals
        return own_ns / self.slower if _is_slowed_down(activity) else own_ns


# activities that run C code, beside C functions by their names
_C_ACTIVITIES = (_OPERATORS, _INNER_OPERATORS, _BUILTIN)


def _may_be_of_call(activity: str, slow_call: SlowCall) -> bool:
    """Return whether ``activity`` may be ``slow_call`` itself, and not the rest of its line."""
    package = slow_call.functions[0].partition(".")[0]
    if package == "builtins":
        return activity == _BUILTIN
    if activity == _OPERATORS:
        return package == "torch" or slow_call.runs_torch or slow_call.calls_program
    return activity not in _LIBRARY_OF_TORCH or slow_call.runs_torch


def _is_slowed_down(activity: str) -> bool:
    """Return whether ``activity`` is Python code, which runs slower while it is followed."""
    return not _may_wait(activity) and activity not in _C_ACTIVITIES


def _may_wait(activity: str) -> bool:
    """Return whether ``activity`` may wait for something without the CPU: a named C function, or an exchange."""
    return _is_named_c_function(activity) or activity == EXCHANGE


def _is_named_c_function(activity: str) -> bool:
    """Return whether ``activity`` is the name of a C function, such as ``time.sleep``; other activities have no dot."""
    return "." in activity


def following_cost(
    clock: Callable[[], int], thread_clock: Callable[[], int]
) -> FollowingCost:
    """Measure what following costs on this thread.

    The cost has three parts. The smallest is the time of reading the clocks. For each event the interpreter also makes
    a frame object and a call, which is measured with calls of small functions. It also runs the code in between more
    slowly, which is measured with a loop without calls.
    """
    reading = _reading_cost(clock, thread_clock)

    loop = _followed_trial(_run_sample_instructions, clock, thread_clock)
    loop_ns = loop.ran_ns - loop.intervals * reading.ran_ns
    undisturbed_loop_ns = max(
        _undisturbed_ns(_run_sample_instructions, thread_clock), 1
    )
    slower = max(loop_ns / undisturbed_loop_ns, 1.0)

    calls = _followed_trial(_small_calls, clock, thread_clock)
    calls_cost_ns = calls.ran_ns - slower * _undisturbed_ns(_small_calls, thread_clock)
    event_ran_ns = max(calls_cost_ns / max(calls.intervals, 1), reading.ran_ns)
    beside_reading_ns = event_ran_ns - reading.ran_ns
    return FollowingCost(reading.clock_ns + beside_reading_ns, event_ran_ns, slower)


def _undisturbed_ns(work: Callable[[], object], thread_clock: Callable[[], int]) -> int:
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
        sys.setprofile(times._handle_event)
        work()
        sys.setprofile(None)
        followed = times._followed.values()
        ran_ns = sum(line.ran_ns for line in followed)
        intervals = sum(line.intervals for line in followed)
        trials.append(_FollowedTrial(ran_ns, intervals))
    return min(trials)


class _ReadingCost(NamedTuple):
    """The cost of only reading the clocks."""

    clock_ns: float  # the cost on the clock
    ran_ns: float  # the cost in CPU time of the thread


def _reading_cost(
    clock: Callable[[], int], thread_clock: Callable[[], int]
) -> _ReadingCost:
    """Return the median time between two events, of calls that take only some 20 ns themselves."""
    # of each event: both clocks when its handler begins, and both when it ends
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
    """Return the line that ``frame`` runs now."""
    code = frame.f_code
    line = frame.f_lineno or code.co_firstlineno
    return code.co_filename, line, qualified_name(code)


def _kind_of_function(kinds: Collection[ForwardKind]) -> ForwardKind | None:
    """Return one of the ``kinds`` of the calls of a forward pass, if possible of one that a step may not need."""
    for kind in kinds:
        if kind not in NEEDED_FORWARDS:
            return kind
    return next(iter(kinds), None)


def _forward_call(frame: FrameType) -> _ForwardCall | None:
    """Return how the forward pass that ``frame`` runs is called; None if it is not that of a module."""
    arguments = frame.f_code.co_varnames
    module: Any = frame.f_locals.get(arguments[0]) if arguments else None
    caller = frame.f_back
    # Not isinstance, which reads the attribute ``__class__``: it may be code of the program.
    if caller is None or not issubclass(type(module), nn.Module):
        return None
    has_gradients = torch.is_grad_enabled()
    tensors = [
        value for value in frame.f_locals.values() if issubclass(type(value), Tensor)
    ]
    return _ForwardCall(
        module_ref=ref(module),
        is_direct=not package_of(caller.f_code.co_filename),
        has_gradients=has_gradients,
        passes_gradients=has_gradients and any(map(_requires_grad, tensors)),
        weights_get_gradients=has_gradients
        and any(map(_requires_grad, module.parameters())),
        checksum=weights_checksum(module),
    )


def _is_of_pipe(name: str, function: Any) -> bool:
    """Return whether the C function ``function``, of this name, is a method of a pipe or socket to another process."""
    if not name.startswith("_io."):
        return False
    try:
        descriptor = function.__self__.fileno()
        mode = os.fstat(descriptor).st_mode
    except Exception as error:  # a file may have no descriptor, or be closed
        if comes_from_outside(error):
            raise
        return False
    is_connection = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return is_connection and descriptor not in _PIPES_OF_PROGRAM


def _begins_logging(frame: FrameType, caller: _FollowedCall) -> bool:
    """Return whether the function of Lightning that ``frame`` runs logs, or is called by one that does.

    ``self.log``, a logger's ``log_metrics`` and metrics log.
    """
    # only functions that log have this activity: see ``_call_of_python``
    is_called_by_logging = caller.activity == LIGHTNING
    if is_called_by_logging:
        return True
    code = frame.f_code
    return code.co_name.startswith("log") or "torchmetrics" in code.co_filename


def _name_of(function: Any) -> str:
    """Return ``torch`` for operators and tensor methods, "" for builtins, and else a name like ``time.sleep``."""
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

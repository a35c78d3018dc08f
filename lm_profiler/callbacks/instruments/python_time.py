"""Divides the time that Python runs in a step among the lines of the program's own code."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
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

_INSIDE = "torch in a library"
Line = tuple[str, int, str]  # file, line and function


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
    _cost_ns: tuple[float, float] = (0.0, 0.0)  # what following adds from one event to the next, by each clock
    _ns: defaultdict[tuple[int, Line, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0]))
    # each call's frame whose line has the time, if any, and what it is; the first stands for what no call is around
    _stack: list[tuple[FrameType | None, str]] = field(default_factory=lambda: [(None, "")])
    _left: int = MOST_EVENTS
    _last_ns: int = 0
    _last_ran_ns: int = 0

    def start(self) -> bool:
        """Start to follow; returns False where another profiler already follows this thread."""
        if sys.getprofile() is not None:
            return False
        self._cost_ns = following_cost_ns(self.clock, self.ran)
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
                passed_ns = now_ns - self._last_ns - self._cost_ns[0]
                own_ns = ran_ns - self._last_ran_ns - self._cost_ns[1]
                self._ns[self.phase(), _line_of(owner), what][0] += passed_ns if "." in what else own_ns
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
            self._ns[self.phase(), _line_of(owner), what][1] += 1

    def shares(self) -> list[PythonTime]:
        """Return the lines with most time, the longest first, without the operators that torch's own modules call."""
        rows = [
            PythonTime(
                phase=PARTS[phase], file=file, line=line, function=function, what=what, seconds=ns * 1e-9, calls=int(n)
            )
            for (phase, (file, line, function), what), (ns, n) in self._ns.items()
            if phase < len(PARTS) and what != _INSIDE and ns > 0
        ]
        return sorted(rows, key=lambda row: -row.seconds)[:_KEPT]


def following_cost_ns(clock: Callable[[], int], ran: Callable[[], int]) -> tuple[float, float]:
    """Return the cost of following between two events: the median over calls that take some 20 ns themselves."""
    read_ns: list[tuple[int, int, int, int]] = []
    sys.setprofile(lambda *_: read_ns.append((clock(), ran(), ran(), clock())))
    for _ in range(200):
        len("")
    sys.setprofile(None)
    now_ns, now_ran_ns, last_ran_ns, last_ns = np.array(read_ns).T
    return float(np.median(now_ns[1:] - last_ns[:-1])), float(np.median(now_ran_ns[1:] - last_ran_ns[:-1]))


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

"""The costs of a run's mean step that several finders use."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lm_profiler.record.parts import INPUT_PHASES
from lm_profiler.record.run_record import (
    EXCHANGE,
    NEEDED_FORWARDS,
    PRINTING,
    Finding,
    FindingName,
    ForwardKind,
    OuterCall,
    OutsideSteps,
    OwnedTime,
    PythonTime,
    RunRecord,
    Settings,
    Term,
)

WORTH = 0.05  # the least share of the step that a finding must save to be reported
# The share by which the gain of a remedy may exceed the mean cost: a cause may cost more than its own time (waking up,
# cold caches), and runs differ. These shares held in nine of ten programs that others wrote to test the advice.
_TOLERANCE = 0.25
# of costs outside the computation, which are measured as a whole
_TOLERANCE_IF_MEASURED = 0.12
# of code in Python: without it, the operators that it calls are missing, too
_TOLERANCE_OF_PYTHON = 0.4
# of operators whose results are not needed: without them, the code that calls them is missing, too
_TOLERANCE_OF_NEEDLESS = 0.5
_MEASURED_AS_WHOLE = (
    "input",
    "validation",
    "checkpoint",
    "reload",
    "epoch",
    "worker_start",
)
_TOLERANCES: Mapping[str, float] = {
    **dict.fromkeys(_MEASURED_AS_WHOLE, _TOLERANCE_IF_MEASURED),
    **dict.fromkeys(("python", "large_result"), _TOLERANCE_OF_PYTHON),
    **dict.fromkeys(
        (
            "broadcast",
            "cancelled",
            "cells",
            "constant",
            "ignored",
            "ignored_at_last",
            "recomputation",
            "repeated",
            "scores",
            "unused",
            "zeros",
        ),
        _TOLERANCE_OF_NEEDLESS,
    ),
}
# With the uncertainty of the mean, a tolerance is at most this, unless the cause alone needs more: a larger upper limit
# would have no meaning.
_LARGEST_TOLERANCE = 0.35
# the kinds of the forward pass of a constant module that no optimizer trains
_UNTRAINED_FORWARDS = ("untrained", "unfrozen")
_ITEM_METHODS = (".__getitem__", ".__getitems__", ".__iter__")  # of a dataset
# what a line of Python does, if it does not call a package that the program may do without
_NEEDED_ACTIVITIES = (
    "python",
    "builtin",
    "torch",
    "torch in a library",
    "library",
    "Python",
)
# the time of the backward pass of a layer, which computes two products, by that of its forward pass
BACKWARD_PER_FORWARD = 2.0
RARE_SHARE = 0.05  # of the steps: those beyond the 95th percentile
SMALL_CALL_S = 50e-6  # a torch call shorter than this is mostly call overhead
MANY_CALLS = 200  # of one operator in a step
_LARGEST_LOST_SHARE = 0.9  # so that nothing is divided by almost 0 (1 - this share)
MODEL_PHASES = ("forward", "backward")
# Other threads are held responsible for the training thread's sleep if they compute for at least this share of the
# step, and if the lock is returned this late: without them a pause is 0.1 ms too long, with one that spins 5 ms.
_SHARE_OF_OTHER_THREADS = 0.2
_LEAST_LOCK_WAIT_S = 0.3e-3

# The field of the record that holds the times of parts: on the device's clock if there is one, or on the host's.
_Clock = Literal["time", "host_time"]


_NO_FACTS: Mapping[str, float] = MappingProxyType({})


class ProgramCode(NamedTuple):
    """The code that a finding names: a function or a line of the program. The fields are those of ``Finding``."""

    owner: str | None = None  # the function
    file: str | None = None
    line: int | None = None
    what: str | None = None  # what takes most of its time
    facts: Mapping[str, float] = _NO_FACTS


@dataclass(frozen=True)
class StepCosts:
    """A run's record, and the costs of its mean step that several finders use."""

    record: RunRecord

    @cached_property
    def settings(self) -> Settings:
        return self.record.settings or Settings()

    @cached_property
    def step_s(self) -> float:
        """The mean step in the long run, with the wait for batches that prefetched batches hid while measuring."""
        step = self.record.time.get("step")
        if step is None or step.mean is None:
            return self.hidden_wait_s
        return step.mean + self.hidden_wait_s

    @cached_property
    def hidden_wait_s(self) -> float:
        """The time by which a step becomes longer once the batches prefetched before the measurement are used up."""
        step = self.record.time.get("step")
        lasting_s = self.record.lasting_step_s
        if step is None or step.mean is None or lasting_s is None:
            return 0.0
        return max(lasting_s - step.mean, 0.0)

    @cached_property
    def whole_s(self) -> float:
        """The mean step with its share of the time between steps."""
        between_steps_s = sum(
            activity.per_step_s
            for activity in self.outside_steps
            if not activity.in_step
        )
        return self.step_s + between_steps_s

    @cached_property
    def outside_steps(self) -> Sequence[OutsideSteps]:
        """The time outside the phases, over the whole run.

        Records of versions before 0.3 hold it only for the measured steps.
        """
        if self.record.outside:
            return self.record.outside
        steps = max(self.record.steps.get("measure", 0), 1)
        activities: list[OutsideSteps] = []
        named_s = 0.0
        for named in self.record.between:
            per_step_s = named.seconds / steps
            activity = OutsideSteps(
                what=named.what,
                seconds=named.seconds,
                times=named.times,
                per_step_s=per_step_s,
            )
            activities.append(activity)
            named_s += named.seconds
        unnamed_s = (self.record.between_steps_s or 0.0) - named_s
        if unnamed_s > 0.0:
            activities.append(
                OutsideSteps(
                    what="", seconds=unnamed_s, times=0, per_step_s=unnamed_s / steps
                )
            )
        return activities

    def tolerance_of(self, name: FindingName) -> float:
        """Return the share by which the mean cost of a finding may be too low (with 95 % confidence)."""
        tolerance = _TOLERANCES.get(name, _TOLERANCE)
        if name in _MEASURED_AS_WHOLE:
            # A slower machine lengthens the whole step with it: its share is known better than either of them.
            return tolerance
        # the two causes are independent of each other
        share = math.hypot(tolerance, self._uncertain_share)
        return min(share, max(tolerance, _LARGEST_TOLERANCE))

    @property
    def _uncertain_share(self) -> float:
        """Half of the mean step's interval, as a share of the mean; 0 if it is unknown."""
        step = self.record.time.get("step")
        if (
            step is None
            or step.mean_low is None
            or step.mean_high is None
            or not step.mean
        ):
            return 0.0
        return (step.mean_high - step.mean_low) / 2.0 / step.mean

    @property
    def contended(self) -> bool:
        return self.record.contended

    @property
    def has_pattern(self) -> bool:
        """Whether some of the steps are longer than others at regular distances."""
        steady = self.record.steadiness
        return steady is not None and steady.pattern is not None

    @property
    def on_device(self) -> bool:
        """Whether the work is queued on a device, such as a GPU, and not executed by the CPU."""
        return (
            self.record.environment is not None
            and self.record.environment.device_type != "cpu"
        )

    @cached_property
    def slowdown(self) -> float:
        """The factor by which other programs lengthen the computations of this one."""
        contention = self.record.contention
        if contention is None or contention.not_had is None:
            return 1.0
        lost_share = min(contention.not_had, _LARGEST_LOST_SHARE)
        return 1.0 / (1.0 - lost_share)

    def slowdown_in(self, phase: str) -> float:
        """Return the same factor for CPU times in ``phase``: how long its thread was awake, over its CPU time."""
        use = self.record.thread_use.get(phase)
        if use is None or use.ran_s <= 0.0:
            return self.slowdown
        awake_s = self.mean_s(phase) - use.asleep_s
        return max(awake_s / use.ran_s, 1.0)

    def mean_s(self, part: str, clock: _Clock = "time") -> float:
        """Return the mean seconds of ``part`` in the long run."""
        mean_s = 0.0
        summary = getattr(self.record, clock).get(part)
        if summary is not None and summary.mean is not None:
            mean_s = summary.mean
        if part == "data":
            # Batches prefetched before the measurement hid this wait; in the long run it is part of ``data``.
            mean_s += self.hidden_wait_s
        return mean_s

    def regular_s(self, part: str, clock: _Clock = "host_time") -> float:
        """Return the seconds that ``part`` takes in a step without disturbance; 0 if it has no mean.

        On a busy machine the mean of a short part is dominated by steps in which another program had the CPU. The
        median and the CPU time give two other estimates. Disturbance only lengthens an estimate, so the smallest is
        used. Call it only for parts that do the same in each step.
        """
        summary = getattr(self.record, clock).get(part)
        if summary is None or summary.mean is None:
            return 0.0
        if not self.contended or summary.median is None:
            return float(summary.mean)
        regular_s = min(summary.mean, summary.median * self.slowdown)
        if not self.on_device:
            regular_s = min(regular_s, self._fair_s(part))
        return float(regular_s)

    def _fair_s(self, phase: str) -> float:
        """Return the seconds of ``phase`` if other programs delayed all phases alike; infinite if they are unknown.

        The time in which the training thread was awake is divided among the phases by their CPU time. A phase's sleep
        is its own: other programs do not lengthen it.
        """
        uses = self.record.thread_use
        step_ran_s = sum(use.ran_s for use in uses.values())
        if phase not in uses or step_ran_s <= 0.0:
            return math.inf
        asleep_s = sum(use.asleep_s for use in uses.values())
        awake_s = max(self.mean_s("step") - asleep_s, 0.0)
        return awake_s * uses[phase].ran_s / step_ran_s + uses[phase].asleep_s

    @cached_property
    def _waits_for_lock(self) -> bool:
        """Whether other threads of the process hold Python's lock for long enough to delay the training thread."""
        threads = self.record.other_threads
        has_several_ranks = len(self.record.rank_step_s) > 1
        if threads is None or has_several_ranks:  # ranks also wait for each other
            return False
        step_s = sum(use.wall_s for use in self.record.thread_use.values())
        are_busy = threads.ran_s >= _SHARE_OF_OTHER_THREADS * step_s
        return are_busy and threads.lock_wait_s >= _LEAST_LOCK_WAIT_S

    def lock_wait_s(self, phase: str) -> float:
        """Return the seconds of ``phase`` in which the training thread waits for Python's lock; 0 if unknown.

        They are its sleep, without the recorded time of packages and C functions, which may wait for something else.
        """
        use = self.record.thread_use.get(phase)
        if use is None or not use.wall_s or not self._waits_for_lock:
            return 0.0
        # Here it waits for the batch; or for the thread in which autograd launches the work of a device.
        waits_for_others = phase in INPUT_PHASES
        if waits_for_others or (self.on_device and phase == "backward"):
            return 0.0
        asleep_s = self.mean_s(phase, clock="host_time") * use.asleep_s / use.wall_s
        for row in self.record.python_times:
            if row.phase == phase and row.what not in _NEEDED_ACTIVITIES:
                asleep_s -= row.seconds
        return max(asleep_s, 0.0)

    def outside_s(self, event: str) -> float:
        """Return the seconds per step that ``event``, such as validation, takes outside the phases."""
        return sum(
            activity.per_step_s
            for activity in self.outside_steps
            if activity.what == event
        )

    def times_outside(self, event: str) -> int:
        """Return how often ``event`` took place outside the phases in the whole run."""
        return sum(
            activity.times for activity in self.outside_steps if activity.what == event
        )

    def times_per_step(self, event: str) -> float | None:
        """Return how often ``event`` takes place per step, in the long run; None if it did not, or took no time."""
        for activity in self.outside_steps:
            if activity.what == event and activity.seconds > 0.0:
                return activity.times * activity.per_step_s / activity.seconds
        return None

    def is_rarely_longer(self, part: str, seconds: float) -> bool:
        """Return whether fewer than ``RARE_SHARE`` of the steps have ``part`` longer by about ``seconds``."""
        summary = self.record.host_time.get(part)
        if summary is None or summary.median is None or summary.p95 is None:
            return False
        return summary.p95 - summary.median < 0.5 * seconds

    def term_s(self, *names: str) -> float:
        """Return the seconds of these terms of the waterfall; 0 if there is none."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return 0.0
        return sum(term.seconds for term in waterfall.terms if term.name in names)

    def gap_s(self, phase: str) -> float:
        """Return the seconds of ``phase`` in which no operator ran, by the waterfall; infinite without a waterfall.

        This is the upper limit of the time of Python code: the time of a line such as ``x * y`` includes the operator
        on its tensors, because Python's profiler does not see it as a call. Operators that are called hundreds of times
        outside of modules and are very short count as gaps too: they are mostly call overhead.
        """
        waterfall = self.record.waterfall
        if waterfall is None or not waterfall.terms:
            return math.inf
        seconds = 0.0
        for term in waterfall.terms:
            if term.name == "gaps":
                seconds += term.phases.get(phase, 0.0) if term.phases else term.seconds
            elif term.name in ("bandwidth", "beyond_bandwidth"):
                seconds += _short_operators_s(term, phase)
        return seconds

    def actions(self) -> Sequence[OwnedTime]:
        """Return the timed actions of ``other``, the longest first."""
        owned = self.record.other_by_owner
        return () if owned is None else owned.actions

    def rows_of_functions(self, phases: Collection[str]) -> list[list[PythonTime]]:
        """Return one list for each function of the program in each of ``phases``: its rows of recorded Python time."""
        return _by_function(
            row
            for row in self.record.python_times
            if row.phase in phases and row.forward not in NEEDED_FORWARDS
        )

    def main_line(self, phase: str, seconds: float) -> ProgramCode | None:
        """Return the longest line of the function that took half of ``seconds`` in ``phase``; None without one."""
        costliest, most_s = _costliest(self.rows_of_functions([phase]))
        # other programs lengthen the measured steps, but not the step in which Python was recorded
        least_s = 0.5 * seconds / self.slowdown_in(phase)
        if not costliest or most_s < least_s:
            return None
        return _longest_line(costliest)

    def costliest_line(self, phase: str, least_s: float) -> ProgramCode | None:
        """Return the costliest line of the program in ``phase``; None if no line takes ``least_s``."""
        seconds_by_line: defaultdict[tuple[str, int], float] = defaultdict(float)
        rows = []
        for row in self.record.python_times:
            if row.phase == phase and row.forward not in NEEDED_FORWARDS:
                rows.append(row)
        for row in rows:
            seconds_by_line[row.file, row.line] += row.seconds
        if not seconds_by_line:
            return None
        line = max(seconds_by_line, key=seconds_by_line.__getitem__)
        if seconds_by_line[line] < least_s / self.slowdown_in(phase):
            return None
        return _longest_line([row for row in rows if (row.file, row.line) == line])

    def outer_call_s(self, function: ProgramCode) -> float | None:
        """Return the seconds per step of ``function`` and what it calls; None if the loop does not call it.

        Calls that each step needs are left out.
        """
        calls = [
            call
            for call in self._avoidable_calls()
            if call.outer_function == function.owner
        ]
        if not calls:
            return None
        return sum(call.seconds for call in calls) * self.slowdown_in("other")

    def short_torch_calls(self, call: OuterCall) -> int:
        """Return how many short calls of torch the function of ``call`` makes per step, outside of all phases.

        It is 0 if they are few, or if most of the call's time goes into what the function calls. Operators that are
        written as signs, such as ``a + b``, are not counted.
        """
        rows = [
            row
            for row in self.record.python_times
            if row.phase == "other"
            and (row.file, row.function) == (call.file, call.outer_function)
            and row.what in ("python", "torch")
        ]
        if sum(row.seconds for row in rows) < 0.5 * call.seconds:
            return 0
        torch_rows = [row for row in rows if row.what == "torch"]
        calls = sum(row.calls for row in torch_rows)
        seconds = sum(row.seconds for row in torch_rows)
        return calls if are_many_short_calls(calls, seconds) else 0

    def main_line_of_workers(self, wait_s: float) -> ProgramCode | None:
        """Return the longest line of the costliest function of the loader's workers.

        None if the function is unknown, or if the code of the workers takes less than half of ``wait_s``, the step's
        wait for a batch: sending batches is then slow, not making them.
        """
        worker_s = sum(row.seconds for row in self.record.worker_times)
        if worker_s < 0.5 * wait_s:
            return None
        rows, _ = _costliest(_by_function(self.record.worker_times))
        return _longest_line(rows) if rows else None

    def main_package(self, function: ProgramCode) -> tuple[str, float] | None:
        """Return the package that takes at least half of the time of a function that loads data, and its share.

        None without such a package.
        """
        activity, share = self._main_data_activity(function)
        is_package = activity not in _NEEDED_ACTIVITIES and not _is_other_code(activity)
        if not is_package or share < 0.5:
            return None
        return activity, share

    def is_mostly_in_other_code(self, function: ProgramCode) -> bool:
        """Return whether at least half of the time of a function that loads data is that of a C function.

        An example is a decoder. Waiting for other processes, and printing, count as C functions.
        """
        activity, share = self._main_data_activity(function)
        return _is_other_code(activity) and share >= 0.5

    def _main_data_activity(self, function: ProgramCode) -> tuple[str, float]:
        """Return what takes most of the time of a function that loads data, and its share; "" and 0 if unknown."""
        seconds_by_activity: defaultdict[str, float] = defaultdict(float)
        for row in (*self.record.python_times, *self.record.worker_times):
            is_of_function = (
                row.file == function.file and row.function == function.owner
            )
            if is_of_function and row.phase == "data":
                seconds_by_activity[row.what] += row.seconds
        if not seconds_by_activity:
            return "", 0.0
        activity = max(seconds_by_activity, key=seconds_by_activity.__getitem__)
        share = seconds_by_activity[activity] / sum(seconds_by_activity.values())
        return activity, share

    def main_data_call(self) -> ProgramCode | None:
        """Return the innermost function that takes at least half of a batch's time; None if no function is known.

        A function's time includes that of the functions that it calls.
        """
        calls = self.record.data_calls
        longest_s = max((call.seconds for call in calls), default=0.0)
        main_calls = [call for call in calls if call.seconds >= 0.5 * longest_s]
        if not main_calls:
            return None
        innermost = min(main_calls, key=lambda call: call.seconds)
        return ProgramCode(innermost.outer_function, innermost.file, innermost.line)

    def line_of_items(self) -> ProgramCode | None:
        """Return the longest line of the method that makes a dataset's items; None if it is unknown."""
        for rows in self.rows_of_functions(["data"]):
            if rows[0].function.endswith(_ITEM_METHODS):
                return _longest_line(rows)
        return None

    def main_outer_call(self) -> ProgramCode | None:
        """Return the costliest function called outside of all phases.

        None if it takes less than half of the time of all functions called there.
        """
        seconds_by_function: defaultdict[tuple[str, str], float] = defaultdict(float)
        calls = [call for call in self._avoidable_calls() if call.outer_function]
        for call in calls:
            seconds_by_function[call.file, call.outer_function] += call.seconds
        if not seconds_by_function:
            return None
        function = max(seconds_by_function, key=seconds_by_function.__getitem__)
        if seconds_by_function[function] < 0.5 * sum(seconds_by_function.values()):
            return None
        longest = next(
            call for call in calls if (call.file, call.outer_function) == function
        )
        return ProgramCode(
            owner=longest.outer_function,
            file=longest.file,
            line=longest.line,
            facts=_facts_of_forward(longest.forward),
        )

    def loop_lines(self) -> list[LoopLine]:
        """Return the lines of the program's own loop with all that they call outside of all phases, longest first."""
        by_line: defaultdict[tuple[str, int], list[OuterCall]] = defaultdict(list)
        for call in self._avoidable_calls():
            if call.loop_file is not None and call.loop_line is not None:
                by_line[call.loop_file, call.loop_line].append(call)
        slowdown = self.slowdown_in("other")
        lines = [
            LoopLine(
                file=file,
                line=number,
                seconds=sum(call.seconds for call in calls) * slowdown,
                calls=calls,
            )
            for (file, number), calls in by_line.items()
        ]
        return sorted(lines, key=lambda line: line.seconds, reverse=True)

    def _avoidable_calls(self) -> list[OuterCall]:
        """Return the calls outside of all phases without those that each step needs."""
        return [
            call
            for call in self.record.outer_calls
            if call.forward not in NEEDED_FORWARDS
        ]

    @property
    def needed_calls_s(self) -> float:
        """The seconds per step of the calls outside of all phases that each step needs."""
        seconds = 0.0
        for call in self.record.outer_calls:
            if call.forward in NEEDED_FORWARDS:
                seconds += call.seconds
        return seconds * self.slowdown_in("other")

    def main_untrained_call(self) -> ProgramCode | None:
        """Return ``main_outer_call`` if that is the forward pass of a module that no optimizer trains; else None."""
        function = self.main_outer_call()
        is_untrained = function is not None and "untrained" in function.facts
        return function if is_untrained else None

    @property
    def calls_model_unmarked(self) -> bool:
        """Whether most of ``other`` is the forward pass of a trained module that the program calls without a mark."""
        unmarked_s = 0.0
        total_s = 0.0
        for row in self.record.python_times:
            if row.phase == "other":
                total_s += row.seconds
                if row.forward == "unmarked":
                    unmarked_s += row.seconds
        return unmarked_s > 0.5 * total_s

    def finding(
        self,
        name: FindingName,
        saves_s: float,
        may: bool = False,
        code: ProgramCode | None = None,
        **fields: Any,
    ) -> Finding:
        """Return a finding that saves at most the whole step.

        Args:
            name: the name of the finding.
            saves_s: the seconds per step that it could save.
            may: whether only a trial shows if it saves time.
            code: the code that it names, if it is known.
            fields: other fields of the finding; they replace those of ``code``.
        """
        saves_s = min(saves_s, self.whole_s)
        share = 0.0
        if self.whole_s > 0.0:
            share = saves_s / self.whole_s
        all_fields: dict[str, Any] = {} if code is None else code._asdict()
        all_fields.update(fields, name=name, saves_s=saves_s, share=share, may=may)
        return Finding.model_validate(all_fields)


@dataclass(frozen=True)
class LoopLine:
    """A line of the program's own loop, and the calls that it makes outside of all phases."""

    file: str
    line: int
    seconds: float  # per step, with all that it calls
    calls: Sequence[OuterCall]

    @property
    def exchanges(self) -> bool:
        """Whether most of its time goes into sending data to other processes and waiting for theirs."""
        seconds = sum(call.seconds for call in self.calls)
        return sum(call.exchange_s for call in self.calls) > 0.5 * seconds

    @property
    def facts(self) -> dict[str, float]:
        """The facts of a finding about the forward pass that takes most of its time; empty without one."""
        longest = max(self.calls, key=lambda call: call.seconds)
        if longest.seconds < 0.5 * sum(call.seconds for call in self.calls):
            return {}
        return _facts_of_forward(longest.forward)

    @property
    def acts(self) -> bool:
        """Whether it runs a trained model without gradients."""
        return any(call.forward == "acting" for call in self.calls)

    @property
    def main_call(self) -> OuterCall | None:
        """The function of the program below it that takes most of its time; None if none takes half."""
        longest = max(self.calls, key=lambda call: call.seconds)
        seconds = sum(call.seconds for call in self.calls)
        if not longest.outer_function or longest.seconds < 0.5 * seconds:
            return None
        return longest

    @property
    def main_function(self) -> str | None:
        """The name of the function of ``main_call``, with its line; None without one."""
        call = self.main_call
        if call is None:
            return None
        return f"{call.outer_function} ({PurePath(call.file).name}:{call.line})"


def _is_other_code(activity: str) -> bool:
    """Return whether an activity in ``PythonTime`` is a C function (``zlib.decompress``), an exchange or printing."""
    is_c_function = "." in activity
    return is_c_function or activity in (EXCHANGE, PRINTING)


def _by_function(rows: Iterable[PythonTime]) -> list[list[PythonTime]]:
    """Return one list for each phase and function of ``rows``: its rows."""
    by_function = defaultdict[tuple[str, str, str], list[PythonTime]](list)
    for row in rows:
        by_function[row.phase, row.file, row.function].append(row)
    return [*by_function.values()]


def _costliest(functions: Iterable[list[PythonTime]]) -> tuple[list[PythonTime], float]:
    """Return the rows of the function with the longest time, and that time in seconds; no rows and 0 without any."""
    costliest: list[PythonTime] = []
    most_s = 0.0
    for rows in functions:
        function_s = sum(row.seconds for row in rows)
        if function_s > most_s:
            costliest = rows
            most_s = function_s
    return costliest, most_s


def _longest_line(rows: Sequence[PythonTime]) -> ProgramCode:
    """Return the line of a function's ``rows`` with the longest time."""
    longest = max(rows, key=lambda row: row.seconds)
    return ProgramCode(
        owner=longest.function,
        file=longest.file,
        line=longest.line,
        what=longest.what,
        facts=_facts_of_forward(longest.forward),
    )


def _facts_of_forward(kind: ForwardKind | None) -> dict[str, float]:
    """Return the facts of a finding about a function; ``kind`` is how it is called, if it is a forward pass."""
    if kind not in _UNTRAINED_FORWARDS:
        return {}
    facts = {"untrained": 1.0}
    if kind == "unfrozen":
        facts["unfrozen"] = 1.0
    return facts


def are_many_short_calls(calls: float, seconds: float) -> bool:
    """Return whether so many ``calls`` of torch, which take ``seconds`` together, are mostly call overhead."""
    return calls >= MANY_CALLS and seconds / calls < SMALL_CALL_S


def _short_operators_s(term: Term, phase: str) -> float:
    """Return the seconds of the many short operators that ``phase`` calls outside of modules."""
    seconds = 0.0
    for contributor in term.contributors:
        is_of_phase = contributor.what.startswith(f"{phase}: ")
        if contributor.module is not None or not is_of_phase:
            continue
        if are_many_short_calls(contributor.count, contributor.seconds):
            seconds += contributor.seconds
    return seconds


Finder = Callable[[StepCosts], Iterator[Finding]]

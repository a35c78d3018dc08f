"""Attributes the time that no phase covers to owners: the classes whose code runs then, and their actions.

The time is divided at the timeline's own marks, so the shares add up to it. The facts also contain the thread's CPU
time in each phase.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from lm_profiler.analysis.steps.step_model import fit
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.other_threads import OtherThreadsReader
from lm_profiler.measure.counts.step_reader import ThreadTimes, thread_times
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    LIGHTNING,
    OURS,
    OtherByOwner,
    OtherThreads,
    OwnedTime,
    ThreadUse,
)


class ActionSteps(NamedTuple):
    """The number of steps of the ``actions`` stage."""

    timed: int  # the first steps, whose actions are timed by name
    # all steps before the last one, in which the program's Python is followed line by line
    before_lines: int
    period: int = 1  # the number of steps after which a pattern of slow steps repeats

    @property
    def planned(self) -> int:
        return self.before_lines + 1


_ALL_STEPS = ActionSteps(timed=1 << 30, before_lines=1 << 30)


def action_steps_of_pattern(steps: int, step_s: Sequence[float]) -> ActionSteps:
    """Return a number of steps that shows why some of the measured steps are slower than others.

    If the measured seconds ``step_s`` have a pattern, such as one slow step in five, whole periods of it are timed, of
    at least ``steps`` steps together, and a slow step is followed line by line.
    """
    pattern = fit(step_s).pattern
    if pattern is None:
        return ActionSteps(timed=steps, before_lines=steps)
    period = pattern.period
    timed = period * math.ceil(steps / period)
    slowest_position = int(pattern.offsets.argmax())  # within a period
    steps_so_far = len(step_s) + timed
    steps_until_slow = (slowest_position - steps_so_far) % period
    return ActionSteps(timed, timed + steps_until_slow, period)


class Owner(NamedTuple):
    """What a stretch of time is attributed to: the class whose code runs, and its action."""

    class_name: str
    action: str


LOOP = Owner(LIGHTNING, "loop")
_TIMING = Owner(OURS, "timing of these")


@dataclass
class _PhaseUse:
    """The times of the thread in one phase, over all timed steps."""

    wall_ns: int = 0
    ran_ns: int = 0  # time for which the thread ran on a CPU
    no_cpu_ns: int = 0  # waiting for a CPU


class _StepShares(NamedTuple):
    """The time and the calls of each owner in one step."""

    ns: dict[Owner, int]
    calls: dict[Owner, int]


@dataclass(eq=False)
class Owners:
    """Divides the host's time that no phase covers among actions: each gets its own time, without inner actions."""

    timeline: Timeline  # has ``observe`` among its observers
    steps: ActionSteps = _ALL_STEPS
    python_times: PythonTimes | None = None
    # returns how long the thread ran and waited for a CPU by now; None means unknown
    thread: Callable[[], ThreadTimes | None] = thread_times
    other_threads_reader: OtherThreadsReader = field(default_factory=OtherThreadsReader)
    guard: Guard = UNGUARDED  # guards what training calls here
    # the part of the step that runs now, as an index of ``PARTS``
    code: int = tape.OUTSIDE
    # the owners of the actions that run, the innermost last
    _running: list[Owner] = field(default_factory=lambda: [LOOP])
    # the instant up to which all time was attributed to an owner
    _accounted_until_ns: int = 0
    # when the method that did so ended; the time from ``_accounted_until_ns`` to here is that of this class
    _noted_ns: int = 0
    # time and calls of each owner in the running step
    _ns: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    _calls: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    _steps: list[_StepShares] = field(default_factory=list)  # the timed steps
    _finished_steps: int = 0  # the number of finished steps, timed or not
    _use_of_phase: defaultdict[int, _PhaseUse] = field(
        default_factory=lambda: defaultdict(_PhaseUse)
    )
    _last_thread_times: ThreadTimes | None = None
    _other_threads: OtherThreads | None = None

    def observe(self, code: int) -> None:
        """Note that the part ``code`` begins at the timeline's last mark."""
        timeline = self.timeline
        step = timeline.reading().step
        mark_ns = step.host_ns[-1]
        begins_step = len(step.codes) == 1
        if begins_step:
            self._end_step()
            self._last_thread_times = self.thread()
        else:
            self._account_until(mark_ns)
            self._add_thread_use(step.host_ns[-2], mark_ns)
        self.code = code
        self._accounted_until_ns = mark_ns
        # The clock is read last, so that the time of this method counts as our own.
        self._noted_ns = timeline.clock()

    def _add_thread_use(self, begin_ns: int, end_ns: int) -> None:
        """Add how long this thread ran and waited for a CPU since the last mark to the part that ran meanwhile."""
        before = self._last_thread_times
        now = self.thread()
        self._last_thread_times = now
        if before is None or now is None or len(self._steps) >= self.steps.timed:
            return
        self.other_threads_reader.sample_lines()
        use = self._use_of_phase[self.code]
        use.wall_ns += end_ns - begin_ns
        use.ran_ns += now.ran_ns - before.ran_ns
        use.no_cpu_ns += now.no_cpu_ns - before.no_cpu_ns

    def enter(self, owner: Owner) -> None:
        """Attribute the time from now on to ``owner``, whose action begins."""
        if self.timeline.is_in_step:
            self._account_until(self.timeline.clock())
            self._calls[owner] += 1
        self._running.append(owner)
        self._noted_ns = self.timeline.clock()

    def leave(self) -> None:
        """Attribute the time from now on to the action around the one that ends."""
        if self.timeline.is_in_step:
            self._account_until(self.timeline.clock())
        if len(self._running) > 1:  # otherwise the action began before this watch
            self._running.pop()
        self._noted_ns = self.timeline.clock()

    def _account_until(self, now_ns: int) -> None:
        """Add the time since the last call of this method to the owner of the innermost action.

        Up to ``_noted_ns`` this class itself ran, so that part of the time goes to ``_TIMING``.
        """
        is_outside_phases = self.code == tape.OTHER
        if is_outside_phases:
            owner = self._running[-1]
            self._ns[owner] += now_ns - self._noted_ns
            self._ns[_TIMING] += self._noted_ns - self._accounted_until_ns
        self._accounted_until_ns = now_ns

    def _end_step(self) -> None:
        """Keep the shares of the step that ended, if there was one; before the last step, begin to follow its lines."""
        had_step = bool(self._ns or self._calls)
        if not had_step and not self._steps:
            self.other_threads_reader.begin()
        if had_step:
            self._finished_steps += 1
            if len(self._steps) < self.steps.timed:
                self._steps.append(_StepShares(dict(self._ns), dict(self._calls)))
            if self._finished_steps == self.steps.timed:
                self._other_threads = self.other_threads_reader.result(len(self._steps))
            is_last_step_next = self._finished_steps == self.steps.before_lines
            if is_last_step_next and self.python_times is not None:
                self.python_times.start()
        self._ns.clear()
        self._calls.clear()

    def facts(self) -> dict[str, Any]:
        """Return what was measured, by the names of the fields of ``Measured``."""
        thread_use = self.thread_use()
        facts: dict[str, Any] = {
            "other_by_owner": self.shares(),
            "thread_use": thread_use,
            "other_threads": self._other_threads,
        }
        if self.python_times is not None:
            ran_s = {phase: use.ran_s for phase, use in thread_use.items()}
            facts["python_times"] = self.python_times.shares(ran_s)
            facts["outer_calls"] = self.python_times.outer_calls(ran_s)
            facts["data_calls"] = self.python_times.data_calls(ran_s)
            facts["slow_calls"] = self.python_times.slow_calls(ran_s)
            facts["large_results"] = self.python_times.large_results(ran_s)
            facts["repeated_results"] = self.python_times.repeated_results(ran_s)
        return facts

    def thread_use(self) -> dict[str, ThreadUse]:
        """Return the thread's times in each phase of a mean step; empty if the system does not report them."""
        ns_to_mean_s = 1e-9 / max(len(self._steps), 1)
        use_by_phase = {}
        for code, use in sorted(self._use_of_phase.items()):
            if code < len(PARTS):
                use_by_phase[PARTS[code]] = ThreadUse(
                    wall_s=use.wall_ns * ns_to_mean_s,
                    ran_s=use.ran_ns * ns_to_mean_s,
                    no_cpu_s=use.no_cpu_ns * ns_to_mean_s,
                )
        return use_by_phase

    def shares(self) -> OtherByOwner | None:
        """Return the time that each owner took in a mean step; None if no step has ended."""
        if not self.timeline.reading().is_step_running:
            self._end_step()
        if not self._steps:
            return None
        total_ns: defaultdict[Owner, int] = defaultdict(int)
        for step in self._steps:
            for owner, ns in step.ns.items():
                total_ns[owner] += ns
        longest_first = sorted(total_ns, key=lambda owner: (-total_ns[owner], owner))
        actions = [
            self._owned_time(owner) for owner in longest_first if total_ns[owner] > 0
        ]
        seconds = sum(total_ns.values()) * 1e-9 / len(self._steps)
        return OtherByOwner(steps=len(self._steps), seconds=seconds, actions=actions)

    def _owned_time(self, owner: Owner) -> OwnedTime:
        """Return the mean time of ``owner`` in a step, and the least that it would take.

        The least is its mean time if it took, in each step, only as long as in the fastest step at the same position of
        the pattern. Steps in which it does not run stay without it.
        """
        count = len(self._steps)
        calls = sum(step.calls.get(owner, 0) for step in self._steps)
        ns_of_steps = [step.ns.get(owner, 0) for step in self._steps]
        least_ns = 0
        period = self.steps.period
        for position in range(period):
            ns_at_position = [ns for ns in ns_of_steps[position::period] if ns > 0]
            if ns_at_position:
                least_ns += min(ns_at_position) * len(ns_at_position)
        return OwnedTime(
            owner=owner.class_name,
            action=owner.action,
            seconds=sum(ns_of_steps) * 1e-9 / count,
            calls=calls / count,
            in_steps=sum(ns > 0 for ns in ns_of_steps),
            least_s=least_ns * 1e-9 / count,
        )


@dataclass(eq=False, kw_only=True)
class OwnersInstrument(Instrument):
    """The instrument of the ``actions`` stage, which divides the time of ``other`` among its owners."""

    timeline: Timeline  # the timeline, whose marks show when ``other`` runs
    steps: ActionSteps
    name = "actions"
    stage = "actions"
    _owners: Owners | None = None

    def result(self) -> Mapping[str, Any]:
        """Stop measuring, and return the facts; empty if measuring did not start."""
        if self._owners is None:
            return {}
        self.discard()
        return self._owners.facts()

    def _follow_lines(
        self,
        owners: Owners,
        is_trained: Callable[[nn.Module], bool] | None = None,
        may_follow: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        """Make ``owners`` follow the program's Python in the last step of the stage.

        The other arguments are those of ``PythonTimes``.
        """
        owners.python_times = PythonTimes(
            lambda: owners.code,
            self.timeline.clock,
            guard=self.guard,
            is_trained=is_trained,
            may_follow=may_follow,
        )
        self._undo.callback(owners.python_times.stop)

    def plan_steps(self, step_s: Sequence[float], most_steps: float) -> int:
        """Plan enough steps to show a pattern in the measured seconds ``step_s``; return the planned number.

        If that takes more than ``most_steps``, the plan does not change.
        """
        steps = action_steps_of_pattern(self.steps.timed, step_s)
        if steps.planned <= most_steps:
            self.steps = steps
        return self.steps.planned

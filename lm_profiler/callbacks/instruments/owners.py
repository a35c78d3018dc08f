"""Divides the time that no phase covers among its owners.

Time is cut at the timeline's own marks, so the shares add up. The facts also contain the thread's time in each phase.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm_profiler.analysis.steps.step_model import fit
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.step_reader import ThreadTimes, thread_times
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    LIGHTNING,
    OURS,
    OtherByOwner,
    OwnedTime,
    ThreadUse,
)


class ActionSteps(NamedTuple):
    """The steps of the ``actions`` stage."""

    timed: int  # whose actions are timed by name: the first ones
    before_lines: int  # before the last one, in which the program's Python is followed line by line
    period: int = 1  # steps after which those that are timed repeat

    @property
    def planned(self) -> int:
        return self.before_lines + 1


_ALL_STEPS = ActionSteps(timed=1 << 30, before_lines=1 << 30)


def action_steps_of_pattern(steps: int, step_s: Sequence[float]) -> ActionSteps:
    """Return steps that show what makes some of the measured steps, of ``step_s``, slower than others.

    If they have a pattern, such as one slow step in five, whole periods of it are timed, of ``steps`` or more, and a
    slow step is followed line by line.
    """
    pattern = fit(step_s).pattern
    if pattern is None:
        return ActionSteps(steps, steps)
    timed = pattern.period * math.ceil(steps / pattern.period)
    slowest_phase = int(pattern.offsets.argmax())
    steps_until_slow = (slowest_phase - len(step_s) - timed) % pattern.period
    return ActionSteps(timed, timed + steps_until_slow, pattern.period)


class Owner(NamedTuple):
    """Whose time it is: the class whose code runs, and the action."""

    class_name: str
    action: str


LOOP = Owner(LIGHTNING, "loop")
_TIMING = Owner(OURS, "timing of these")


@dataclass
class _PhaseUse:
    """What the thread did in one phase, over all timed steps."""

    wall_ns: int = 0
    ran_ns: int = 0
    no_cpu_ns: int = 0


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
    guard: Guard = UNGUARDED  # guards what training calls here
    # the part of the step that runs now, as an index of ``PARTS``
    code: int = tape.OUTSIDE
    # the innermost action last
    _running: list[Owner] = field(default_factory=lambda: [LOOP])
    _accounted_until_ns: int = 0  # when time was last given to an action
    _noted_ns: int = 0  # when the method that did so ended: the time between the two is that of this watch
    # in the running step
    _ns: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    # in the running step
    _calls: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    # the finished steps that were timed, and the number of all that are finished
    _steps: list[_StepShares] = field(default_factory=list)
    _finished: int = 0
    _use_of_phase: defaultdict[int, _PhaseUse] = field(
        default_factory=lambda: defaultdict(_PhaseUse)
    )
    _last_thread_times: ThreadTimes | None = None

    def observe(self, code: int) -> None:
        """Note that ``code`` begins at the timeline's last mark."""
        timeline = self.timeline
        step = timeline.reading().step
        mark_ns = step.host_ns[-1]
        if len(step.codes) == 1:
            self._end_step()
            # Of the first step, too, whose batch is awaited from here on.
            self._last_thread_times = self.thread()
        else:
            self._account_until(mark_ns)
            self._add_thread_use(step.host_ns[-2], mark_ns)
        self.code = code
        self._accounted_until_ns = mark_ns
        # The clock is read last: what this method took is then counted as ours.
        self._noted_ns = timeline.clock()

    def _add_thread_use(self, begin_ns: int, end_ns: int) -> None:
        """Add what this thread ran and waited for a CPU since the last mark to the part that ran meanwhile."""
        before = self._last_thread_times
        now = self.thread()
        self._last_thread_times = now
        if before is None or now is None or len(self._steps) >= self.steps.timed:
            return
        use = self._use_of_phase[self.code]
        use.wall_ns += end_ns - begin_ns
        use.ran_ns += now.ran_ns - before.ran_ns
        use.no_cpu_ns += now.no_cpu_ns - before.no_cpu_ns

    def enter(self, owner: Owner) -> None:
        if self.timeline.is_in_step:
            self._account_until(self.timeline.clock())
            self._calls[owner] += 1
        self._running.append(owner)
        self._noted_ns = self.timeline.clock()

    def leave(self) -> None:
        if self.timeline.is_in_step:
            self._account_until(self.timeline.clock())
        if len(self._running) > 1:  # otherwise the action began before this watch
            self._running.pop()
        self._noted_ns = self.timeline.clock()

    def _account_until(self, now_ns: int) -> None:
        """Add the time since the last call of this method to the owner of the innermost action.

        Up to ``_noted_ns`` this class itself ran, to end that last call: this time goes to ``_TIMING``.
        """
        if self.code == tape.OTHER:
            self._ns[self._running[-1]] += now_ns - self._noted_ns
            self._ns[_TIMING] += self._noted_ns - self._accounted_until_ns
        self._accounted_until_ns = now_ns

    def _end_step(self) -> None:
        """Keep what the step had that ended, if there was one; before the last step, follow the thread's Python."""
        had_step = bool(self._ns or self._calls)
        if had_step:
            self._finished += 1
            if len(self._steps) < self.steps.timed:
                self._steps.append(_StepShares(dict(self._ns), dict(self._calls)))
            starts_lines = self._finished == self.steps.before_lines
            if starts_lines and self.python_times is not None:
                self.python_times.start()
        self._ns.clear()
        self._calls.clear()

    def facts(self) -> dict[str, Any]:
        """Return what was measured, by the names of the fields of ``Measured``."""
        thread_use = self.thread_use()
        facts: dict[str, Any] = {
            "other_by_owner": self.shares(),
            "thread_use": thread_use,
        }
        if self.python_times is not None:
            ran_s = {phase: use.ran_s for phase, use in thread_use.items()}
            facts["python_times"] = self.python_times.shares(ran_s)
            facts["outer_calls"] = self.python_times.outer_calls()
        return facts

    def thread_use(self) -> dict[str, ThreadUse]:
        """Return what the thread did in each phase of a mean step; empty if the system does not report it."""
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
        """Return the time that each owner took in a mean step, of the steps that ended; None if none ended."""
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
        """Return the mean time of ``owner`` in a step, and the least: each of its steps as short as the shortest."""
        count = len(self._steps)
        calls = sum(step.calls.get(owner, 0) for step in self._steps)
        ns_of_steps = [step.ns.get(owner, 0) for step in self._steps]
        least_ns = 0
        period = self.steps.period
        for phase in range(period):
            ns_where_it_ran = [ns for ns in ns_of_steps[phase::period] if ns > 0]
            if ns_where_it_ran:
                least_ns += min(ns_where_it_ran) * len(ns_where_it_ran)
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
    """The ``actions`` stage, which divides the time of ``other`` among its owners, in any kind of loop."""

    timeline: Timeline  # its marks tell when ``other`` runs
    steps: ActionSteps
    name = "actions"
    stage = "actions"
    _owners: Owners | None = None

    def result(self) -> Mapping[str, Any]:
        if self._owners is None:
            return {}
        self.discard()
        return self._owners.facts()

    def _follow_lines(self, owners: Owners) -> None:
        """Have ``owners`` follow the program's Python in the last step of the stage."""
        owners.python_times = PythonTimes(
            lambda: owners.code, self.timeline.clock, guard=self.guard
        )
        self._undo.callback(owners.python_times.stop)

    def plan_steps(self, step_s: Sequence[float], most_steps: float) -> int:
        """Plan as many steps as show a pattern of the measured steps, of ``step_s``, and return their number.

        The plan stays as it is if that takes more than ``most_steps``.
        """
        steps = action_steps_of_pattern(self.steps.timed, step_s)
        if steps.planned <= most_steps:
            self.steps = steps
        return self.steps.planned

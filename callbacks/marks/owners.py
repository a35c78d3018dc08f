"""Divides the time of ``other`` among the loop's actions, which run inside each other.

It is cut at the timeline's own marks, so the shares add up. Beside it stands for how long the thread ran in each phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from lm_profiler.callbacks.marks.python_time import PythonTimes
from lm_profiler.callbacks.marks.spans import Loop, Marked
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.step_reader import ThreadTimes, thread_times
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import LIGHTNING, OURS, OtherByOwner, OwnedTime, ThreadUse

Owner = tuple[str, str]  # the class whose code runs, and the action

LOOP: Owner = (LIGHTNING, "loop")
_TIMING: Owner = (OURS, "timing of these")


@dataclass(eq=False)
class Owners:
    """Divides the host's time that no phase covers among the actions that run meanwhile.

    Each action gets its own time, without that of actions inside it.
    """

    timeline: Timeline  # has ``observe`` among its observers
    timed: int = 1 << 30  # number of steps that are timed by action
    follow: PythonTimes | None = None  # starts to follow the thread's Python in the step after those
    # returns how long the thread ran and waited for a CPU by now; None is unknown
    thread: Callable[[], ThreadTimes | None] = thread_times
    part: Guard = UNGUARDED  # guards what training calls here
    _open: list[Owner] = field(default_factory=lambda: [LOOP])
    _code: int = at.OUTSIDE
    _cut_ns: int = 0
    _looked_ns: int = 0
    _ns: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    _calls: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    _steps: list[tuple[dict[Owner, int], dict[Owner, int]]] = field(default_factory=list)
    _use: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    _thread: ThreadTimes | None = None

    @property
    def code(self) -> int:
        """The part of the step that runs now, as an index of ``PARTS``."""
        return self._code

    def observe(self, code: int) -> None:
        """Note that ``code`` begins at the timeline's last mark."""
        timeline = self.timeline
        step = timeline.reading().step
        now_ns = step.host_ns[-1]
        if len(step.codes) == 1:
            self._step_begins()
        else:
            self._cut(now_ns)
            self._add_use(step.host_ns[-2], now_ns)
        # The clock is read last: what this method took is then counted as ours.
        self._code, self._cut_ns, self._looked_ns = code, now_ns, timeline.clock()

    def _add_use(self, began_ns: int, now_ns: int) -> None:
        before, now = self._thread, self.thread()
        self._thread = now
        if before is None or now is None or len(self._steps) >= self.timed:
            return
        use = self._use[self._code]
        use[0] += now_ns - began_ns
        use[1] += now.ran_ns - before.ran_ns
        use[2] += now.no_cpu_ns - before.no_cpu_ns

    def enter(self, owner: Owner) -> None:
        """Note that an action of ``owner`` begins."""
        if self.timeline.live:
            self._cut(self.timeline.clock())
            self._calls[owner] += 1
        self._open.append(owner)
        self._looked_ns = self.timeline.clock()

    def leave(self) -> None:
        """Note that the innermost action is over."""
        if self.timeline.live:
            self._cut(self.timeline.clock())
        if len(self._open) > 1:  # else the action had begun before this watch did
            self._open.pop()
        self._looked_ns = self.timeline.clock()

    def _cut(self, now_ns: int) -> None:
        """Add the time since the last cut to the innermost action, but for what this watch itself took."""
        if self._code == at.OTHER:
            self._ns[self._open[-1]] += now_ns - self._looked_ns
            self._ns[_TIMING] += self._looked_ns - self._cut_ns
        self._cut_ns = now_ns

    def _step_begins(self) -> None:
        """Close the books of the last step: a new one begins, or none follows."""
        if (self._ns or self._calls) and len(self._steps) < self.timed:
            self._steps.append((dict(self._ns), dict(self._calls)))
            if len(self._steps) == self.timed and self.follow is not None:
                self.follow.start()
        self._ns.clear()
        self._calls.clear()

    def thread_use(self) -> dict[str, ThreadUse]:
        """Return what the thread did in each phase of a mean step; empty where the system does not tell."""
        count = max(len(self._steps), 1) * 1e9
        return {
            PARTS[code]: ThreadUse(wall_s=wall / count, ran_s=ran / count, no_cpu_s=no_cpu / count)
            for code, (wall, ran, no_cpu) in sorted(self._use.items())
            if code < len(PARTS)
        }

    def shares(self) -> OtherByOwner | None:
        """Return the shares of a mean step, over the steps that ended; None where none did."""
        if not self.timeline.reading().running:
            self._step_begins()
        if not (count := len(self._steps)):
            return None
        owners = {owner for ns, _ in self._steps for owner in ns}
        totals = {owner: sum(ns.get(owner, 0) for ns, _ in self._steps) for owner in owners}
        actions = [
            OwnedTime(
                owner=owner[0],
                action=owner[1],
                seconds=total_ns * 1e-9 / count,
                calls=sum(calls.get(owner, 0) for _, calls in self._steps) / count,
                in_steps=len(own := [ns[owner] for ns, _ in self._steps if ns.get(owner, 0) > 0]),
                least_s=min(own) * len(own) * 1e-9 / count,
            )
            for owner, total_ns in sorted(totals.items(), key=lambda each: (-each[1], each[0]))
            if total_ns > 0
        ]
        return OtherByOwner(steps=count, seconds=sum(totals.values()) * 1e-9 / count, actions=actions)


@dataclass(eq=False)
class Owned(AbstractContextManager[None]):
    """The context of an action of ``owner``: around its ``span``, if it has one.

    Where the action ends a step, ``loop`` is told of that when it ends well.
    """

    owners: Owners
    owner: Owner
    span: Marked | None = None
    loop: Loop | None = None

    def __enter__(self) -> None:
        owners = self.owners
        owners.part.run(owners.enter, self.owner)
        if self.span is not None:
            owners.timeline.part.run(self.span.__enter__)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None and self.loop is not None:
            self.loop.step_done = True  # first, so that the step counts whatever fails below
        owners = self.owners
        if self.span is not None:
            owners.timeline.part.run(self.span.__exit__, kind, value, traceback)
        owners.part.run(owners.leave)

"""The ``actions`` stage: divides the time that no phase covers among the loop's actions, which run inside each other.

Time is cut at the timeline's own marks, so the shares add up. The facts also say how long the thread ran in each phase.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.callbacks.marks.actions import NOTHING, Epoch, Loop, Marked, OptimizerStep, candidates
from lm_profiler.callbacks.marks.namespaces import overrides
from lm_profiler.callbacks.marks.optimizers import bracket
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.lightning_names import LOGGING, SIGTERM_FLAG
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Span, Timeline
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.counts.step_reader import ThreadTimes, thread_times
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import LIGHTNING, OURS, OtherByOwner, OwnedTime, ThreadUse

Owner = tuple[str, str]  # the class whose code runs, and the action

LOOP: Owner = (LIGHTNING, "loop")
_TIMING: Owner = (OURS, "timing of these")
_EMPTY: Owner = (LIGHTNING, "empty hooks")
_LOGGED: Owner = (LIGHTNING, "logged metrics")

# matches ``[Owner]Class.hook``; a callback has its state key in place of the class
_BRACKETED = re.compile(r"(\[\w+\])(.*)\.(\w+)", re.DOTALL)

_SCHEDULER_HOOK = "lr_scheduler_step"

# Lightning's actions that belong to no hook
_LIGHTNINGS = ("run_training_batch", "run_training_epoch", "save_checkpoint")

# methods in which Lightning computes the metrics that ``self.log`` was given, and sends them between ranks
_CONNECTOR = ("on_batch_start", "on_batch_end", "update_train_step_metrics", "update_eval_step_metrics")


@dataclass(eq=False)
class OwnersWatch(Instrument):
    """Instrument that divides the time of ``other`` among the loop's actions."""

    trainer: Any  # the Trainer of the run
    timeline: Timeline  # its marks tell when ``other`` runs
    # returns what marks the actions of the Trainer's profiler; called once it does
    profiler: Callable[[], PhaseProfiler | None]
    callback: Callback  # ours, whose time is named separately
    steps: int  # number of steps that are timed by action; in one more, the program's lines are timed
    name = "actions"
    stage = "actions"
    _owners: Owners | None = None

    def start(self) -> None:
        if (profiler := self.profiler()) is None:
            return
        owners = self._owners = Owners(self.timeline, self.steps, part=self.part)
        if not is_compiled_in(self.trainer.lightning_module):  # a compiled step runs hardly any Python
            owners.follow = PythonTimes(lambda: owners.code, self.timeline.clock, part=self.part)
            self._undo.callback(owners.follow.stop)
        self.observe(self.timeline, owners.observe)
        for thing, name, owner in self._calls_without_action(profiler):
            # Another version may lack a method, or an object refuse attributes: its time is then the loop's.
            with suppress(AttributeError):
                bracket(thing, name, Owned(owners, owner), self.part, self._undo)
        self._undo.callback(profiler.surround, None)
        profiler.surround(self._owned_span)

    def result(self) -> Mapping[str, Any]:
        if (owners := self._owners) is None:
            return {}
        self.discard()
        thread_use = owners.thread_use()
        facts: dict[str, Any] = {"other_by_owner": owners.shares(), "thread_use": thread_use}
        if owners.follow is not None:
            facts["python_times"] = owners.follow.shares({phase: use.ran_s for phase, use in thread_use.items()})
        return facts

    def _owned_span(self, action_name: str, span: Marked) -> Marked:
        if isinstance(span, Epoch) or (isinstance(span, Span) and span._code != at.OTHER):
            return span  # phases keep their own time, and an epoch takes none within a step
        assert self._owners is not None
        owner = self.part.run(owner_of, action_name, self.trainer, self.callback)
        if owner is None:
            return span
        loop = span.loop if isinstance(span, OptimizerStep) else None
        return Owned(self._owners, owner, None if span is NOTHING else span, loop)

    def _calls_without_action(self, profiler: PhaseProfiler) -> Iterator[tuple[Any, str, Owner]]:
        """Yield objects, methods and owners of what Lightning calls without an action around it."""
        trainer = self.trainer
        for name in _CONNECTOR:
            yield LOGGING.get_or(trainer), name, _LOGGED
        loop = getattr(trainer.fit_loop, "epoch_loop", None)
        yield loop, SIGTERM_FLAG.name, (LIGHTNING, "SIGTERM flag")
        yield loop, "update_lr_schedulers", (LIGHTNING, "learning-rate schedulers")
        for logger in trainer.loggers:
            for name in ("log_metrics", "save"):
                yield logger, name, (type(logger).__name__, name)
        if profiler.users is not None:
            class_name = type(trainer.profiler).__name__
            for name in ("start", "stop"):
                yield profiler.users, name, (class_name, name)


def owner_of(action_name: str, trainer: Any, callback: Callback) -> Owner:
    """Return the class whose code runs in an action, and its hook; ``callback`` is ours."""
    bracketed = _BRACKETED.fullmatch(action_name)
    if bracketed is None:
        return (LIGHTNING if action_name in _LIGHTNINGS else "", action_name)
    kind, _, hook = bracketed.groups()
    owners_of_hook = candidates(trainer, kind, action_name, hook)
    if any(owner is callback for owner in owners_of_hook):
        return (OURS, hook)
    if not any(overrides(owner, hook) for owner in owners_of_hook):
        if hook == _SCHEDULER_HOOK:  # what takes time there is the scheduler, and the functions that it calls
            return (_scheduler_name(trainer), "step")
        return _EMPTY if hook.startswith("on_") else (LIGHTNING, hook)
    return (type(owners_of_hook[0]).__name__, hook)


def _scheduler_name(trainer: Any) -> str:
    """Return the class of the learning-rate scheduler, or the classes of several."""
    names: list[str] = []
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        if name not in names:
            names.append(name)
    return "/".join(names) or LIGHTNING


@dataclass(eq=False)
class Owners:
    """Divides the host's time that no phase covers among actions: each gets its own time, without inner actions."""

    timeline: Timeline  # has ``observe`` among its observers
    timed: int = 1 << 30  # number of steps that are timed by action
    follow: PythonTimes | None = None  # starts to follow the thread's Python in the step after those
    # returns how long the thread ran and waited for a CPU by now; None is unknown
    thread: Callable[[], ThreadTimes | None] = thread_times
    part: Guard = UNGUARDED  # guards what training calls here
    code: int = at.OUTSIDE  # the part of the step that runs now, as an index of ``PARTS``
    _open: list[Owner] = field(default_factory=lambda: [LOOP])
    _cut_ns: int = 0
    _looked_ns: int = 0
    _ns: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    _calls: defaultdict[Owner, int] = field(default_factory=lambda: defaultdict(int))
    _steps: list[tuple[dict[Owner, int], dict[Owner, int]]] = field(default_factory=list)
    _use: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    _thread: ThreadTimes | None = None

    def observe(self, code: int) -> None:
        """Note that ``code`` begins at the timeline's last mark."""
        timeline = self.timeline
        step = timeline.reading().step
        now_ns = step.host_ns[-1]
        if len(step.codes) == 1:
            self._step_begins()
            self._thread = self.thread()  # of the first step, too, whose batch is awaited from here on
        else:
            self._cut(now_ns)
            self._add_use(step.host_ns[-2], now_ns)
        # The clock is read last: what this method took is then counted as ours.
        self.code, self._cut_ns, self._looked_ns = code, now_ns, timeline.clock()

    def _add_use(self, began_ns: int, now_ns: int) -> None:
        before, now = self._thread, self.thread()
        self._thread = now
        if before is None or now is None or len(self._steps) >= self.timed:
            return
        use = self._use[self.code]
        use[0] += now_ns - began_ns
        use[1] += now.ran_ns - before.ran_ns
        use[2] += now.no_cpu_ns - before.no_cpu_ns

    def enter(self, owner: Owner) -> None:
        if self.timeline.live:
            self._cut(self.timeline.clock())
            self._calls[owner] += 1
        self._open.append(owner)
        self._looked_ns = self.timeline.clock()

    def leave(self) -> None:
        if self.timeline.live:
            self._cut(self.timeline.clock())
        if len(self._open) > 1:  # otherwise the action began before this watch
            self._open.pop()
        self._looked_ns = self.timeline.clock()

    def _cut(self, now_ns: int) -> None:
        """Add the time since the last cut to the innermost action, except the time that this watch took."""
        if self.code == at.OTHER:
            self._ns[self._open[-1]] += now_ns - self._looked_ns
            self._ns[_TIMING] += self._looked_ns - self._cut_ns
        self._cut_ns = now_ns

    def _step_begins(self) -> None:
        """Finish the last step: a new one begins, or none follows."""
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
    """The context of an action of ``owner``: around its ``span``, if it has one."""

    owners: Owners
    owner: Owner
    span: Marked | None = None
    loop: Loop | None = None  # where the action ends a step

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

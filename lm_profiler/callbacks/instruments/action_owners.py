"""The ``actions`` stage: divides the time that no phase covers among the loop's actions, which run inside each other.

Time is cut at the timeline's own marks, so the shares add up. The facts also contain the thread's time in each phase.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning.pytorch import Callback

from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.callbacks.marks.actions import (
    NOTHING,
    Epoch,
    Loop,
    Marked,
    OptimizerStep,
    candidates,
)
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
from lm_profiler.record.run_record import (
    LIGHTNING,
    OURS,
    OtherByOwner,
    OwnedTime,
    ThreadUse,
)


class Owner(NamedTuple):
    """Whose time it is: the class whose code runs, and the action."""

    class_name: str
    action: str


LOOP = Owner(LIGHTNING, "loop")
_TIMING = Owner(OURS, "timing of these")
_EMPTY_HOOKS = Owner(LIGHTNING, "empty hooks")
_LOGGED_METRICS = Owner(LIGHTNING, "logged metrics")

# matches ``[Owner]Class.hook``; a callback has its state key in place of the class
_HOOK_ACTION = re.compile(r"(\[\w+\])(.*)\.(\w+)", re.DOTALL)

_SCHEDULER_HOOK = "lr_scheduler_step"

# Lightning's actions that belong to no hook
_LIGHTNING_ACTIONS = ("run_training_batch", "run_training_epoch", "save_checkpoint")

# methods in which Lightning computes the metrics that ``self.log`` was given, and sends them between ranks
_METRIC_METHODS = (
    "on_batch_start",
    "on_batch_end",
    "update_train_step_metrics",
    "update_eval_step_metrics",
)


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
        profiler = self.profiler()
        if profiler is None:
            return
        owners = Owners(self.timeline, self.steps, part=self.part)
        self._owners = owners
        if not is_compiled_in(
            self.trainer.lightning_module
        ):  # a compiled step runs hardly any Python
            owners.python_times = PythonTimes(
                lambda: owners.code, self.timeline.clock, part=self.part
            )
            self._undo.callback(owners.python_times.stop)
        self.observe(self.timeline, owners.observe)
        for call in self._calls_without_action(profiler):
            # Another version may lack a method, or an object refuse attributes: its time is then the loop's.
            with suppress(AttributeError):
                bracket(
                    call.receiver,
                    call.method,
                    OwnedSpan(owners, call.owner),
                    self.part,
                    self._undo,
                )
        self._undo.callback(profiler.surround, None)
        profiler.surround(self._owned_span)

    def result(self) -> Mapping[str, Any]:
        owners = self._owners
        if owners is None:
            return {}
        self.discard()
        thread_use = owners.thread_use()
        facts: dict[str, Any] = {
            "other_by_owner": owners.shares(),
            "thread_use": thread_use,
        }
        if owners.python_times is not None:
            ran_s = {phase: use.ran_s for phase, use in thread_use.items()}
            facts["python_times"] = owners.python_times.shares(ran_s)
        return facts

    def _owned_span(self, action_name: str, span: Marked) -> Marked:
        is_phase = isinstance(span, Span) and span._code != at.OTHER
        if is_phase or isinstance(span, Epoch):
            return span  # phases keep their own time, and an epoch takes none within a step
        assert self._owners is not None
        owner = self.part.run(owner_of, action_name, self.trainer, self.callback)
        if owner is None:
            return span
        inner_span = None if span is NOTHING else span
        loop = span.loop if isinstance(span, OptimizerStep) else None
        return OwnedSpan(self._owners, owner, inner_span, loop)

    def _calls_without_action(self, profiler: PhaseProfiler) -> Iterator[_OwnedCall]:
        """Yield what Lightning calls without an action around it."""
        trainer = self.trainer
        for method in _METRIC_METHODS:
            yield _OwnedCall(LOGGING.get_or(trainer), method, _LOGGED_METRICS)
        loop = getattr(trainer.fit_loop, "epoch_loop", None)
        yield _OwnedCall(loop, SIGTERM_FLAG.name, Owner(LIGHTNING, "SIGTERM flag"))
        yield _OwnedCall(
            loop, "update_lr_schedulers", Owner(LIGHTNING, "learning-rate schedulers")
        )
        for logger in trainer.loggers:
            for method in ("log_metrics", "save"):
                yield _OwnedCall(logger, method, Owner(type(logger).__name__, method))
        if profiler.users is not None:
            for method in ("start", "stop"):
                yield _OwnedCall(
                    profiler.users,
                    method,
                    Owner(type(trainer.profiler).__name__, method),
                )


class _OwnedCall(NamedTuple):
    """A method whose calls belong to an owner."""

    receiver: object
    method: str
    owner: Owner


def owner_of(action_name: str, trainer: Any, callback: Callback) -> Owner:
    """Return the class whose code runs in an action, and its hook; ``callback`` is ours."""
    match = _HOOK_ACTION.fullmatch(action_name)
    if match is None:
        class_name = LIGHTNING if action_name in _LIGHTNING_ACTIONS else ""
        return Owner(class_name, action_name)
    kind, _, hook = match.groups()
    owners_of_hook = candidates(trainer, kind, action_name, hook)
    if any(owner is callback for owner in owners_of_hook):
        return Owner(OURS, hook)
    if any(overrides(owner, hook) for owner in owners_of_hook):
        return Owner(type(owners_of_hook[0]).__name__, hook)
    if (
        hook == _SCHEDULER_HOOK
    ):  # what takes time there is the scheduler, and the functions that it calls
        return Owner(_scheduler_name(trainer), "step")
    if hook.startswith("on_"):
        return _EMPTY_HOOKS
    return Owner(LIGHTNING, hook)


def _scheduler_name(trainer: Any) -> str:
    """Return the class of the learning-rate scheduler, or the classes of several."""
    names: list[str] = []
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        if name not in names:
            names.append(name)
    return "/".join(names) or LIGHTNING


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
    most_steps: int = 1 << 30  # number of steps that are timed by action
    python_times: PythonTimes | None = (
        None  # starts to follow the thread's Python in the step after those
    )
    # returns how long the thread ran and waited for a CPU by now; None is unknown
    thread: Callable[[], ThreadTimes | None] = thread_times
    part: Guard = UNGUARDED  # guards what training calls here
    code: int = (
        at.OUTSIDE
    )  # the part of the step that runs now, as an index of ``PARTS``
    _running: list[Owner] = field(
        default_factory=lambda: [LOOP]
    )  # the innermost action last
    _cut_ns: int = 0  # when time was last given to an action
    _noted_ns: int = 0  # when the method that did so ended: the time between the two is that of this watch
    _ns: defaultdict[Owner, int] = field(
        default_factory=lambda: defaultdict(int)
    )  # in the running step
    _calls: defaultdict[Owner, int] = field(
        default_factory=lambda: defaultdict(int)
    )  # in the running step
    _steps: list[_StepShares] = field(default_factory=list)  # the finished steps
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
            self._cut(mark_ns)
            self._add_thread_use(step.host_ns[-2], mark_ns)
        self.code = code
        self._cut_ns = mark_ns
        # The clock is read last: what this method took is then counted as ours.
        self._noted_ns = timeline.clock()

    def _add_thread_use(self, begin_ns: int, end_ns: int) -> None:
        before = self._last_thread_times
        now = self.thread()
        self._last_thread_times = now
        if before is None or now is None or len(self._steps) >= self.most_steps:
            return
        use = self._use_of_phase[self.code]
        use.wall_ns += end_ns - begin_ns
        use.ran_ns += now.ran_ns - before.ran_ns
        use.no_cpu_ns += now.no_cpu_ns - before.no_cpu_ns

    def enter(self, owner: Owner) -> None:
        if self.timeline.live:
            self._cut(self.timeline.clock())
            self._calls[owner] += 1
        self._running.append(owner)
        self._noted_ns = self.timeline.clock()

    def leave(self) -> None:
        if self.timeline.live:
            self._cut(self.timeline.clock())
        if len(self._running) > 1:  # otherwise the action began before this watch
            self._running.pop()
        self._noted_ns = self.timeline.clock()

    def _cut(self, now_ns: int) -> None:
        """Add the time since the last cut to the innermost action, except the time that this watch took."""
        if self.code == at.OTHER:
            self._ns[self._running[-1]] += now_ns - self._noted_ns
            self._ns[_TIMING] += self._noted_ns - self._cut_ns
        self._cut_ns = now_ns

    def _end_step(self) -> None:
        """Keep what the step had that ended, if there was one; after the last one, follow the thread's Python."""
        had_step = bool(self._ns or self._calls)
        if had_step and len(self._steps) < self.most_steps:
            self._steps.append(_StepShares(dict(self._ns), dict(self._calls)))
            if len(self._steps) == self.most_steps and self.python_times is not None:
                self.python_times.start()
        self._ns.clear()
        self._calls.clear()

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
        """Return the shares of a mean step, over the steps that ended; None if none did."""
        if not self.timeline.reading().running:
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
        count = len(self._steps)
        calls = sum(step.calls.get(owner, 0) for step in self._steps)
        ns_of_steps = [step.ns.get(owner, 0) for step in self._steps]
        ns_where_it_ran = [ns for ns in ns_of_steps if ns > 0]
        return OwnedTime(
            owner=owner.class_name,
            action=owner.action,
            seconds=sum(ns_of_steps) * 1e-9 / count,
            calls=calls / count,
            in_steps=len(ns_where_it_ran),
            least_s=min(ns_where_it_ran) * len(ns_where_it_ran) * 1e-9 / count,
        )


@dataclass(eq=False)
class OwnedSpan(AbstractContextManager[None]):
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
            self.loop.step_done = (
                True  # set before anything that may fail, so that the step counts
            )
        owners = self.owners
        if self.span is not None:
            owners.timeline.part.run(self.span.__exit__, kind, value, traceback)
        owners.part.run(owners.leave)

"""The ``actions`` stage of a Trainer: divides the time that no phase covers among its actions, which are nested.

An action is a call that Lightning reports to the Trainer's profiler by a name, such as a hook of a callback. Its owner
is the class whose code runs in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.pytorch import Callback

from lm_profiler.callbacks.instruments.owners import Owner, Owners, OwnersInstrument
from lm_profiler.callbacks.marks.actions import (
    NOTHING,
    Epoch,
    LoopEvents,
    Marked,
    OptimizerStep,
    candidate_owners,
)
from lm_profiler.callbacks.marks.namespaces import overrides
from lm_profiler.callbacks.marks.optimizers import wrap_in_context
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.lightning_names import LOGGING, SIGTERM_FLAG
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Span
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.record.run_record import LIGHTNING, OURS

_EMPTY_HOOKS = Owner(LIGHTNING, "empty hooks")
_LOGGED_METRICS = Owner(LIGHTNING, "logged metrics")

# matches ``[Owner]Class.hook``; for a callback its state key stands in place of the class
_HOOK_ACTION = re.compile(r"(\[\w+\])(.*)\.(\w+)", re.DOTALL)

_SCHEDULER_HOOK = "lr_scheduler_step"

# Lightning's actions that belong to no hook
_LIGHTNING_ACTIONS = ("run_training_batch", "run_training_epoch", "save_checkpoint")

# methods in which Lightning computes the metrics passed to ``self.log``, and exchanges them between ranks
_METRIC_METHODS = (
    "on_batch_start",
    "on_batch_end",
    "update_train_step_metrics",
    "update_eval_step_metrics",
)


@dataclass(eq=False, kw_only=True)
class OwnersWatch(OwnersInstrument):
    """Instrument that divides the time of ``other`` among the loop's actions."""

    trainer: Any  # the Trainer of the run
    # returns the marker of the Trainer's actions; called when it is installed
    profiler: Callable[[], PhaseProfiler | None]
    callback: Callback | None  # our own callback, whose time is named separately

    def start(self) -> None:
        """Make all actions of the Trainer, and its methods without an action, enter the span of their owner."""
        profiler = self.profiler()
        if profiler is None:
            return
        owners = Owners(self.timeline, self.steps, guard=self.guard)
        self._owners = owners
        if not is_compiled_in(self.trainer.lightning_module):
            self._follow_lines(owners)  # a compiled step would run hardly any Python
        self.observe(self.timeline, owners.observe)
        for call in self._calls_without_action(profiler):
            # If this version lacks a method, or an object refuses attributes, the time of the method is the loop's.
            with suppress(AttributeError):
                wrap_in_context(
                    call.receiver,
                    call.method,
                    OwnedSpan(owners, call.owner),
                    self.guard,
                    self._undo,
                )
        self._undo.callback(profiler.surround, None)
        profiler.surround(self._owned_span)

    def _owned_span(self, action_name: str, span: Marked) -> Marked:
        """Return the span of an action, around which its time is attributed to its owner.

        ``span`` is the one that the action has without this instrument. The span of a phase is returned
        unchanged, because only the time that no phase covers is divided among owners.
        """
        is_phase = isinstance(span, Span) and span._code != tape.OTHER
        # An epoch takes no time within a step.
        if is_phase or isinstance(span, Epoch):
            return span
        assert self._owners is not None
        owner = self.guard.run(owner_of, action_name, self.trainer, self.callback)
        if owner is None:  # the guard has handled an error
            return span
        inner_span = None if span is NOTHING else span
        loop = span.loop if isinstance(span, OptimizerStep) else None
        return OwnedSpan(self._owners, owner, inner_span, loop)

    def _calls_without_action(self, profiler: PhaseProfiler) -> Iterator[_OwnedCall]:
        """Yield the methods that Lightning calls without an action around them, each with the owner of its time.

        The receiver is None if this Trainer lacks the object; None has no such method, so the caller skips it.
        """
        trainer = self.trainer
        for method in _METRIC_METHODS:
            yield _OwnedCall(
                receiver=LOGGING.get_or(trainer), method=method, owner=_LOGGED_METRICS
            )
        loop = getattr(trainer.fit_loop, "epoch_loop", None)
        # In this method the ranks share whether one of them has received SIGTERM.
        yield _OwnedCall(
            receiver=loop,
            method=SIGTERM_FLAG.name,
            owner=Owner(LIGHTNING, "SIGTERM flag"),
        )
        yield _OwnedCall(
            receiver=loop,
            method="update_lr_schedulers",
            owner=Owner(LIGHTNING, "learning-rate schedulers"),
        )
        for logger in trainer.loggers:
            for method in ("log_metrics", "save"):
                yield _OwnedCall(
                    receiver=logger,
                    method=method,
                    owner=Owner(type(logger).__name__, method),
                )
        user_has_profiler = profiler.users_methods is not None
        if user_has_profiler:
            for method in ("start", "stop"):
                yield _OwnedCall(
                    receiver=profiler.users_methods,
                    method=method,
                    owner=Owner(type(trainer.profiler).__name__, method),
                )


class _OwnedCall(NamedTuple):
    """A method whose calls belong to an owner."""

    receiver: object
    method: str
    owner: Owner


def owner_of(action_name: str, trainer: Any, callback: Callback | None) -> Owner:
    """Return the owner of an action: the class whose code runs in it, and its hook; ``callback`` is our own."""
    match = _HOOK_ACTION.fullmatch(action_name)
    if match is None:
        class_name = LIGHTNING if action_name in _LIGHTNING_ACTIONS else ""
        return Owner(class_name, action_name)
    kind, _, hook = match.groups()
    owners_of_hook = candidate_owners(trainer, kind, action_name, hook)
    if any(owner is callback for owner in owners_of_hook):
        return Owner(OURS, hook)
    if any(overrides(owner, hook) for owner in owners_of_hook):
        return Owner(type(owners_of_hook[0]).__name__, hook)
    if hook == _SCHEDULER_HOOK:
        # The time is that of the scheduler and of the functions that it calls.
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


@dataclass(eq=False)
class OwnedSpan(AbstractContextManager[None]):
    """The context of an action, which attributes its time to ``owner``, around its own ``span`` if it has one."""

    owners: Owners
    owner: Owner
    span: Marked | None = None
    loop: LoopEvents | None = None  # set if the action ends a step

    def __enter__(self) -> None:
        """Attribute the time from now on to the owner, and enter the action's own span."""
        owners = self.owners
        owners.guard.run(owners.enter, self.owner)
        if self.span is not None:
            owners.timeline.guard.run(self.span.__enter__)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Leave the action's own span, and attribute the time from now on to the action around it."""
        if kind is None and self.loop is not None:
            # set before anything that may fail, so that the step counts
            self.loop.is_step_done = True
        owners = self.owners
        if self.span is not None:
            owners.timeline.guard.run(self.span.__exit__, kind, value, traceback)
        owners.guard.run(owners.leave)

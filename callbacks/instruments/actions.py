"""The ``actions`` stage: which action of the loop takes the time that no phase covers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback

from lm_profiler.callbacks.marks.actions import candidates
from lm_profiler.callbacks.marks.methods import bracket
from lm_profiler.callbacks.marks.owners import Owned, Owner, Owners
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.marks.python_time import PythonTimes
from lm_profiler.callbacks.marks.spans import NOTHING, Died, Done, Epoch, Marked, OptimizerStep
from lm_profiler.callbacks.namespaces import is_exactly, overrides
from lm_profiler.lightning_names import LOGGING, SIGTERM_FLAG
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Span, Timeline
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.record.run import LIGHTNING, OURS
from lm_profiler.usage_error import expect


@dataclass(frozen=True, kw_only=True)
class ActionsOptions:
    """Whose the time is that no phase covers.

    Args:
        steps: Steps after the measured ones in which every action of the loop is timed by name; they are in no other
            figure. What happens every 50th step, such as logging, is seen in 50 steps. With 0 nobody's is known. One
            step more follows the program's Python by its lines.
    """

    steps: int = 3

    def __post_init__(self) -> None:
        expect(self.steps >= 0, "actions.steps", "0 or more", self.steps)


# matches ``[Owner]Class.hook``; for a callback, its state key stands in the place of the class
_BRACKETED = re.compile(r"(\[\w+\])(.*)\.(\w+)", re.DOTALL)

# Lightning's actions that belong to no hook
_LIGHTNINGS = ("run_training_batch", "run_training_epoch", "save_checkpoint")

_EMPTY: Owner = (LIGHTNING, "empty hooks")
_LOGGED: Owner = (LIGHTNING, "logged metrics")
# methods in which Lightning computes the metrics that ``self.log`` was given, and sends them between ranks
_CONNECTOR = ("on_batch_start", "on_batch_end", "update_train_step_metrics", "update_eval_step_metrics")


@dataclass(eq=False)
class OwnersWatch:
    """Instrument that divides the time of ``other`` among the loop's actions, in the ``actions`` stage."""

    trainer: Any  # the run's
    timeline: Timeline  # its marks tell when ``other`` runs
    # returns the one that stands in for the Trainer's; called once that is so
    profiler: Callable[[], PhaseProfiler | None]
    callback: Callback  # ours, whose time is named apart
    user: object  # the profiler that the Trainer had
    steps: int  # number of steps that are timed by action; in one more, the program's lines are timed
    part: Guard = UNGUARDED
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = "actions"
    _owners: Owners | None = None
    _undo: ExitStack = field(default_factory=ExitStack)

    def begin(self, stage: str) -> None:
        profiler = self.profiler()
        if stage != "actions" or profiler is None:
            return
        owners = self._owners = Owners(self.timeline, self.steps, part=self.part)
        if not is_compiled_in(self.trainer.lightning_module):  # a compiled step runs hardly any Python
            owners.follow = PythonTimes(lambda: owners.code, self.timeline.clock, part=self.part)
            self._undo.callback(owners.follow.stop)
        observe = self.part.guard(owners.observe)
        self._undo.callback(self.timeline.unobserve, observe)
        self.timeline.observers += (observe,)
        for thing, name, owner in self._calls_without_action():
            # Another version may lack a method, or an object refuse attributes: its time is then the loop's.
            with suppress(AttributeError):
                bracket(thing, name, Owned(owners, owner), self.part, self._undo)
        self._undo.callback(profiler.surround, None)
        profiler.surround(self._owned_span)

    def end(self, stage: str) -> None:
        if stage == "actions" and self._owners is not None:
            self.discard()
            owners = self._owners
            self.facts |= {"other_by_owner": owners.shares(), "thread_use": owners.thread_use()}
            if owners.follow is not None:
                self.facts["python_times"] = owners.follow.shares()

    def discard(self) -> None:
        self._undo.close()

    def _owned_span(self, action_name: str, span: Marked) -> Marked:
        if isinstance(span, (Epoch, Died)) or (isinstance(span, Span) and span._code != at.OTHER):
            return span  # phases keep their own time, and these two take none within a step
        assert self._owners is not None
        owner = self.part.run(owner_of, action_name, self.trainer, self.callback)
        if owner is None:
            return span
        loop = span.loop if isinstance(span, (Done, OptimizerStep)) else None
        return Owned(self._owners, owner, None if span is NOTHING else span, loop)

    def _calls_without_action(self) -> Iterator[tuple[Any, str, Owner]]:
        """Yield objects, methods and owners of what Lightning calls without an action around it."""
        trainer = self.trainer
        for name in _CONNECTOR:
            yield LOGGING.of_or(trainer), name, _LOGGED
        loop = getattr(trainer.fit_loop, "epoch_loop", None)
        yield loop, SIGTERM_FLAG.name, (LIGHTNING, "SIGTERM flag")
        yield loop, "update_lr_schedulers", (LIGHTNING, "learning-rate schedulers")
        for logger in trainer.loggers:
            for name in ("log_metrics", "save"):
                yield logger, name, (type(logger).__name__, name)
        if not is_exactly(self.user, "PassThroughProfiler"):
            for name in ("start", "stop"):
                yield self.user, name, (type(self.user).__name__, name)


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
        return _EMPTY if hook.startswith("on_") else (LIGHTNING, hook)
    return (type(owners_of_hook[0]).__name__, hook)

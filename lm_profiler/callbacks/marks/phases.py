"""Marks the phases, from Lightning's own profiler actions.

Lightning wraps every action of its loops in ``trainer.profiler``. ``PhaseProfiler`` takes that place for the run, turns
actions that begin or end a phase into marks, and passes all of them on to the profiler that the user configured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.profilers import Profiler

from lm_profiler.analysis.watch.ledger import EPOCH
from lm_profiler.callbacks.marks.actions import NOTHING, Actions, Both
from lm_profiler.callbacks.marks.namespaces import is_exactly, verb_of
from lm_profiler.callbacks.marks.optimizers import OptimizerMarks
from lm_profiler.lightning_names import FETCHED, STEPPED, fetch_action
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline

_DRY = 1000  # after this many steps' worth of batches without a step, the loader has nothing to train on


@dataclass(eq=False, repr=False)
class PhaseProfiler(Profiler):
    """Stands in for ``trainer.profiler`` until ``restore``, and marks at the optimizers of a fit.

    It counts the steps by itself and ends the loop, even if the instruments fail. ``batch_ended`` must be
    called until ``is_sure``, which the first step makes true: it notices where Lightning's actions have other names.
    """

    trainer: Any  # its profiler is forwarded to. Lightning sets some of its attributes where no type checker looks
    timeline: Timeline  # takes the marks
    left: int  # steps until the stages are done
    step_ended: Callable[[], int]  # called between a step and the next; returns how many are left
    # whose run this is; while the Trainer does not have it (a Tuner tries a learning rate), nothing is marked
    callback: object
    # returns the other ranks' count of steps left, given this rank's, where the instruments failed; does not raise
    follow: Callable[[int], int] = lambda left: left
    done: Callable[[], object] = lambda: None  # called when none is left; does not raise
    ends: bool = False  # whether the loop ends then: StopIteration looks like the end of its data
    idle: Callable[[str], object] = lambda what: None  # is told what had no step, where the loop would never end
    step_done: bool = False
    is_sure: bool = False
    cut: bool = False
    _aside: bool = False
    _without_step: int = 0
    _fetched: bool = False
    _in_epoch: bool = False
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        super().__init__()
        trainer = self.trainer
        self._wrapped: Profiler = trainer.profiler
        self._user = None if is_exactly(self._wrapped, "PassThroughProfiler") else self._wrapped
        self._part = self.timeline.part
        self._left_before, self._steps_before = self.left, trainer.global_step
        verb = verb_of(trainer)
        self._fetch = fetch_action(trainer, verb)
        self._fitting = verb == "fit"
        self._automatic = self._fitting and trainer.lightning_module.automatic_optimization
        self._spans = Actions(trainer, self.timeline, self)
        self.surround = self._spans.surround
        if self._user is None:
            # Called thirty times a step: a built-in method saves ten microseconds of Python frames.
            self.profile = self._spans.__getitem__  # type: ignore[method-assign,assignment]

    def __del__(self) -> None:
        """Do nothing: Lightning's own method fails if the constructor raised."""

    def __reduce__(self) -> Any:
        return copy, (self._wrapped,)  # a copy of the Trainer gets a copy of the user's profiler

    def mark_optimizers(self) -> None:
        if self._fitting:
            OptimizerMarks(self.timeline, self._undo).attach(self.trainer, self.trainer.lightning_module)

    def restore(self) -> None:
        """Give the Trainer the user's profiler back, and leave its optimizers."""
        if self.trainer.profiler is self:
            self.trainer.profiler = self._wrapped
        self._undo.close()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        # Reached only with a profiler of the user's: see __init__.
        span, user = self._spans[action_name], self._wrapped.profile(action_name)
        return user if span is NOTHING else Both(user, span)

    def count_only(self) -> None:
        """Take no more marks, but still count steps, and end the loop where it would have ended."""
        self.timeline.stop()
        self._spans.surround(None)
        self._undo.close()  # otherwise its hooks mark a timeline that nobody reads

    def start(self, action_name: str) -> None:
        if self._user is not None:  # before our mark, so that its cost is in no phase that begins here
            self._user.start(action_name)
        if action_name != self._fetch:
            return
        timeline = self.timeline
        self._fetched = True
        if not self.step_done:
            self._without_step += 1
            if self._without_step > _DRY * self.trainer.accumulate_grad_batches and self._is_endless():
                self.cut = True
                self._part.run(self.idle, f"{self._without_step:,} batches in a row")
                raise StopIteration
        elif self.left > 0:
            # Guard.run and close_step, written out: three frames fewer per step.
            self.step_done = False
            self.is_sure = True
            self._without_step = 0
            part, left = self._part, self.left - 1
            if not part.out:
                try:
                    timeline.note((at.END, timeline.clock()))
                    left = self.step_ended()
                except BaseException as error:
                    part.failed(error)
            self.left = self.follow(left) if part.out else left
            if self.left <= 0:
                self.done()
                if self.ends:
                    self.cut = True
                    try:
                        self._leave()
                    except BaseException as error:
                        self._part.failed(error)
                    raise StopIteration
                if not isinstance(successor := self.trainer.profiler, PhaseProfiler):
                    return
                timeline = successor.timeline  # this batch is the first of a run that is watched from here on
        try:
            timeline.note((at.DATA, timeline.clock()))
        except BaseException as error:
            timeline.part.failed(error)

    def stop(self, action_name: str) -> None:
        timeline = self.timeline
        try:
            if action_name == self._fetch:
                timeline.note((at.LEAVE, timeline.clock()))
        except BaseException as error:
            self._part.failed(error)
        if self._user is not None:  # after our mark, for the same reason
            self._user.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        # All other attributes of trainer.profiler are those of the user's profiler.
        if name.startswith("__") or "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def close_step(self) -> None:
        """End the step if it is done, as the loop is left; otherwise the step waits until the loop resumes."""
        if self.left <= 0:
            return  # the stages ended within this step, for example where it asks for its batch itself
        if self.step_done:
            self.step_done = False
            self.is_sure = True
            self._without_step = 0
            self.left = self._part.run(self._end_step, otherwise=self.left - 1)
            if self._part.out:
                self.left = self.follow(self.left)
            if self.left <= 0:
                self.done()
                if self.ends and self._fitting:  # the epoch ends too, in the usual way
                    self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step
        else:
            self.timeline.go_outside()

    def batch_ended(self) -> bool:
        """Give up if no action of Lightning's came although a batch is over; returns whether the loop must end.

        Without the actions no step would ever be counted, and the loop would not end.
        """
        stepped = self.trainer.global_step > self._steps_before if self._automatic else True
        absent = FETCHED if not self._fetched else STEPPED if stepped and not self.step_done else None
        if absent is None or self.left <= 0:
            return False
        self.is_sure, self.left = True, 0
        self._part.failed(absent.missing())
        self.done()
        if self.ends:
            self.cut = True
            self._leave()
        return self.ends

    def _leave(self) -> None:
        """End the loop if no epoch's context is open; an open one raises StopIteration where it is ``cut``."""
        if self._fitting and not self._in_epoch:  # this version of Lightning names its epochs differently
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def enter_epoch(self) -> None:
        self._in_epoch = True
        self._left_before = self.left
        self.timeline.went_outside.append((self.timeline.clock(), EPOCH))
        if self.trainer.profiler is self and not any(c is self.callback for c in self.trainer.callbacks):
            self.trainer.profiler = self._wrapped
            self._aside = True

    def leave_epoch(self) -> None:
        if self._aside:
            self._aside = False
            self.trainer.profiler = self
            return
        self.close_step()
        if self.left == self._left_before and self._is_endless() and not self.cut:
            self.cut = True
            self.idle("an epoch")

    def _is_endless(self) -> bool:
        trainer = self.trainer
        return bool(self.ends and self._fitting and trainer.max_epochs == -1 and trainer.max_steps == -1)

    def _end_step(self) -> int:
        self.timeline.mark(at.END)
        return self.step_ended()

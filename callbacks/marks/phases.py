"""Marks the phases, from Lightning's own profiler actions.

Lightning wraps every action of its loops in ``trainer.profiler``. ``PhaseProfiler`` takes that place for the run, turns
actions that begin or end a phase into marks, and passes all of them on to the profiler that the user configured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from lightning.pytorch.profilers import Profiler

from lm_profiler.callbacks.marks.actions import Actions
from lm_profiler.callbacks.marks.between import EPOCH
from lm_profiler.callbacks.marks.spans import NOTHING, Both, Marked
from lm_profiler.callbacks.namespaces import is_exactly, verb_of
from lm_profiler.lightning_names import FETCHED, STEPPED, fetch_action
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.torch_names import NameMissing

_DRY = 1000  # batches in a row without a step, times those of a step, that show that a loader has nothing to train on


class PhaseProfiler(Profiler):
    """Stands in for ``trainer.profiler`` while the stages last.

    It counts the steps by itself and ends the loop, whatever becomes of the instruments. ``batch_ended`` is to be
    called until ``is_sure``, which the first step makes true: it notices where Lightning's actions have other names.

    Args:
        trainer: its profiler is kept and forwarded to; ``restore`` puts it back.
        timeline: takes the marks.
        steps: how many until the stages are done.
        step_ended: called between a step and the next; returns how many are left.
        follow: turns the count of steps left into that of the other ranks where the instruments failed; does not raise.
        done: called when none is left; does not raise.
        stop: whether the loop ends then: it takes StopIteration for the end of its data.
        died: called with the error that ended the run, where another callback's ``on_exception`` raises; does not
            raise.
        callback: whose run this is. While the Trainer has only others (a Tuner tries a learning rate), it stands aside.
        idle: told what had no step, where the loop would go on like that for ever.
    """

    def __init__(
        self,
        trainer: Any,
        timeline: Timeline,
        steps: int,
        step_ended: Callable[[], int],
        follow: Callable[[int], int],
        done: Callable[[], None],
        stop: bool,
        died: Callable[[BaseException], object],
        callback: object = None,
        idle: Callable[[str], None] = lambda what: None,
    ) -> None:
        super().__init__()
        self._trainer = trainer  # Lightning sets some of its attributes where no type checker looks
        self._wrapped: Profiler = self._trainer.profiler
        self._user = None if is_exactly(self._wrapped, "PassThroughProfiler") else self._wrapped
        self._timeline = timeline
        self._part = timeline.part
        self._left = steps
        self._step_ended = step_ended
        self._follow = follow
        self._done = done
        self._stop = stop
        self._callback = callback
        self._idle = idle
        self.cut = self._aside = False
        self._left_before, self._without_step = steps, 0
        self.step_done = False
        verb = verb_of(trainer)
        self._fetch = fetch_action(trainer, verb)
        self.is_sure = self._fetched = self._in_epoch = False
        self._steps_before = trainer.global_step
        self._fitting = verb == "fit"
        self._automatic = self._fitting and trainer.lightning_module.automatic_optimization
        self._spans = Actions(trainer, timeline, self, died)
        if self._user is None:
            # Called thirty times a step: a built-in method saves ten microseconds of Python frames.
            self.profile = self._spans.__getitem__  # type: ignore[method-assign,assignment]

    def __del__(self) -> None:
        """Do nothing: Lightning's own fails for one whose constructor raised."""

    def __reduce__(self) -> Any:
        return copy, (self._wrapped,)  # a copy of the Trainer gets a copy of the user's profiler

    def restore(self) -> None:
        """Give the Trainer the user's profiler back."""
        if self._trainer.profiler is self:
            self._trainer.profiler = self._wrapped

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        # Reached only beside a profiler of the user's: see __init__.
        span, user = self._spans[action_name], self._wrapped.profile(action_name)
        return user if span is NOTHING else Both(user, span)

    def count_only(self) -> None:
        """Take no more marks, but still count steps, and end the loop where it would have ended."""
        self._timeline.stop()
        self._spans.surround(None)

    def surround(self, around: Callable[[str, Marked], Marked] | None) -> None:
        """Let ``around`` make the span of each action from the next one on; None gives the plain span back."""
        self._spans.surround(around)

    def start(self, action_name: str) -> None:
        if self._user is not None:  # before our mark, so that its cost is in no phase that begins here
            self._user.start(action_name)
        if action_name != self._fetch:
            return
        timeline = self._timeline
        self._fetched = True
        if not self.step_done:
            self._without_step += 1
            if self._without_step > _DRY * self._trainer.accumulate_grad_batches and self._is_endless():
                self.cut = True
                self._part.run(self._idle, f"{self._without_step:,} batches in a row")
                raise StopIteration
        elif self._left > 0:
            # Written out, as Guard.run and close_step have it: three frames fewer a step.
            self.step_done = False
            self.is_sure = True
            self._without_step = 0
            part, left = self._part, self._left - 1
            if not part.out:
                try:
                    timeline.note((at.END, timeline.clock()))
                    left = self._step_ended()
                except BaseException as error:
                    part.failed(error)
            self._left = self._follow(left) if part.out else left
            if self._left <= 0:
                self._done()
                if self._stop:
                    self._leave()
                    raise StopIteration
                return
        try:
            timeline.note((at.DATA, timeline.clock()))
        except BaseException as error:
            self._part.failed(error)

    def stop(self, action_name: str) -> None:
        timeline = self._timeline
        try:
            if action_name == self._fetch:
                timeline.note((at.LEAVE, timeline.clock()))
            elif action_name == "optimizer_step":  # of manual optimization, which starts and stops it
                timeline.mark(at.OPTIMIZED)
        except BaseException as error:
            self._part.failed(error)
        if self._user is not None:  # after our mark, for the same reason
            self._user.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        # Whatever else somebody asks of trainer.profiler, they mean their own.
        if name.startswith("__") or "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def close_step(self) -> None:
        """End the step if it was done, because the loop is left; otherwise it waits for the loop to come back."""
        if self._left <= 0:
            return  # the stages ended within this step, as where it asks for its batch itself
        if self.step_done:
            self.step_done = False
            self.is_sure = True
            self._without_step = 0
            self._left = self._part.run(self._end_step, otherwise=self._left - 1)
            if self._part.out:
                self._left = self._follow(self._left)
            if self._left <= 0:
                self._done()
                if self._stop and self._fitting:  # the epoch ends as well, in the usual way
                    self._trainer.fit_loop.epoch_loop.max_steps = self._trainer.global_step
        else:
            self._timeline.go_outside()

    def batch_ended(self) -> bool:
        """Give up where Lightning's actions do not come although a batch is over; returns whether the loop is to end.

        Called from a public hook of Lightning's. Without the actions no step would ever be counted, and the loop would
        not end.
        """
        error = self._missing_action()
        if error is None or self._left <= 0:
            return False
        self.is_sure, self._left = True, 0
        self._part.failed(error)
        self._done()
        if self._stop:
            self._leave()
        return self._stop

    def _missing_action(self) -> NameMissing | None:
        if not self._fetched:
            return FETCHED.missing()
        stepped = self._trainer.global_step > self._steps_before if self._automatic else True
        if stepped and not self.step_done:
            return STEPPED.missing()
        return None

    def _leave(self) -> None:
        """Have the loop end here: the context of the epoch raises StopIteration where it is ``cut``."""
        self.cut = True
        if self._fitting and not self._in_epoch:  # this version has no such context: it names its epochs otherwise
            self._trainer.fit_loop.epoch_loop.max_steps = self._trainer.global_step

    def enter_epoch(self) -> None:
        self._in_epoch = True
        self._left_before = self._left
        self._timeline.went_outside.append((self._timeline.clock(), EPOCH))
        if self._trainer.profiler is self and not any(c is self._callback for c in self._trainer.callbacks):
            self._trainer.profiler = self._wrapped
            self._aside = True

    def leave_epoch(self) -> None:
        if self._aside:
            self._aside = False
            self._trainer.profiler = self
            return
        self.close_step()
        if self._left == self._left_before and self._is_endless() and not self.cut:
            self.cut = True
            self._idle("an epoch")

    def _is_endless(self) -> bool:
        trainer = self._trainer
        return bool(self._stop and self._fitting and trainer.max_epochs == -1 and trainer.max_steps == -1)

    def _end_step(self) -> int:
        self._timeline.mark(at.END)
        return self._step_ended()

"""Marks the phases, from Lightning's own profiler actions.

Lightning wraps every action of its loops in ``trainer.profiler``. ``PhaseProfiler`` gives that object other methods for
the run, which turn actions that begin or end a phase into marks, and call the user's own ones for every action.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from lm_profiler.analysis.watch.ledger import EPOCH
from lm_profiler.callbacks.marks.actions import NOTHING, Actions, SpanInUsersProfiler
from lm_profiler.callbacks.marks.namespaces import is_exactly, verb_of
from lm_profiler.callbacks.marks.optimizers import OptimizerMarks, call_before
from lm_profiler.callbacks.marks.users_profiler import ProfilerMarks, ProfilerMethods
from lm_profiler.lightning_names import FETCHED, STEPPED, fetch_action
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.torch_names import PrivateName

# after this many steps' worth of batches without a step, the loader has nothing to train on
_MOST_STEPS_WITHOUT_ONE = 1000


@dataclass(eq=False, repr=False)
class PhaseProfiler:
    """Marks the actions of ``trainer.profiler`` from ``install`` to ``restore``, and the optimizers of a fit.

    It counts the steps by itself and ends the loop, even if the instruments fail. ``give_up_without_actions`` must be
    called until ``has_seen_actions``, which the first step makes true: it notices where Lightning's actions have other
    names.
    """

    trainer: Any  # Lightning sets some of its attributes where no type checker looks
    timeline: Timeline  # takes the marks
    steps_left: int  # until the stages are done
    # called between a step and the next; returns how many are left
    step_ended: Callable[[], int]
    # whose run this is; while the Trainer does not have it (a Tuner tries a learning rate), nothing is marked
    callback: object
    # returns the other ranks' count of steps left, given this rank's, where the instruments failed; does not raise
    agree_on_steps_left: Callable[[int], int] = lambda steps_left: steps_left
    # called when none is left; returns whoever marks the rest of training, if anybody does; does not raise
    stages_ended: Callable[[], PhaseProfiler | None] = lambda: None
    ends_loop: bool = False  # whether the loop ends then: StopIteration looks like the end of its data
    # gets what had no step, where the loop would never end
    on_no_step: Callable[[str], object] = lambda place: None
    is_step_done: bool = False  # whether the work of the step is done
    has_seen_actions: bool = False  # whether Lightning's actions came, or ``give_up_without_actions`` gave up
    must_end: bool = False  # whether the loop must end now
    _is_in_trial_fit: bool = False  # a Tuner's fit, in which nothing is marked
    _batches_without_step: int = 0
    _has_fetched: bool = False
    _in_epoch: bool = False
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        trainer = self.trainer
        self._guard = self.timeline.guard
        self._steps_left_at_epoch_start = self.steps_left
        self._steps_before = trainer.global_step
        verb = verb_of(trainer)
        self._fetch_action = fetch_action(trainer, verb)
        self._is_fit = verb == "fit"
        self._is_automatic = (
            self._is_fit and trainer.lightning_module.automatic_optimization
        )
        self._actions = Actions(trainer, self.timeline, self)
        self.surround = self._actions.surround
        self._profiler_marks = ProfilerMarks(trainer.profiler)
        # the methods of the user's profiler; None if the user has none
        self.users_methods: ProfilerMethods | None = self._profiler_marks.users_methods
        # Called thirty times a step: a built-in method saves ten microseconds of Python frames.
        profile: Callable[[str], AbstractContextManager[Any]] = (
            self._actions.__getitem__
        )
        if is_exactly(trainer.profiler, "PassThroughProfiler"):
            self.users_methods = None
        else:
            profile = self.profile
        self._profiler_marks.prepare(ProfilerMethods(profile, self.start, self.stop))

    def install(self) -> None:
        """Begin to mark the actions of the Trainer's profiler."""
        self._profiler_marks.install()

    def mark_optimizers(self) -> None:
        """Mark the optimizers of a fit at their own methods."""
        if self._is_fit:
            OptimizerMarks(self.timeline, self._undo).attach(
                self.trainer, self.trainer.lightning_module
            )

    def see_host_batches(self, note: Callable[[Any], object]) -> None:
        """Have ``note`` called with each batch that is about to go to the device."""
        strategy = self.trainer.strategy
        if strategy.root_device.type != "cpu":
            call_before(strategy, "batch_to_device", note, self._undo)

    def restore(self) -> None:
        """Leave the Trainer's profiler and its optimizers."""
        self._profiler_marks.remove()
        self._undo.close()

    def count_only(self) -> None:
        """Take no more marks, but still count steps, and end the loop where it would have ended."""
        self.timeline.stop()
        self._actions.surround(None)
        self._undo.close()  # otherwise its hooks mark a timeline that nobody reads

    # Lightning calls the next three for each action.

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return the context of an action, where the user has a profiler."""
        assert self.users_methods is not None
        span = self._actions[action_name]
        users = self.users_methods.profile(action_name)
        if span is NOTHING:
            return users
        return SpanInUsersProfiler(users, span)

    def start(self, action_name: str) -> None:
        """Note that an action begins. Where the loop asks for a batch, the step ends if it is done."""
        if self.users_methods is not None:
            # before our mark, so that its cost is in no phase that begins here
            self.users_methods.start(action_name)
        if action_name != self._fetch_action:
            return
        timeline = self.timeline
        self._has_fetched = True
        if not self.is_step_done:
            if self._guard.run(self._is_loop_endless, otherwise=False):
                self.must_end = True
                raise StopIteration
        elif self.steps_left > 0:
            # Guard.run and close_step, written out: three frames fewer per step.
            self.is_step_done = False
            self.has_seen_actions = True
            self._batches_without_step = 0
            guard = self._guard
            steps_left = self.steps_left - 1
            if not guard.is_disabled:
                try:
                    timeline.note((tape.END, timeline.clock()))
                    steps_left = self.step_ended()
                except BaseException as error:
                    guard.handle(error)
            self.steps_left = (
                self.agree_on_steps_left(steps_left)
                if guard.is_disabled
                else steps_left
            )
            if self.steps_left <= 0:
                successor = None
                try:
                    successor = self._end_stages()
                except BaseException as error:
                    guard.handle(error)
                if self.ends_loop:
                    self.must_end = True
                    raise StopIteration
                if successor is None:
                    return
                # this batch is the first of a run that is watched from here on
                timeline = successor.timeline
        try:
            timeline.note((tape.DATA, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

    def stop(self, action_name: str) -> None:
        """Note that an action ends: after the loop has its batch, the phase data is over."""
        if action_name == self._fetch_action:
            timeline = self.timeline
            try:
                timeline.note((tape.LEAVE, timeline.clock()))
            except BaseException as error:
                self._guard.handle(error)
        if self.users_methods is not None:  # after our mark, for the same reason
            self.users_methods.stop(action_name)

    def _is_loop_endless(self) -> bool:
        """Count one more batch without a step; report a fit without any limit in which no step will come."""
        self._batches_without_step += 1
        most_batches = _MOST_STEPS_WITHOUT_ONE * self.trainer.accumulate_grad_batches
        if self._batches_without_step <= most_batches or not self._has_no_limit():
            return False
        self.on_no_step(f"{self._batches_without_step:,} batches in a row")
        return True

    def _end_stages(self) -> PhaseProfiler | None:
        """End the stages, and the loop if it ends with them; return who marks from here on, if anybody does."""
        successor = self.stages_ended()
        if self.ends_loop:
            self._end_loop_outside_epochs()
        return successor

    def close_step(self) -> None:
        """End the step if it is done, as the loop is left; otherwise the step waits until the loop resumes."""
        if self.steps_left <= 0:
            return  # the stages ended within this step, for example where it asks for its batch itself
        if not self.is_step_done:
            self.timeline.go_outside()
            return
        self.is_step_done = False
        self.has_seen_actions = True
        self._batches_without_step = 0
        self.steps_left = self._guard.run(self._end_step, otherwise=self.steps_left - 1)
        if self._guard.is_disabled:
            self.steps_left = self.agree_on_steps_left(self.steps_left)
        if self.steps_left > 0:
            return
        self.stages_ended()
        if self.ends_loop and self._is_fit:  # the epoch ends too, in the usual way
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def _end_step(self) -> int:
        self.timeline.mark(tape.END)
        return self.step_ended()

    def give_up_without_actions(self) -> bool:
        """Give up if no action of Lightning's came although a batch is over; returns whether the loop must end.

        Without the actions no step would ever be counted, and the loop would not end.
        """
        absent = self._absent_action()
        if absent is None or self.steps_left <= 0:
            return False
        self.has_seen_actions = True
        self.steps_left = 0
        self._guard.handle(absent.missing())
        self._end_stages()
        if self.ends_loop:
            self.must_end = True
        return self.ends_loop

    def _absent_action(self) -> PrivateName | None:
        """Return which of Lightning's actions should have come by the end of a batch and did not."""
        if not self._has_fetched:
            return FETCHED
        has_stepped = (
            not self._is_automatic or self.trainer.global_step > self._steps_before
        )
        if has_stepped and not self.is_step_done:
            return STEPPED
        return None

    def _end_loop_outside_epochs(self) -> None:
        """End the loop if no epoch's context is open; an open one raises StopIteration if ``must_end`` is set."""
        if self._is_fit and not self._in_epoch:
            # this version of Lightning names its epochs differently
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def enter_epoch(self) -> None:
        """Note that an epoch begins; in a trial fit of the Tuner, mark nothing until it ends."""
        self._in_epoch = True
        self._steps_left_at_epoch_start = self.steps_left
        self.timeline.went_outside.append((self.timeline.clock(), EPOCH))
        is_own_fit = any(
            callback is self.callback for callback in self.trainer.callbacks
        )
        if self._profiler_marks.are_installed and not is_own_fit:
            self._profiler_marks.remove()
            self._is_in_trial_fit = True

    def leave_epoch(self) -> None:
        """Close the step, and end a fit without any limit whose epoch had no step.

        After a trial fit of the Tuner, in which nothing is marked, only begin to mark again.
        """
        if self._is_in_trial_fit:
            self._is_in_trial_fit = False
            self._profiler_marks.install()
            return
        self.close_step()
        epoch_had_a_step = self.steps_left != self._steps_left_at_epoch_start
        if epoch_had_a_step or not self._has_no_limit() or self.must_end:
            return
        self.must_end = True
        self.on_no_step("an epoch")

    def _has_no_limit(self) -> bool:
        """Return whether nothing but the stages would end this fit."""
        trainer = self.trainer
        return bool(
            self.ends_loop
            and self._is_fit
            and trainer.max_epochs == -1
            and trainer.max_steps == -1
        )

"""Marks the phases of a Trainer's loop, from Lightning's own profiler actions.

Lightning wraps every action of its loops in ``trainer.profiler``. During the run, ``PhaseProfiler`` gives that object
other methods: they take a mark if an action begins or ends a phase, and call the user's own methods for every action.
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

# If the batches of this many steps have come without any step, no step is expected to come.
_MOST_MISSING_STEPS = 1000


@dataclass(eq=False, repr=False)
class PhaseProfiler:
    """Marks the actions of ``trainer.profiler`` from ``install`` to ``restore``, and the optimizers of a fit.

    It counts the steps by itself and ends the loop, even if the instruments fail. Until ``has_seen_actions`` is set,
    which the first step does, ``give_up_without_actions`` must be called after each batch: it detects a version of
    Lightning whose actions have other names.
    """

    trainer: Any  # without its type, because Lightning sets some attributes where no type checker sees them
    timeline: Timeline  # takes the marks
    steps_left: int  # the number of steps until the stages are done
    # called between a step and the next; returns how many are left
    step_ended: Callable[[], int]
    # the callback of this run; while the Trainer does not have it (a Tuner tries a learning rate), nothing is marked
    callback: object
    # called if the instruments failed: takes this rank's count of steps left and returns that of the other ranks; does
    # not raise
    agree_on_steps_left: Callable[[int], int] = lambda steps_left: steps_left
    # called when no step is left; returns the object that marks the rest of training, or None; does not raise
    stages_ended: Callable[[], PhaseProfiler | None] = lambda: None
    # whether the loop ends with the stages, by a StopIteration that looks like the end of its data
    ends_loop: bool = False
    # called if the loop would never end; takes what had no step, such as "an epoch"
    on_no_step: Callable[[str], object] = lambda place: None
    is_step_done: bool = False  # whether the work of the step is done
    has_seen_actions: bool = False  # whether Lightning's actions came, or ``give_up_without_actions`` gave up
    must_end: bool = False  # whether the loop must end now
    # whether a Tuner's fit runs, in which nothing is marked
    _is_in_trial_fit: bool = False
    _batches_without_step: int = 0
    _has_fetched: bool = False  # whether the loop has asked for a batch
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
        # Called thirty times per step. A built-in method saves the Python frames, which would take ten microseconds.
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
        """Call ``note`` with each batch that is about to go to the device, from now on."""
        strategy = self.trainer.strategy
        if strategy.root_device.type != "cpu":
            call_before(strategy, "batch_to_device", note, self._undo)

    def restore(self) -> None:
        """Restore the Trainer's profiler and its optimizers."""
        self._profiler_marks.remove()
        self._undo.close()

    def count_only(self) -> None:
        """Take no more marks, but still count steps, and end the loop when it would have ended."""
        self.timeline.stop()
        self._actions.surround(None)
        # removes hooks whose marks would be dropped
        self._undo.close()

    # Lightning calls the next three methods for each action.

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return the context of an action, if the user has a profiler."""
        assert self.users_methods is not None
        span = self._actions[action_name]
        users = self.users_methods.profile(action_name)
        if span is NOTHING:
            return users
        return SpanInUsersProfiler(users, span)

    def start(self, action_name: str) -> None:
        """Note that an action begins. If the loop asks for a batch, end the step that is done, and begin data.

        Raises:
            StopIteration: the loop must end.
        """
        if self.users_methods is not None:
            # called before our mark, so that the phase that begins here does not include its cost
            self.users_methods.start(action_name)
        if action_name != self._fetch_action:
            return
        timeline = self.timeline
        self._has_fetched = True
        if not self.is_step_done:
            # The last batch has not ended a step. If that never happens, a loop without any limit does not end.
            if self._guard.run(self._is_loop_endless, otherwise=False):
                self.must_end = True
                raise StopIteration
        elif self.steps_left > 0:
            # Guard.run and close_step are written out, which saves three frames per step.
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
            if guard.is_disabled:
                # ``step_ended``, which agrees with the other ranks, did not run, but they wait for this rank.
                steps_left = self.agree_on_steps_left(steps_left)
            self.steps_left = steps_left
            if steps_left <= 0:
                successor = self._end_stages_or_loop()
                if successor is None:
                    return
                # The run is watched from here on: its first phase is the data of this batch.
                timeline = successor.timeline
        try:
            timeline.note((tape.DATA, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

    def stop(self, action_name: str) -> None:
        """Note that an action ends. If the loop has received its batch, end the phase data."""
        if action_name == self._fetch_action:
            timeline = self.timeline
            try:
                timeline.note((tape.LEAVE, timeline.clock()))
            except BaseException as error:
                self._guard.handle(error)
        if self.users_methods is not None:  # after our mark, for the same reason
            self.users_methods.stop(action_name)

    def _is_loop_endless(self) -> bool:
        """Count one more batch without a step; return whether the fit has no limit and no step is expected to come."""
        self._batches_without_step += 1
        most_batches = _MOST_MISSING_STEPS * self.trainer.accumulate_grad_batches
        if self._batches_without_step <= most_batches or not self._has_no_limit():
            return False
        self.on_no_step(f"{self._batches_without_step:,} batches in a row")
        return True

    def _end_stages_or_loop(self) -> PhaseProfiler | None:
        """End the stages; return the marker of the rest of training, or None.

        Raises:
            StopIteration: the loop ends with the stages.
        """
        successor = None
        try:
            successor = self._end_stages()
        except BaseException as error:
            self._guard.handle(error)
        if self.ends_loop:
            self.must_end = True
            raise StopIteration
        return successor

    def _end_stages(self) -> PhaseProfiler | None:
        """End the stages, and the loop if it ends with them; return the marker of the rest of training, or None."""
        successor = self.stages_ended()
        if self.ends_loop:
            self._end_loop_outside_epochs()
        return successor

    def close_step(self) -> None:
        """Handle the end of an epoch: end the step if it is done; otherwise suspend it until the loop continues."""
        if self.steps_left <= 0:
            # The stages have ended within this step, for example because the step fetches its batches itself.
            return
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
        if self.ends_loop and self._is_fit:
            # This ends the epoch, too, in the usual way.
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def _end_step(self) -> int:
        self.timeline.mark(tape.END)
        return self.step_ended()

    def give_up_without_actions(self) -> bool:
        """Give up if a batch has ended without the actions of Lightning; return whether the loop must end.

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
        """End the loop of a fit if it is in no epoch's context; such a context ends the loop itself (``must_end``)."""
        if self._is_fit and not self._in_epoch:
            # The context of the epoch was not entered, so this version of Lightning has another name for it.
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def enter_epoch(self) -> None:
        """Note that an epoch begins; in a trial fit of the Tuner, mark nothing until it ends."""
        self._in_epoch = True
        self._steps_left_at_epoch_start = self.steps_left
        self.timeline.name_outside(EPOCH)
        is_own_fit = any(
            callback is self.callback for callback in self.trainer.callbacks
        )
        if self._profiler_marks.are_installed and not is_own_fit:
            self._profiler_marks.remove()
            self._is_in_trial_fit = True

    def leave_epoch(self) -> None:
        """Close the step, and end a fit without any limit whose epoch had no step.

        After a trial fit of the Tuner, in which nothing was marked, only resume marking.
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
        """Return whether only the stages end this fit."""
        trainer = self.trainer
        return bool(
            self.ends_loop
            and self._is_fit
            and trainer.max_epochs == -1
            and trainer.max_steps == -1
        )

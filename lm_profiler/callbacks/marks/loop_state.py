"""What ``HookMarks`` knows about a loop: a class for each part of this state, with the events that change it.

Each step reads this state several times, and a Python function costs a microsecond there. So the hooks of every step
read and set attributes of these classes, and the methods are for events that are rarer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any
from weakref import ref

import torch

from lm_profiler.callbacks.marks.loader_passes import DEAD_REFERENCE

# Steps are taken to need rollouts only if at least this many rollouts show it.
_FEWEST_ROLLOUTS = 3


class MarkedThread:
    """Whether calls are marked: those in the thread that makes this object, from ``open`` until ``close``.

    If the marks are installed within an optimizer's step, the rest of the loop's step is not marked.
    """

    def __init__(self) -> None:
        self._thread = get_ident()
        # the thread whose calls are marked now; 0 if no calls are marked
        self.number = 0
        self.is_open = False
        # whether the marks were installed within a step that still runs
        self.is_in_partial_step = False
        # whether the marks were installed within a step
        self.began_in_partial_step = False
        self.calls_of_other_threads = 0

    def open(self, is_in_step: bool) -> None:
        """Mark calls from now on; if the loop ``is_in_step``, from the end of this step on."""
        self.is_open = True
        self.is_in_partial_step = is_in_step
        self.began_in_partial_step = is_in_step
        if not is_in_step:
            self.number = self._thread

    def end_partial_step(self) -> None:
        """Mark calls from now on, because the step has ended in which the marks were installed."""
        self.is_in_partial_step = False
        self.number = self._thread

    def close(self) -> None:
        """Mark no more calls."""
        self.is_open = False
        self.number = 0

    def refuses_call(self) -> bool:
        """Return whether a call is not to be marked now; count it if it comes from another thread."""
        if not self.is_open or self.is_in_partial_step:
            return True
        if get_ident() == self._thread:
            return False
        self.calls_of_other_threads += 1
        return True


class StepContents:
    """Counts batches and calls in the running step, and the ended steps that had a batch from a loader or a call."""

    def __init__(self) -> None:
        # in the running step
        self.batches = 0  # from a loader
        self.calls = 0  # of models
        self.backwards = 0

        # of the ended steps
        self.ended_steps = 0
        self.steps_with_loader = 0
        self.steps_with_forward = 0
        self.batches_per_step: int | None = None  # of the last step

    def end_step(self) -> None:
        """Add the running step to the ended ones, and count from zero for the next."""
        self.ended_steps += 1
        if self.batches > 0:
            self.steps_with_loader += 1
        if self.calls > 0:
            self.steps_with_forward += 1
        self.batches_per_step = max(self.batches or self.backwards, 1)
        self.batches = 0
        self.calls = 0
        self.backwards = 0


class Rollouts:
    """Counts rollouts: calls of a model in training mode, without gradients, outside of steps.

    In reinforcement learning a rollout chooses the next actions, so the next step needs it. In other programs, such a
    call is for validation.
    """

    def __init__(self) -> None:
        self._rollouts = 0
        # rollouts that a backward pass followed without another call of a model
        self._rollouts_for_losses = 0
        self.was_last_call = False  # whether the last call of a model was a rollout
        self._steps_with_rollout = 0  # ended steps with a rollout before them
        self.is_before_step = False  # whether a rollout came before the running step

    def note_rollout(self) -> None:
        self._rollouts += 1
        self.was_last_call = True
        self.is_before_step = True

    def note_loss_of_rollout(self) -> None:
        """Note that a backward pass follows the last rollout directly, so that it is for a loss of its results."""
        self.was_last_call = False
        self._rollouts_for_losses += 1

    def end_step(self) -> None:
        """Note that the running step, before which a rollout came, has ended."""
        self.is_before_step = False
        self._steps_with_rollout += 1

    def are_needed(self, ended_steps: int) -> bool:
        """Return whether steps need their rollouts.

        They do if a rollout came before most of the ``ended_steps``: validations would be rarer. They also do if most
        rollouts were for losses, such as that of the temperature in soft actor-critic.
        """
        before_most_steps = 2 * self._steps_with_rollout >= ended_steps
        if before_most_steps and self._steps_with_rollout >= _FEWEST_ROLLOUTS:
            return True
        most_are_for_losses = 2 * self._rollouts_for_losses >= self._rollouts
        return most_are_for_losses and self._rollouts_for_losses >= _FEWEST_ROLLOUTS


class LoopNesting:
    """Finds a loop over batches that runs within a step of another loop over batches.

    It shows when the inner loop has ended: the next batch comes from the iterator of the earlier loop.
    """

    def __init__(self) -> None:
        # whether the next batch may be the first of a loop, or the next one of an outer loop
        self.may_loop_change = True
        # the iterator with which ``note_batch`` was last called; a weak reference, so that the workers of a loader can
        # end with its iterator
        self._earlier_iterator_ref: Callable[[], Any] = DEAD_REFERENCE

    def note_batch(self, iterator: Any) -> bool:
        """Note that the next batch comes from ``iterator``; return whether the earlier loop continues.

        If it does, the loop that has ended in between ran within a step of the earlier loop.
        """
        self.may_loop_change = False
        if iterator is not None and iterator is self._earlier_iterator_ref():
            return True  # the reference stays, because the earlier loop may be interrupted again
        self._earlier_iterator_ref = DEAD_REFERENCE
        # Python's own iterators do not support weak references.
        with suppress(TypeError):
            self._earlier_iterator_ref = ref(iterator)
        return False

    def note_end(self, iterator: Any, may_be_inner_loop: bool) -> None:
        """Note that the loop over ``iterator`` has ended; if it may be an inner loop, the next batch will show it."""
        if iterator is self._earlier_iterator_ref():
            # A loader may reuse the iterator for the next epoch.
            self._earlier_iterator_ref = DEAD_REFERENCE
        if may_be_inner_loop:
            self.may_loop_change = True


class ValidationCalls:
    """Counts calls of models in validations, and those for which autograd recorded a graph."""

    def __init__(self) -> None:
        self._calls = 0
        self._calls_with_gradients = 0

    def note_call(self) -> None:
        self._calls += 1
        if torch.is_grad_enabled():
            self._calls_with_gradients += 1

    @property
    def have_gradients(self) -> bool | None:
        """Whether autograd records a graph in most of them, as without ``torch.no_grad()``; None if there were none."""
        if self._calls == 0:
            return None
        return 2 * self._calls_with_gradients > self._calls

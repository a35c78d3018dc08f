"""Marks the phases of any training loop, whose code is unknown, at hooks and functions of torch.

A step begins when the loop asks a loader for a batch, or, without a loader, when it calls its model. The step is done
when an optimizer has stepped, and ends when the next step begins. The phases:

| phase | what marks it |
| --- | --- |
| data | ``__next__`` of a DataLoader's iterators; ``run.data`` |
| transfer | the functions with which Fabric and accelerate move a batch |
| forward | the calls of the outermost modules that hold parameters of the optimizers, or of the methods by which the |
|         | program calls these instead, such as ``model.loss(batch)``; with a loader, until backward |
| backward | ``torch.autograd.backward``, which ``Tensor.backward`` calls |
| clip | ``torch.nn.utils.clip_grad_norm_`` and its like |
| optimizer | ``step`` of all optimizers, and of ``GradScaler`` |
| zero_grad | ``zero_grad`` of optimizers and modules |

All of this runs within the program's own calls. So each hook returns at once in another thread and while torch.compile
traces it, and runs in the guard: an error disables the profiler and does not reach the program.

Each step runs these hooks once, where code costs several times as much as in a tight loop. So ``Guard.run``,
``Timeline.mark`` and the first check of ``MarkedThread.refuses_call`` are written out in the functions that every step
runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from lm_profiler.analysis.watch.ledger import EPOCH, LAST_BATCH, VALIDATION
from lm_profiler.callbacks.marks.called_modules import CalledModules
from lm_profiler.callbacks.marks.loader_passes import LoaderPasses
from lm_profiler.callbacks.marks.loop_state import (
    LoopNesting,
    MarkedThread,
    Rollouts,
    StepContents,
    ValidationCalls,
)
from lm_profiler.callbacks.marks.step_counter import StepCounter
from lm_profiler.callbacks.marks.torch_hooks import (
    OPTIMIZER_HOOKS,
    Function,
    Replacements,
    clearing_classes,
    clipping_functions,
    loader_iterators,
)
from lm_profiler.measure.boundary import Guard, Report
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.parts import PHASES

_is_compiling = torch.compiler.is_compiling
_is_training = attrgetter("training")

# functions that move a batch to the device, by their module
_TRANSFERS = (
    ("lightning.fabric.wrappers", "move_data_to_device"),
    ("accelerate.data_loader", "send_to_device"),
)

# how a program marks a phase that no hook sees
_MARKED_PHASE = "`with run.phase('{phase}'):`, inside of `with lm_profiler.profile(model, optimizer) as run:`"

NESTED_DATA = "run.data is used inside another run.data: the batches of both count in the same steps"

# For this many new optimizers their modules are searched; each search takes some 0.3 s.
_MOST_SEARCHES = 8

# The state of the phase forward: it does not run; the model's call runs; or the call has returned, and the phase
# continues to include the loss.
ForwardState = Literal["not running", "in call", "in loss"]


class Autocast(NamedTuple):
    """The state of autocast when the model was first called."""

    is_on: bool
    dtype: torch.dtype


class HookMarks:
    """The marks of one loop, in the thread that makes this object, from ``install`` until ``restore``.

    Args:
        timeline: takes the marks.
        counter: counts the steps.
        modules: the outermost modules of the loop; those of further optimizers are added.
        optimizers: the optimizers of the loop; further ones that step are added.
        count_batch: receives each batch.
        note_call: receives the model and the arguments of the first call in a step.
        find_modules: returns the modules of an optimizer.
        report: receives notes for the user.
    """

    def __init__(
        self,
        timeline: Timeline,
        counter: StepCounter,
        modules: list[nn.Module],
        optimizers: list[Any],
        count_batch: Callable[[Any], object],
        note_call: Callable[[nn.Module, Any], object],
        find_modules: Callable[[Any], Sequence[nn.Module]],
        report: Report,
    ) -> None:
        self.timeline = timeline
        self.counter = counter
        self.modules = modules
        self.optimizers = optimizers
        self._ids_of_optimizers = {id(optimizer) for optimizer in optimizers}
        self._count_batch = count_batch
        # None after the first call
        self._note_call: Callable[[nn.Module, Any], object] | None = note_call
        self._find_modules = find_modules
        self._searches_left = _MOST_SEARCHES
        self._report = report
        self._reported_texts: set[str] = set()
        self._guard = timeline.guard
        self._replacements = Replacements()
        self._called_modules = CalledModules(
            self._begin_forward, self._end_forward, self._guard, self._replacements
        )
        self._marked_thread = MarkedThread()

        # what runs now
        self._running_phases: set[int] = set()  # the phases whose function runs
        # phases that the program names with ``run.phase``, the innermost last
        self._named_phases: list[int] = []
        self._forward_depth = 0  # of nested calls of hooked modules
        self._forward: ForwardState = "not running"
        self._optimizer_depth = 0  # of nested steps of optimizers
        # whether the loop validates or is between epochs, so that it is not within a step
        self._is_outside = False

        # what happened before
        self.autocast: Autocast | None = None  # when the model was first called
        self._has_seen_step = False  # whether a step began while calls were marked
        self._has_trained = False  # whether a model was called in training mode
        self._backwards_outside = 0  # backward passes outside of all steps
        self._step = StepContents()
        self._rollouts = Rollouts()
        self._validation_calls = ValidationCalls()
        self._nesting = LoopNesting()
        self.passes = LoaderPasses()
        self._passes_guard = Guard("passes over loaders", report)

    # -- adding and removing the marks

    def install(self) -> None:
        """Add all marks to torch and to the modules. If an optimizer steps now, marks count when its step has ended."""
        self._marked_thread.open(is_in_step=OPTIMIZER_HOOKS.is_in_hook)
        self._called_modules.observe(self.modules)
        OPTIMIZER_HOOKS.attach(
            self._begin_optimizer_step, self._end_optimizer_step, self._guard
        )
        replace = self._replacements.replace
        replace(torch.autograd, "backward", partial(self._marked, tape.BACKWARD))
        # for each function, what makes its marked version
        wrap_by_function = {
            function: partial(self._marked, tape.CLIP)
            for function in clipping_functions()
        }
        for module_name, function_name in _TRANSFERS:
            function = getattr(sys.modules.get(module_name), function_name, None)
            if function is not None:
                wrap_by_function[function] = partial(self._marked, tape.TRANSFER)
        self._replacements.replace_everywhere(wrap_by_function)
        for kind in clearing_classes([*self.optimizers, *self.modules]):
            replace(kind, "zero_grad", partial(self._marked, tape.ZERO_GRAD))
        replace(torch.amp.GradScaler, "step", self._marked_scaler)
        for kind in loader_iterators():
            replace(kind, "__next__", self._marked_fetch)
        replace(DataLoader, "__iter__", self._counted_pass)

    def see_host_batches(self, note: Callable[[Any], object]) -> None:
        """Do nothing: the loop moves its batches itself, and masks on a device are not read."""

    def mark_optimizers(self) -> None:
        """Do nothing: the hooks of ``install`` mark all optimizers."""

    def restore(self) -> None:
        """Take all marks away, and report which parts of the steps had none."""
        if not self._marked_thread.is_open:
            OPTIMIZER_HOOKS.detach()
            return
        self._marked_thread.close()
        with ExitStack() as undo:  # calls each of them, even if another one fails
            undo.callback(OPTIMIZER_HOOKS.detach)
            undo.callback(self._replacements.undo)
            undo.callback(self._called_modules.stop)
        self._report_what_was_not_seen()

    def count_only(self) -> None:
        self.timeline.stop()

    def close_step(self) -> None:
        self._close_named_phases()
        self._end_step_if_done()

    # -- steps

    def _end_step_if_done(self) -> None:
        """Close the open forward; then, if the optimizer has stepped, end the running step.

        Called before whatever can begin a step: a batch, a call of the model, or a phase that is named data.
        """
        if self._forward == "in loss":
            self._close_forward()
        if not self.counter.is_step_done:
            return
        step = self._step
        has_unseen_calls = step.backwards > 0 and step.calls == 0
        if has_unseen_calls:
            self._called_modules.observe_children()
        step.end_step()
        if self._rollouts.is_before_step:
            self._rollouts.end_step()
        if self._called_modules.search_steps_left > 0:
            self._called_modules.end_search_step()
        self.counter.end_step_if_done()

    def _is_validation(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether a call of ``modules`` or of a loader is for validation now.

        It is if all modules are in evaluation mode, or if gradients are off between steps.
        """
        if self._has_trained and modules and not any(map(_is_training, modules)):
            return True
        # After the last batch of an epoch the loop is outside of its steps, and the next step has not begun.
        is_between_steps = (
            self.counter.is_step_done or self._is_outside or not self._has_seen_step
        )
        return is_between_steps and not torch.is_grad_enabled()

    def _go_outside(self, reason: str) -> None:
        """Leave the step until the loop begins or continues one; the time until then is named ``reason``."""
        self._close_forward()
        if not self._is_outside:
            self._is_outside = True
            self.timeline.go_outside(reason)
        elif self.timeline.is_outside_for(reason):
            return
        # Noted after the mark, because a gap is named after what began within it, such as a validation after the last
        # batch of an epoch.
        self.timeline.name_outside(reason)

    def _continue_step(self) -> None:
        """Begin or continue a step for which the loop asks for no new batch.

        A loop that fetches in advance takes such a step after the end of its data, with the last batch of the epoch.
        """
        self._is_outside = False
        if self.passes.is_last_pass_finished:
            timeline = self.timeline
            timeline.departures.append((timeline.clock(), LAST_BATCH))

    # -- data

    def fetch(self, get_batch: Callable[..., Any], *args: Any) -> Any:
        """Call ``get_batch`` as the phase data, unless its batch is not for training; return the batch."""
        try:
            is_marked = self._begin_fetch(*args)
        except BaseException as error:
            self._guard.handle(error)
            is_marked = False
        if not is_marked:
            return get_batch(*args)
        try:
            batch = get_batch(*args)
        except BaseException as error:
            self._run_guarded(self._fail_fetch, error, *args)
            raise
        try:
            self._end_fetch(batch)
        except BaseException as error:
            self._guard.handle(error)
        return batch

    def report_nested_loop(self) -> None:
        """Report that the program iterates over ``run.data`` within another iteration over it."""
        self._run_guarded(self._report_nested_loop)

    def leave_loop(self) -> None:
        """Note that the program leaves a loop over batches before the last batch."""
        self._run_guarded(self._end_loop)

    def _report_nested_loop(self) -> None:
        if not self._marked_thread.refuses_call():
            self._report_once(NESTED_DATA)

    def _end_loop(self) -> None:
        if not self._marked_thread.refuses_call():
            self._end_step_if_done()

    def _marked_fetch(self, fetch: Function) -> Function:
        """Return ``fetch``, an iterator's ``__next__``, with each batch marked as the phase data."""

        def marked_fetch(iterator: Any) -> Any:
            if _is_compiling():
                return fetch(iterator)
            return self.fetch(fetch, iterator)

        return marked_fetch

    def _begin_fetch(self, iterator: Any = None) -> bool:
        """Note that the loop asks for a batch; return whether that is marked, as a batch for training is."""
        if tape.DATA in self._running_phases:
            return False  # a fetch within the fetch of another batch
        thread = self._marked_thread
        if get_ident() != thread.number and thread.refuses_call():
            return False
        if self._named_phases:
            if self._named_phases[-1] == tape.DATA:
                return False
            self._close_named_phases()
        if self._is_validation(self.modules):
            self._go_outside(VALIDATION)
            return False
        if self._nesting.may_loop_change:
            self._note_loop(iterator)
        self._end_step_if_done()
        self._is_outside = False
        self._has_seen_step = True
        self._step.batches += 1
        self._running_phases.add(tape.DATA)
        timeline = self.timeline
        timeline.note((tape.DATA, timeline.clock()))
        return True

    def _end_fetch(self, batch: Any) -> None:
        """Note that the loop has its ``batch``."""
        timeline = self.timeline
        self._running_phases.discard(tape.DATA)
        timeline.note((tape.LEAVE, timeline.clock()))
        self._count_batch(batch)

    def _fail_fetch(self, error: BaseException, iterator: Any = None) -> None:
        """Note that ``iterator`` raised ``error`` instead of returning a batch; StopIteration ends its data."""
        self._running_phases.discard(tape.DATA)
        self._step.batches -= 1
        is_end_of_data = isinstance(error, StopIteration)
        if not is_end_of_data:
            self.timeline.mark(tape.FAIL)
        self.timeline.mark(tape.LEAVE)
        if is_end_of_data:
            self.passes.finish()
            self._go_outside(EPOCH)
            # A loop within another one usually makes a step of each batch.
            may_be_inner_loop = self._step.batches == 0 and self.batches_per_step == 1
            self._nesting.note_end(iterator, may_be_inner_loop)

    def _counted_pass(self, make_iterator: Function) -> Function:
        """Return ``make_iterator``, a loader's ``__iter__``, with each pass over its data counted."""

        def counted_pass(loader: Any) -> Any:
            self._passes_guard.run(self._count_pass, loader)
            return make_iterator(loader)

        return counted_pass

    def _count_pass(self, loader: Any) -> None:
        """Count a pass over the data of ``loader`` if it is for training; one after a finished pass begins an epoch.

        A wrapped loader, such as accelerate's, asks for a batch in advance: it reaches the end of its data before the
        last step of an epoch, so that only the new pass shows where the epoch begins.
        """
        if self._marked_thread.refuses_call() or self._is_validation(self.modules):
            return
        begins_epoch = self.passes.is_last_pass_finished
        self.passes.begin(loader)
        is_in_fetch = tape.DATA in self._running_phases or bool(self._named_phases)
        if begins_epoch and not is_in_fetch:
            self._end_step_if_done()
            self._go_outside(EPOCH)

    @property
    def batches_per_step(self) -> int | None:
        """The number of batches, or without a loader of backward passes, of the last step; None before it has ended."""
        return self._step.batches_per_step

    @property
    def restarts_loader(self) -> bool | None:
        """Whether nearly each step begins a pass over a loader's data and does not finish it; None without a loader."""
        if self._step.steps_with_loader == 0:
            return None
        return self.passes.are_begun_in(self._step.steps_with_loader)

    @property
    def validates_with_gradients(self) -> bool | None:
        """Whether autograd records a graph in validations, as it does without ``torch.no_grad()``; None without any."""
        return self._validation_calls.have_gradients

    def _note_loop(self, iterator: Any) -> None:
        """Note which loop fetches a batch now; report it if the loop that ended before ran within this one."""
        is_continued = self._nesting.note_batch(iterator)
        if is_continued:
            self._report_once(
                "a loop over batches runs within a step of another loop: each optimizer step counts as a step"
            )

    # -- forward

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the phase forward, unless the call is within another call, a backward pass or a validation.

        ``args`` and ``kwargs`` are those of the call of ``module``, whose hook this is.
        """
        thread = self._marked_thread
        if get_ident() != thread.number and thread.refuses_call():
            return
        self._forward_depth += 1
        is_recomputation = tape.BACKWARD in self._running_phases
        if self._forward_depth > 1 or is_recomputation or self._named_phases:
            return
        self._rollouts.was_last_call = False
        if self._is_validation([module]):
            self._note_validation_or_rollout(module)
            return
        if not torch.is_grad_enabled():
            # A call within a step, for example to make the batch, is no forward pass.
            return
        if self._step.batches == 0:
            self._end_step_if_done()
            batch = (*args, kwargs) if kwargs else args
            self._count_batch(batch)
        if self._forward == "in loss":
            self._close_forward()
        if self._is_outside:
            self._continue_step()
        self._has_seen_step = True
        self._has_trained = self._has_trained or module.training
        self._step.calls += 1
        if self._note_call is not None:
            self._note_first_call(module, (args, kwargs))
        if self._called_modules.search_steps_left > 0:
            self._called_modules.note_call()
        self._forward = "in call"
        timeline = self.timeline
        timeline.note((tape.FORWARD, timeline.clock()))

    def _note_first_call(self, module: nn.Module, arguments: Any) -> None:
        """Note the state of autocast, and pass the first call of a model in a step to ``note_call``."""
        note_call = self._note_call
        assert note_call is not None
        self.autocast = _autocast_of(module)
        self._note_call = None
        note_call(module, arguments)

    def _note_validation_or_rollout(self, module: nn.Module) -> None:
        """Note that ``module`` is called for a validation, or as a rollout.

        A rollout that steps need changes nothing, so that its time counts as other; otherwise the loop leaves the step.
        """
        if module.training:
            self._rollouts.note_rollout()
            if self._rollouts.are_needed(self._step.ended_steps):
                return
        self._go_outside(VALIDATION)
        self._validation_calls.note_call()

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the call of a model ends; if a loader made the batch, forward stays open to include the loss."""
        thread = self._marked_thread
        if get_ident() != thread.number and thread.refuses_call():
            return
        began_before_hooks = self._forward_depth == 0
        if began_before_hooks:
            return
        self._forward_depth -= 1
        if self._forward_depth > 0 or self._forward != "in call":
            return
        self._forward = "not running"
        has_failed = output is None and sys.exc_info()[0] is not None
        if has_failed:
            self.timeline.mark(tape.FAIL)
        # If a loader made the batch, only the loss comes between the model and backward. Without a loader, the program
        # may make the next batch there.
        if self._step.batches > 0 and not has_failed:
            self._forward = "in loss"
        else:
            self.timeline.mark(tape.LEAVE)

    def _close_forward(self) -> None:
        """End the phase forward if it goes on after the model's call, to include the loss."""
        if self._forward == "in loss":
            timeline = self.timeline
            self._forward = "not running"
            timeline.note((tape.LEAVE, timeline.clock()))

    # -- optimizers

    def _begin_optimizer_step(self, optimizer: Any) -> None:
        """Note that ``optimizer`` begins to step."""
        thread = self._marked_thread
        if get_ident() != thread.number and thread.refuses_call():
            return
        if not self._named_phases:
            self._begin_optimizer(optimizer)

    def _end_optimizer_step(self, _optimizer: Any) -> None:
        """Note that an optimizer has stepped, so that the step of the loop is done."""
        thread = self._marked_thread
        if thread.is_in_partial_step:
            thread.end_partial_step()
            return
        if get_ident() != thread.number and thread.refuses_call():
            return
        if self._named_phases:
            self.counter.is_step_done = self._has_seen_step
        else:
            self._end_optimizer()

    def _begin_optimizer(self, optimizer: Any) -> None:
        """Begin the phase optimizer, unless another optimizer that steps has called this one."""
        if id(optimizer) not in self._ids_of_optimizers:
            self._add_optimizer(optimizer)
        self._optimizer_depth += 1
        if self._optimizer_depth == 1:
            if self._forward == "in loss":
                self._close_forward()
            timeline = self.timeline
            timeline.note((tape.OPTIMIZER, timeline.clock()))

    def _end_optimizer(self, has_stepped: bool = True) -> None:
        """End the phase optimizer; the loop's step is done if the optimizer ``has_stepped``."""
        # at least 0, because the hooks may have been added within this optimizer's step
        self._optimizer_depth = max(self._optimizer_depth - 1, 0)
        if self._optimizer_depth > 0:
            return
        if has_stepped:
            # A step of the loop that began before the hooks were added does not count.
            self.counter.is_step_done = self._has_seen_step
            if not self._has_seen_step:
                # Neither a batch nor a call of a hooked module began the step: the program calls their children.
                self._called_modules.observe_children()
        timeline = self.timeline
        timeline.note((tape.OPTIMIZED, timeline.clock()))

    def _add_optimizer(self, optimizer: Any) -> None:
        """Add a new optimizer and its modules."""
        self.optimizers.append(optimizer)
        self._ids_of_optimizers.add(id(optimizer))
        if self._searches_left == 0:
            return
        self._searches_left -= 1
        self._close_forward()
        self.timeline.mark(tape.OUTSIDE)  # The step does not include our search.
        new_modules: list[nn.Module] = []
        for module in self._find_modules(optimizer):
            if not any(known is module for known in self.modules):
                new_modules.append(module)
        self.modules += new_modules
        self._called_modules.observe(new_modules)
        self.timeline.mark(tape.OPTIMIZER)

    def _marked_scaler(self, step: Function) -> Function:
        """Mark the step of a ``GradScaler`` like that of its optimizer.

        The scaler may skip the optimizer's step; the step of the loop is done in any case.
        """

        def marked_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            is_marked = False
            if not _is_compiling():
                is_marked = self._run_guarded(self._begin_scaled_step, optimizer)
            if not is_marked:
                return step(scaler, optimizer, *args, **kwargs)
            try:
                result = step(scaler, optimizer, *args, **kwargs)
            except BaseException:
                self._run_guarded(self._fail_optimizer)
                raise
            self._run_guarded(self._end_optimizer)
            return result

        return marked_step

    def _begin_scaled_step(self, optimizer: Any) -> bool:
        """Note that a scaler is about to step ``optimizer``; return whether that is marked."""
        if self._marked_thread.refuses_call():
            return False
        is_within_phase = bool(self._named_phases) or self._optimizer_depth > 0
        if is_within_phase:
            return False
        self._begin_optimizer(getattr(optimizer, "optimizer", optimizer))
        return True

    def _fail_optimizer(self) -> None:
        """End the phase of an optimizer's step that raised; the step of the loop is not done."""
        self.timeline.mark(tape.FAIL)
        self._end_optimizer(has_stepped=False)

    # -- functions that are a phase each

    def _marked(self, code: int, function: Function) -> Function:
        """Return ``function`` with its calls marked as the phase ``code``, except within that phase or a validation."""
        guard = self._guard

        def marked_function(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return function(*args, **kwargs)
            try:
                is_marked = self._begin_function(code)
            except BaseException as error:
                guard.handle(error)
                is_marked = False
            if not is_marked:
                return function(*args, **kwargs)
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self._run_guarded(partial(self._end_function, code, has_failed=True))
                raise
            try:
                self._end_function(code)
            except BaseException as error:
                guard.handle(error)
            return result

        return marked_function

    def _begin_function(self, code: int) -> bool:
        """Note that a function whose calls are the phase ``code`` is called; return whether this call is marked.

        It is not marked within the same phase or a named one, in another thread, and outside of the steps.
        """
        is_within_phase = code in self._running_phases or bool(self._named_phases)
        if is_within_phase:
            return False
        thread = self._marked_thread
        if get_ident() != thread.number and thread.refuses_call():
            return False
        # before the next check, because rollouts are outside of the steps
        if code == tape.BACKWARD and self._rollouts.was_last_call:
            self._rollouts.note_loss_of_rollout()
        if self._is_outside:
            return False
        # Gradients may be cleared between the model's call and backward, while forward stays open.
        if self._forward == "in loss" and code != tape.ZERO_GRAD:
            self._close_forward()
        if code == tape.BACKWARD:
            self._count_backward()
        timeline = self.timeline
        self._running_phases.add(code)
        timeline.note((code, timeline.clock()))
        return True

    def _end_function(self, code: int, has_failed: bool = False) -> None:
        """Note that the function whose call is the phase ``code`` has returned or, if it ``has_failed``, raised."""
        self._running_phases.discard(code)
        if has_failed:
            self.timeline.mark(tape.FAIL)
        timeline = self.timeline
        timeline.note((tape.LEAVE, timeline.clock()))

    def _count_backward(self) -> None:
        """Count a backward pass, and mark the methods by which the program ran the forward pass before it."""
        self._step.backwards += 1
        if self._called_modules.methods_of_calls:
            self._called_modules.mark_methods_of_calls()
        # If the marks were installed within a step, the pass may be of that step.
        may_be_of_partial_step = self._marked_thread.began_in_partial_step
        if not self._has_seen_step and not may_be_of_partial_step:
            self._backwards_outside += 1

    # -- phases that the program names

    def begin_phase(self, code: int) -> bool:
        """Begin a phase that the program names; return whether it is marked.

        It is not marked in another thread, in a step whose beginning was not seen, and in a validation.
        """
        return bool(self._run_guarded(self._begin_named_phase, code))

    def end_phase(self, code: int, error: BaseException | None) -> None:
        """End the innermost phase ``code`` that the program named; ``error`` is what was raised in it, or None."""
        self._run_guarded(self._end_named_phase, code, error)

    def _begin_named_phase(self, code: int) -> bool:
        """Begin the phase ``code``, which the program names; return whether it is marked."""
        if self._marked_thread.refuses_call():
            return False
        # A step begins with its first batch, or with the model's call if no batch is seen.
        is_forward_without_batch = code == tape.FORWARD and self._step.batches == 0
        can_begin_step = code == tape.DATA or is_forward_without_batch
        if can_begin_step:
            if self._is_validation(self.modules):
                self._go_outside(VALIDATION)
                return False
            is_within_named_phase = bool(self._named_phases)
            if not is_within_named_phase:
                self._end_step_if_done()
            if is_forward_without_batch and self._is_outside:
                self._continue_step()
            self._is_outside = False
            self._has_seen_step = True
        # Gradients may be cleared between the model's call and backward, while forward stays open.
        if code != tape.ZERO_GRAD:
            self._close_forward()
        if code == tape.DATA:
            self._step.batches += 1
        elif code == tape.FORWARD:
            self._step.calls += 1
        elif code == tape.BACKWARD:
            self._count_backward()
        self._named_phases.append(code)
        self.timeline.mark(code)
        return True

    def _end_named_phase(self, code: int, error: BaseException | None) -> None:
        """End the innermost phase ``code`` that the program named; ``error`` is what was raised in it, or None."""
        if code not in self._named_phases:
            # It was still open when its step ended, and was closed there.
            return
        # ``remove`` takes the first match, so the phases are reversed while it removes the innermost, the last match.
        self._named_phases.reverse()
        self._named_phases.remove(code)
        self._named_phases.reverse()
        if error is not None:
            self.timeline.mark(tape.FAIL)
        if code != tape.OPTIMIZER:
            self.timeline.mark(tape.LEAVE)
            return
        if error is None:
            self.counter.is_step_done = self._has_seen_step
        self.timeline.mark(tape.OPTIMIZED)

    def _close_named_phases(self) -> None:
        """End the named phases that are still open at the end of a step, and report each."""
        for code in reversed(self._named_phases):
            problem = "was still open when its step ended, and was closed there"
            self._report_once(f"phase {PHASES[code]} {problem}")
            end_code = tape.OPTIMIZED if code == tape.OPTIMIZER else tape.LEAVE
            self.timeline.mark(end_code)
        self._named_phases.clear()

    # -- shared by all marks

    def _run_guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``call``; if it raises, handle the error in the guard and return None."""
        try:
            return call(*args)
        except BaseException as error:
            self._guard.handle(error)
            return None

    def _report_once(self, text: str, *, prints: bool = True) -> None:
        if text not in self._reported_texts:
            self._reported_texts.add(text)
            self._report(text, prints=prints)

    def _report_what_was_not_seen(self) -> None:
        """Report which parts of the steps have no marks, and why."""
        if self._backwards_outside > 0:
            times = "once"
            if self._backwards_outside > 1:
                times = f"{self._backwards_outside} times"
            self._report_once(
                f"backward was called {times} outside of all steps; no figure includes this"
            )
        calls_of_other_threads = self._marked_thread.calls_of_other_threads
        if calls_of_other_threads > 0 and self._step.ended_steps == 0:
            calls = f"{calls_of_other_threads} calls came from another thread"
            self._report_once(f"{calls}: call profile() in the thread that trains")
        if self._step.ended_steps == 0:
            return
        # The table of these steps follows and shows the notes, so they are not printed here too.
        if self._step.steps_with_forward == 0:
            self._report_once(
                "no call of the model was seen, so the time of forward counts as other: call model(batch) instead of "
                "model.forward(batch); if a compiled function calls it, mark that call: "
                + _MARKED_PHASE.format(phase="forward"),
                prints=False,
            )
        if self._step.steps_with_loader == 0:
            self._report_once(
                "no batch came from a DataLoader, so the time in which the loop makes its batches counts as other. To "
                f"time it as data, mark that code: {_MARKED_PHASE.format(phase='data')}",
                prints=False,
            )


def _autocast_of(module: nn.Module) -> Autocast:
    """Return the present state of autocast on the device of ``module``."""
    parameter = next(module.parameters(), None)
    device_type = "cpu" if parameter is None else parameter.device.type
    return Autocast(
        torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    )

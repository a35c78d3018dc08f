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
``Timeline.mark`` and the first check of ``_refuses_call`` are written out in the functions that every step runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.utils.data import DataLoader

from lm_profiler.analysis.watch.ledger import EPOCH, LAST_BATCH, VALIDATION
from lm_profiler.callbacks.marks.loader_passes import DEAD_REFERENCE, LoaderPasses
from lm_profiler.callbacks.marks.model_methods import (
    ModelMethod,
    marked_method,
    methods_of,
    running_methods,
)
from lm_profiler.callbacks.marks.module_calls import MODULE_CALLS
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
from lm_profiler.measure.counts.recompiles import is_compiled, is_wrapped_by_compiler
from lm_profiler.record.parts import PHASES

_is_compiling = torch.compiler.is_compiling
_is_training = attrgetter("training")

# functions that move a batch to the device, by their module
_TRANSFERS = (
    ("lightning.fabric.wrappers", "move_data_to_device"),
    ("accelerate.data_loader", "send_to_device"),
)

# A call without gradients counts as part of a step if steps have needed at least this many of them so far.
_FEWEST_ROLLOUTS = 3

# how a program marks a phase that no hook sees
_MARKED_PHASE = "`with run.phase('{phase}'):`, inside of `with lm_profiler.profile(model, optimizer) as run:`"

NESTED_DATA = "run.data is used inside another run.data: the batches of both count in the same steps"

# Hooks are added to the children of modules whose calls are not seen, down to this depth.
_MOST_LEVELS = 3
_MOST_SEARCHES = 8  # for the modules of new optimizers; each takes some 0.3 s
# In so many steps, the methods are searched by which the program calls a model that is not called itself.
_METHOD_SEARCH_STEPS = 8


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
        note_call: receives the model and the arguments of its first call in a step.
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
        self.batches_per_step: int | None = None  # of the last step
        self.autocast: Autocast | None = None
        self._count_batch = count_batch
        # None after the first call
        self._note_call: Callable[[nn.Module, Any], object] | None = note_call
        self._find_modules = find_modules
        self._report = report
        self._guard = timeline.guard
        self._thread = get_ident()
        # the thread whose calls are marked: ``_thread``, or 0 while no calls are marked
        self._marked_thread = 0
        self._replaced = Replacements()
        self._undo = ExitStack()  # removes the modules' hooks
        self._hooked_modules: list[nn.Module] = []  # the innermost modules with hooks
        self._levels_left = _MOST_LEVELS
        self._searches_left = _MOST_SEARCHES
        # modules whose methods and children are marked, because the program does not call them as ``module(batch)``
        self._uncalled_modules: list[nn.Module] = []
        # their methods, by the code that these run
        self._methods: dict[CodeType, ModelMethod] = {}
        self._marked_methods: set[ModelMethod] = set()
        self._method_search_steps_left = 0
        # for the marked calls since the last backward pass: the methods of these modules on the stack, the innermost
        # first
        self._methods_of_calls: set[tuple[ModelMethod, ...]] = set()
        self._is_active = False

        # what runs now
        self._running_phases: set[int] = set()  # the phases whose function runs
        # phases that the program names with ``run.phase``, the innermost last
        self._named_phases: list[int] = []
        self._forward_depth = 0  # of nested calls of hooked modules
        self._optimizer_depth = 0  # of nested steps of optimizers
        self._forward_is_marked = False  # whether the outermost call began a phase
        # whether that call has returned, but the phase goes on to include the loss
        self._forward_is_open = False
        # whether the loop validates or is between epochs, so that it is not within a step
        self._is_outside = False

        # what happened before
        self._began_amid_step = False  # whether the hooks were added within a step
        self._is_amid_step = False  # whether that step still runs
        self._has_begun = False  # whether a step began after the hooks were added
        # steps before which a model in training mode was called without gradients (rollouts of reinforcement learning)
        self._steps_after_rollout = 0
        self._had_rollout = False  # whether the running step is one of them
        # Calls of models in training mode without gradients, outside of steps; those of them that a backward pass
        # followed without another call; and whether the last call of a model was one of them.
        self._rollouts = 0
        self._rollouts_for_losses = 0
        self._last_call_was_rollout = False
        self._has_trained = False  # whether a model was called in training mode
        # whether the next batch may be the first of a loop, or of an outer loop that continues
        self._checks_next_loop = True
        # returns the iterator from which the last such batch came
        self._earlier_iterator_ref: Callable[[], Any] = DEAD_REFERENCE
        # in the running step: batches from a loader, calls of models, and backward passes
        self._batches = 0
        self._calls = 0
        self._backwards = 0

        # for ``_report_what_was_not_seen``
        self._ended_steps = 0
        self._steps_with_loader = 0
        self._steps_with_forward = 0
        # calls of models in validations, and those for which autograd recorded a graph
        self._validation_calls = 0
        self._validation_calls_with_gradients = 0
        self.passes = LoaderPasses()
        self._passes_guard = Guard("passes over loaders", report)
        self._backwards_outside = 0
        self._calls_of_other_threads = 0
        self._reported_texts: set[str] = set()

    # -- putting the marks there, and taking them away

    def install(self) -> None:
        """Add all marks to torch and to the modules. If an optimizer steps now, marks count when its step has ended."""
        self._is_active = True
        self._began_amid_step = OPTIMIZER_HOOKS.is_in_hook
        self._is_amid_step = OPTIMIZER_HOOKS.is_in_hook
        if not self._is_amid_step:
            self._marked_thread = self._thread
        self._hook(self.modules)
        OPTIMIZER_HOOKS.attach(self._begin_step_of, self._end_step_of, self._guard)
        replace = self._replaced.replace
        replace(torch.autograd, "backward", partial(self._marked, tape.BACKWARD))
        # a function → what makes its marked version
        wraps = {
            function: partial(self._marked, tape.CLIP)
            for function in clipping_functions()
        }
        for module_name, function_name in _TRANSFERS:
            function = getattr(sys.modules.get(module_name), function_name, None)
            if function is not None:
                wraps[function] = partial(self._marked, tape.TRANSFER)
        self._replaced.replace_everywhere(wraps)
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
        if not self._is_active:
            OPTIMIZER_HOOKS.detach()
            return
        self._is_active = False
        self._marked_thread = 0
        with ExitStack() as undo:  # calls each of them, even if another one fails
            undo.callback(OPTIMIZER_HOOKS.detach)
            undo.callback(self._replaced.undo)
            undo.callback(self._undo.close)
        self._report_what_was_not_seen()

    def count_only(self) -> None:
        self.timeline.stop()

    def close_step(self) -> None:
        self._close_named_phases()
        self._end_step_if_done()

    def _hook(self, modules: Sequence[nn.Module]) -> None:
        """Mark the calls of ``modules``; a module that was compiled in place gets no hooks."""
        self._hooked_modules = list(modules)
        for module in modules:
            # A module compiled in place would be compiled again with the hooks, and then not call them.
            if is_compiled(module) and not is_wrapped_by_compiler(module):
                continue
            stop = MODULE_CALLS.observe(
                module, self._begin_forward, self._end_forward, self._guard
            )
            self._undo.callback(stop)

    def _hook_children(self) -> None:
        """Mark the calls of the modules' children, because the program calls these and not the whole module.

        Mark ``forward``, too, which the program may call directly. Other methods are found when they run: see
        ``_mark_methods_of_calls``.
        """
        self._levels_left -= 1
        parts: list[nn.Module] = []
        for module in self._hooked_modules:
            if is_compiled(module):
                continue
            parts += module.children()
            self._uncalled_modules.append(module)
            methods = methods_of(module)
            self._methods.update(methods)
            for method in methods.values():
                if method.name == "forward":
                    self._mark_method(method)
        self._hook(parts)
        self._method_search_steps_left = _METHOD_SEARCH_STEPS

    def _mark_method(self, method: ModelMethod) -> None:
        """Mark ``method`` of the modules that the program does not call: its calls count as calls of the module."""
        if method not in self._marked_methods:
            self._marked_methods.add(method)
            begins = self._guard.wrap(self._begin_method)
            ends = self._guard.wrap(self._end_forward)
            mark = partial(marked_method, begins=begins, ends=ends)
            self._replaced.replace(method.kind, method.name, mark)

    def _begin_method(self, module: Any, args: Any, kwargs: Any) -> bool:
        """Note that a marked method of ``module`` is called; return whether the program does not call the module."""
        if not any(module is uncalled for uncalled in self._uncalled_modules):
            return False
        self._begin_forward(module, args, kwargs)
        return True

    def _mark_methods_of_calls(self) -> None:
        """Mark the methods by which the program ran the forward passes since the last backward pass.

        For each marked call, this is the outermost method of the model on its stack that is no longer running: a method
        that also runs this backward pass, such as that of a whole training step or epoch, is no forward pass.
        """
        methods_of_calls = self._methods_of_calls
        self._methods_of_calls = set()
        around_backward = running_methods(self._methods)
        for methods in methods_of_calls:
            forward_methods = [
                method for method in methods if method not in around_backward
            ]
            if forward_methods:
                self._mark_method(forward_methods[-1])

    # -- steps

    def _end_step_if_done(self) -> None:
        """Close the open forward; then, if the optimizer has stepped, end the running step.

        Called before whatever can begin a step: a batch, a call of the model, or a phase that is named data.
        """
        if self._forward_is_open:
            self._close_forward()
        if not self.counter.is_step_done:
            return
        # a backward pass, but no call of a hooked module: the program calls its children
        has_unseen_calls = self._backwards > 0 and self._calls == 0
        if has_unseen_calls and self._levels_left > 0:
            self._hook_children()
        self._count_ended_step()
        self.counter.end_step_if_done()

    def _count_ended_step(self) -> None:
        """Count what the ended step had, and begin to count for the next step."""
        self._ended_steps += 1
        self._steps_after_rollout += self._had_rollout
        self._had_rollout = False
        self._steps_with_loader += self._batches > 0
        self._steps_with_forward += self._calls > 0
        self.batches_per_step = max(self._batches or self._backwards, 1)
        self._batches = 0
        self._calls = 0
        self._backwards = 0
        if self._method_search_steps_left > 0:
            self._method_search_steps_left -= 1
            self._methods_of_calls.clear()

    def _is_validation(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether a call of ``modules`` or of a loader is for validation now.

        It is if all modules are in evaluation mode, or if gradients are off between steps.
        """
        if self._has_trained and modules and not any(map(_is_training, modules)):
            return True
        # After the last batch of an epoch the loop is outside of its steps, and the next step has not begun.
        is_between_steps = (
            self.counter.is_step_done or self._is_outside or not self._has_begun
        )
        return is_between_steps and not torch.is_grad_enabled()

    def _are_rollouts_needed(self) -> bool:
        """Return whether steps need the calls of a model in training mode without gradients.

        They do if such a call came before most steps so far, as in reinforcement learning, where it chooses the next
        actions: a validation would be rarer. They also do if a backward pass, and no other call of a model, followed
        most of these calls: it is that of a loss of their results, such as the temperature in soft actor-critic.
        """
        before_most_steps = 2 * self._steps_after_rollout >= self._ended_steps
        if before_most_steps and self._steps_after_rollout >= _FEWEST_ROLLOUTS:
            return True
        most_are_for_losses = 2 * self._rollouts_for_losses >= self._rollouts
        return most_are_for_losses and self._rollouts_for_losses >= _FEWEST_ROLLOUTS

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
        """Begin or continue a step without a new batch: after the end of the data, with one that the loop had."""
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
        if not self._refuses_call():
            self._report_once(NESTED_DATA)

    def _end_loop(self) -> None:
        if not self._refuses_call():
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
        if get_ident() != self._marked_thread and self._refuses_call():
            return False
        if self._named_phases:
            if self._named_phases[-1] == tape.DATA:
                return False
            self._close_named_phases()
        if self._is_validation(self.modules):
            self._go_outside(VALIDATION)
            return False
        if self._checks_next_loop:
            self._note_loop_begin(iterator)
        self._end_step_if_done()
        self._is_outside = False
        self._has_begun = True
        self._batches += 1
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
        self._batches -= 1
        is_end_of_data = isinstance(error, StopIteration)
        if not is_end_of_data:
            self.timeline.mark(tape.FAIL)
        self.timeline.mark(tape.LEAVE)
        if is_end_of_data:
            self.passes.finish()
            self._go_outside(EPOCH)
            self._note_loop_end(iterator)

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
        if self._refuses_call() or self._is_validation(self.modules):
            return
        begins_epoch = self.passes.is_last_pass_finished
        self.passes.begin(loader)
        is_in_fetch = tape.DATA in self._running_phases or bool(self._named_phases)
        if begins_epoch and not is_in_fetch:
            self._end_step_if_done()
            self._go_outside(EPOCH)

    @property
    def restarts_loader(self) -> bool | None:
        """Whether nearly each step begins a pass over a loader's data and does not finish it; None without a loader."""
        if self._steps_with_loader == 0:
            return None
        return self.passes.are_begun_in(self._steps_with_loader)

    @property
    def validates_with_gradients(self) -> bool | None:
        """Whether autograd records a graph in validations, as it does without ``torch.no_grad()``; None without any."""
        if self._validation_calls == 0:
            return None
        return 2 * self._validation_calls_with_gradients > self._validation_calls

    def _note_loop_begin(self, iterator: Any) -> None:
        """Note which loop fetches a batch now.

        If it is the earlier loop, which continues, the loop that has ended in between ran within it: report that.
        """
        self._checks_next_loop = False
        if iterator is not None and iterator is self._earlier_iterator_ref():
            self._report_once(
                "a loop over batches runs within a step of another loop: each optimizer step counts as a step"
            )
            return  # the reference stays, because the earlier loop may be interrupted again
        # a weak reference, so that the workers of a loader can end with its iterator
        self._earlier_iterator_ref = DEAD_REFERENCE
        # Python's own iterators do not support weak references.
        with suppress(TypeError):
            self._earlier_iterator_ref = ref(iterator)

    def _note_loop_end(self, iterator: Any) -> None:
        """Note that the loop over ``iterator`` has ended.

        If its steps had one batch each, it may have run within another loop: the next fetch shows whether it did.
        """
        if iterator is self._earlier_iterator_ref():
            # A loader may reuse the iterator for the next epoch.
            self._earlier_iterator_ref = DEAD_REFERENCE
        may_be_inner_loop = self._batches == 0 and self.batches_per_step == 1
        if may_be_inner_loop:
            self._checks_next_loop = True

    # -- forward

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the phase forward, unless the call is within another call, a backward pass or a validation.

        ``args`` and ``kwargs`` are those of the call of ``module``, whose hook this is.
        """
        if get_ident() != self._marked_thread and self._refuses_call():
            return
        self._forward_depth += 1
        is_recomputation = tape.BACKWARD in self._running_phases
        if self._forward_depth > 1 or is_recomputation or self._named_phases:
            return
        self._last_call_was_rollout = False
        if self._is_validation([module]):
            if module.training:
                self._note_rollout()
            is_of_step = module.training and self._are_rollouts_needed()
            if not is_of_step:
                self._go_outside(VALIDATION)
                self._validation_calls += 1
                self._validation_calls_with_gradients += torch.is_grad_enabled()
            return
        if not torch.is_grad_enabled():
            # A call within a step, for example to make the batch, is no forward pass.
            return
        if self._batches == 0:
            self._end_step_if_done()
            batch = (*args, kwargs) if kwargs else args
            self._count_batch(batch)
        if self._forward_is_open:
            self._close_forward()
        if self._is_outside:
            self._continue_step()
        self._has_begun = True
        self._has_trained = self._has_trained or module.training
        self._calls += 1
        if self._note_call is not None:
            self.autocast = _autocast_of(module)
            note_call = self._note_call
            self._note_call = None
            note_call(module, (args, kwargs))
        if self._method_search_steps_left > 0:
            self._methods_of_calls.add(running_methods(self._methods))
        self._forward_is_marked = True
        timeline = self.timeline
        timeline.note((tape.FORWARD, timeline.clock()))

    def _note_rollout(self) -> None:
        """Note that a model in training mode is called without gradients outside of steps."""
        self._had_rollout = True
        self._last_call_was_rollout = True
        self._rollouts += 1

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the call of a model ends; if a loader made the batch, forward stays open to include the loss."""
        if get_ident() != self._marked_thread and self._refuses_call():
            return
        began_before_hooks = self._forward_depth == 0
        if began_before_hooks:
            return
        self._forward_depth -= 1
        if self._forward_depth > 0 or not self._forward_is_marked:
            return
        self._forward_is_marked = False
        has_failed = output is None and sys.exc_info()[0] is not None
        if has_failed:
            self.timeline.mark(tape.FAIL)
        # If a loader made the batch, only the loss comes between the model and backward. Without a loader, the program
        # may make the next batch there.
        if self._batches > 0 and not has_failed:
            self._forward_is_open = True
        else:
            self.timeline.mark(tape.LEAVE)

    def _close_forward(self) -> None:
        """End the phase forward, if it stayed open after the model's call to include the loss."""
        if self._forward_is_open:
            timeline = self.timeline
            self._forward_is_open = False
            timeline.note((tape.LEAVE, timeline.clock()))

    # -- optimizers

    def _begin_step_of(self, optimizer: Any) -> None:
        """Note that ``optimizer`` begins to step."""
        if get_ident() != self._marked_thread and self._refuses_call():
            return
        if not self._named_phases:
            self._begin_optimizer(optimizer)

    def _end_step_of(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped, so that the step of the loop is done."""
        if self._is_amid_step:
            self._is_amid_step = False
            self._marked_thread = self._thread
            return
        if get_ident() != self._marked_thread and self._refuses_call():
            return
        if self._named_phases:
            self.counter.is_step_done = self._has_begun
        else:
            self._end_optimizer()

    def _begin_optimizer(self, optimizer: Any) -> None:
        """Begin the phase optimizer, unless another optimizer that steps has called this one."""
        if id(optimizer) not in self._ids_of_optimizers:
            self._add_optimizer(optimizer)
        self._optimizer_depth += 1
        if self._optimizer_depth == 1:
            if self._forward_is_open:
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
            self.counter.is_step_done = self._has_begun
            if not self._has_begun and self._levels_left > 0:
                # Neither a batch nor a call of a hooked module began the step: the program calls their children.
                self._hook_children()
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
        hooked_before = self._hooked_modules
        self._hook(new_modules)
        self._hooked_modules += hooked_before
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
        if self._refuses_call() or self._named_phases or self._optimizer_depth > 0:
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
        """Note that a function is called that makes up the phase ``code``; return whether the call is marked.

        It is not marked within a phase, in another thread, and outside of the steps.
        """
        is_within_phase = code in self._running_phases or bool(self._named_phases)
        if is_within_phase:
            return False
        if get_ident() != self._marked_thread and self._refuses_call():
            return False
        # before the next check, because rollouts are outside of the steps
        if code == tape.BACKWARD and self._last_call_was_rollout:
            self._last_call_was_rollout = False
            self._rollouts_for_losses += 1
        if self._is_outside:
            return False
        # Gradients may be cleared between the model's call and backward, while forward stays open.
        if self._forward_is_open and code != tape.ZERO_GRAD:
            self._close_forward()
        if code == tape.BACKWARD:
            self._count_backward()
        timeline = self.timeline
        self._running_phases.add(code)
        timeline.note((code, timeline.clock()))
        return True

    def _end_function(self, code: int, has_failed: bool = False) -> None:
        """Note that the function has returned, or raised, that makes up the phase ``code``."""
        self._running_phases.discard(code)
        if has_failed:
            self.timeline.mark(tape.FAIL)
        timeline = self.timeline
        timeline.note((tape.LEAVE, timeline.clock()))

    def _count_backward(self) -> None:
        self._backwards += 1
        if self._methods_of_calls:
            self._mark_methods_of_calls()
        if not self._has_begun and not self._began_amid_step:
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
        if self._refuses_call():
            return False
        # A step begins with its first batch, or with the model's call if no batch is seen.
        is_forward_without_batch = code == tape.FORWARD and self._batches == 0
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
            self._has_begun = True
        # Gradients may be cleared between the model's call and backward, while forward stays open.
        if code != tape.ZERO_GRAD:
            self._close_forward()
        if code == tape.DATA:
            self._batches += 1
        elif code == tape.FORWARD:
            self._calls += 1
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
            self.counter.is_step_done = self._has_begun
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

    def _refuses_call(self) -> bool:
        """Return whether a call is not to be marked: in another thread, or in a step whose beginning was not seen.

        Count the calls of other threads.
        """
        if not self._is_active or self._is_amid_step:
            return True
        if get_ident() == self._thread:
            return False
        self._calls_of_other_threads += 1
        return True

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
        if self._calls_of_other_threads > 0 and self._ended_steps == 0:
            calls = f"{self._calls_of_other_threads} calls came from another thread"
            self._report_once(f"{calls}: call profile() in the thread that trains")
        if self._ended_steps == 0:
            return
        # The table of these steps follows and shows the notes, so they are not printed here too.
        if self._steps_with_forward == 0:
            self._report_once(
                "no call of the model was seen, so the time of forward counts as other: call model(batch) instead of "
                "model.forward(batch); if a compiled function calls it, mark that call: "
                + _MARKED_PHASE.format(phase="forward"),
                prints=False,
            )
        if self._steps_with_loader == 0:
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

"""Marks at the optimizers themselves, and under manual optimization at what the user calls in place of Lightning.

The optimizer's phase is what runs inside of its ``step``, without what its closure does, under automatic and manual
optimization alike. Under manual optimization the user calls ``zero_grad``, ``clip_gradients`` and ``manual_backward``
or ``backward``, none of which is an action of Lightning's. These functions are wrapped until the run is over: torch's
own hooks of an optimizer are not called where its ``step`` raises, nor around a ``step`` that the user put there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, update_wrapper
from threading import get_ident
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import Module
from torch.optim import Optimizer

from lm_profiler.callbacks.marks.namespaces import lightning_base_of
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Span, Timeline


class OptimizerMarks:
    """The marks at the optimizers of one run, until ``undo`` is closed."""

    def __init__(self, timeline: Timeline, undo: ExitStack) -> None:
        self._timeline = timeline
        self._undo = undo

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Mark every optimizer of ``trainer``, and under manual optimization the functions that the user calls."""
        for optimizer in trainer.optimizers:
            # Lightning's own, where the user has no optimizer
            is_stand_in = lightning_base_of(optimizer) != ""
            if is_stand_in:
                continue
            _replace_method(
                optimizer, "step", _MarkedStep(optimizer, self._timeline), self._undo
            )
        if not module.automatic_optimization:
            self._mark_what_the_user_calls(trainer, module)

    def _mark_what_the_user_calls(
        self, trainer: Trainer, module: LightningModule
    ) -> None:
        """Mark backward, clipping and clearing of gradients, which the user calls under manual optimization."""
        backward = Span(self._timeline, tape.BACKWARD)
        self._wrap_in_context(module, "manual_backward", backward)
        # ``loss.backward()`` calls this function of torch, and so does ``manual_backward``, inside of which it changes
        # nothing: both are the same phase.
        self._wrap_in_context(torch.autograd, "backward", OnThisThread(backward))
        self._wrap_in_context(module, "clip_gradients", Span(self._timeline, tape.CLIP))
        # Lightning wraps each optimizer in an instance of a subclass, which does not see attributes of the inner one.
        wrappers = LightningModule.optimizers(module)
        if not isinstance(wrappers, list):
            wrappers = [wrappers]
        for optimizer in (*trainer.optimizers, *wrappers):
            self._wrap_in_context(
                optimizer, "zero_grad", Span(self._timeline, tape.ZERO_GRAD)
            )

    def _wrap_in_context(
        self, owner: Any, name: str, context: AbstractContextManager[None]
    ) -> None:
        wrap_in_context(owner, name, context, self._timeline.guard, self._undo)


class OnThisThread(AbstractContextManager[None]):
    """Enters ``span`` only in the thread that made it: other threads may call the same function, and have no phases."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._thread = get_ident()

    def __enter__(self) -> None:
        if get_ident() == self._thread:
            self._span.__enter__()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if get_ident() == self._thread:
            self._span.__exit__(kind, value, traceback)


def wrap_in_context(
    owner: Any,
    name: str,
    context: AbstractContextManager[None],
    guard: Guard,
    undo: ExitStack,
) -> None:
    """Have each call of ``owner.name`` run inside ``context``, guarded by ``guard``, until ``undo`` is closed.

    Raises AttributeError if ``owner`` has no such method, or does not let it be replaced.
    """
    _replace_method(owner, name, _MethodInContext(owner, name, context, guard), undo)


def call_before(
    owner: Any, name: str, note: Callable[[Any], object], undo: ExitStack
) -> None:
    """Have ``note``, which raises nothing, called with the argument of each call of ``owner.name`` before it."""
    _replace_method(owner, name, _NotedMethod(owner, name, note), undo)


def _replace_method(owner: Any, name: str, wrapper: _Wrapper, undo: ExitStack) -> None:
    attributes = getattr(owner, "__dict__", {})
    replaced = attributes.get(name)
    setattr(owner, name, wrapper)
    undo.callback(_restore_method, owner, name, replaced, wrapper)


def _restore_method(owner: Any, name: str, replaced: Any, wrapper: _Wrapper) -> None:
    """Give ``owner`` back what it had in place of ``wrapper``, unless somebody has wrapped that since."""
    attributes = getattr(owner, "__dict__", {})
    has_another = name in attributes and attributes[name] is not wrapper
    if has_another:
        return
    if replaced is not None:
        setattr(owner, name, replaced)
    elif name in attributes:  # delattr only where needed: a Mock would lose the method
        del attributes[name]
    else:
        delattr(owner, name)


class _Wrapper:
    """Stands in for a method of ``owner``. A copy of the owner, or its pickle, has the plain method instead."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._method = getattr(owner, name)
        update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)


class _MethodInContext(_Wrapper):
    """A method inside a context."""

    def __init__(
        self, owner: Any, name: str, context: AbstractContextManager[None], guard: Guard
    ) -> None:
        super().__init__(owner, name)
        self._context = context
        self._guard = guard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guard = self._guard
        context = self._context
        guard.run(context.__enter__)
        try:
            result = self._method(*args, **kwargs)
        except BaseException as error:
            guard.run(context.__exit__, type(error), error, error.__traceback__)
            raise
        guard.run(context.__exit__, None, None, None)
        return result


class _NotedMethod(_Wrapper):
    """A method whose first argument is noted before each call."""

    def __init__(self, owner: Any, name: str, note: Callable[[Any], object]) -> None:
        super().__init__(owner, name)
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            self._note(args[0])
        return self._method(*args, **kwargs)


class _MarkedStep(_Wrapper):
    """The ``step`` of an optimizer as a phase, without what its closure does."""

    def __init__(self, optimizer: Optimizer, timeline: Timeline) -> None:
        super().__init__(optimizer, "step")
        self._timeline = timeline
        # Torch's own optimizers, and the one of a rehearsal, call their closure before anything else. Their phase
        # begins where it ends, and not also for a moment before it.
        is_torchs_own = getattr(self._method, "__module__", "").startswith(
            "torch.optim."
        )
        self._calls_closure_first = is_torchs_own or getattr(
            optimizer, "calls_closure_first", False
        )
        self._is_open = False  # whether the phase is running

    @property
    def __func__(self) -> Any:
        """The plain function: a scheduler of torch that is made during the run replaces ``step`` by way of it."""
        return self._method.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        timeline = self._timeline
        guard = timeline.guard
        closure: Any = args[0] if args else kwargs.get("closure")
        # A step of the user's own may take something else at that place, such as a module.
        has_closure = callable(closure) and not isinstance(closure, Module)
        if has_closure:
            closure_outside_phase = partial(self._run_closure, closure)
            if args:
                args = (closure_outside_phase, *args[1:])
            else:
                kwargs["closure"] = closure_outside_phase
        if not (has_closure and self._calls_closure_first):
            self._begin_phase()
        try:
            result = self._method(*args, **kwargs)
        except BaseException:
            guard.run(timeline.mark, tape.FAIL)
            if self._is_open:
                self._end_phase()
            raise
        if self._is_open:
            # ``_end_phase``, written out
            self._is_open = False
            try:
                timeline.note((tape.OPTIMIZED, timeline.clock()))
            except BaseException as error:
                guard.handle(error)
        return result

    def _run_closure(
        self, closure: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the ``closure`` outside the optimizer's phase, which continues when it returns."""
        if self._is_open:
            self._end_phase()
        result = closure(*args, **kwargs)
        # ``_begin_phase``, written out, as this runs in each step of most optimizers
        timeline = self._timeline
        self._is_open = True
        try:
            timeline.note((tape.OPTIMIZER, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)
        return result

    # The next two run within steps: Guard.run and Timeline.mark are written out.

    def _begin_phase(self) -> None:
        """Begin the phase optimizer."""
        timeline = self._timeline
        self._is_open = True
        try:
            timeline.note((tape.OPTIMIZER, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

    def _end_phase(self) -> None:
        """End the phase optimizer, if it runs."""
        timeline = self._timeline
        self._is_open = False
        try:
            timeline.note((tape.OPTIMIZED, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

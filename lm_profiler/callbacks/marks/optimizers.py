"""Marks the steps of optimizers, and under manual optimization the functions that the user calls instead of Lightning.

The phase optimizer is the time inside an optimizer's ``step``, without its closure, under automatic and manual
optimization alike. Under manual optimization the user calls ``zero_grad``, ``manual_backward`` or ``backward``, and
``clip_gradients`` or torch's functions for it, which are no actions of Lightning. All these functions are wrapped until
the run ends. torch's own optimizer hooks are not enough: they are not called if ``step`` raises, nor if the user has
replaced it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, update_wrapper
from pkgutil import resolve_name
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import Module
from torch.optim import Optimizer

from lm_profiler.callbacks.marks.namespaces import lightning_base_of
from lm_profiler.callbacks.marks.torch_hooks import Function, Replacements
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Span, Timeline

_CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")  # of ``torch.nn.utils``


class OptimizerMarks:
    """The marks at the optimizers of one run, until ``undo`` is closed."""

    def __init__(self, timeline: Timeline, undo: ExitStack) -> None:
        self._timeline = timeline
        self._undo = undo

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Mark every optimizer of ``trainer``, and under manual optimization the functions that the user calls."""
        for optimizer in trainer.optimizers:
            # Lightning uses an optimizer class of its own if the user has no optimizer.
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
        # ``loss.backward()`` calls this function of torch. So does ``manual_backward``, inside of which a mark of the
        # same phase changes nothing. Other threads may call torch's functions too, which is not marked.
        self._wrap_in_context(torch.autograd, "backward", OnThisThread(backward))
        clip = Span(self._timeline, tape.CLIP)
        self._wrap_in_context(module, "clip_gradients", clip)
        self._mark_clipping_functions(OnThisThread(clip))
        # Lightning wraps each optimizer in an instance of a subclass, which does not see attributes of the inner one.
        wrappers = LightningModule.optimizers(module)
        if not isinstance(wrappers, list):
            wrappers = [wrappers]
        for optimizer in (*trainer.optimizers, *wrappers):
            self._wrap_in_context(
                optimizer, "zero_grad", Span(self._timeline, tape.ZERO_GRAD)
            )

    def _mark_clipping_functions(self, clip: OnThisThread) -> None:
        """Mark torch's functions for clipping, also in modules that have imported them by name."""
        utils = torch.nn.utils
        wrap_by_function: dict[Function, Callable[[Function], Function]] = {}
        for name in _CLIPPING_FUNCTIONS:
            marked = _MethodInContext(utils, name, clip, self._timeline.guard)
            # The function is read from ``utils``, because a program may have put its own there.
            function = getattr(utils, name)
            wrap_by_function[function] = partial(_return_marked, marked)
        replacements = Replacements()
        self._undo.callback(replacements.undo)
        replacements.replace_everywhere(wrap_by_function)

    def _wrap_in_context(
        self, owner: Any, name: str, context: AbstractContextManager[None]
    ) -> None:
        wrap_in_context(owner, name, context, self._timeline.guard, self._undo)


def _return_marked(marked: Function, function: Function) -> Function:
    """Return ``marked``, which replaces ``function`` in every module."""
    return marked


class OnThisThread(AbstractContextManager[None]):
    """Enters ``span`` only in the thread that made this object; calls in other threads are in no phase."""

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
    """Make each call of ``owner.name`` run inside ``context``, guarded by ``guard``, until ``undo`` is closed.

    Raises AttributeError if ``owner`` has no such method, or does not let it be replaced.
    """
    _replace_method(owner, name, _MethodInContext(owner, name, context, guard), undo)


def call_before(
    owner: Any, name: str, note: Callable[[Any], object], undo: ExitStack
) -> None:
    """Call ``note``, which raises nothing, before each call of ``owner.name``, with the argument of that call."""
    _replace_method(owner, name, _NotedMethod(owner, name, note), undo)


def _replace_method(owner: Any, name: str, wrapper: _Wrapper, undo: ExitStack) -> None:
    """Replace the method ``name`` of ``owner`` by ``wrapper`` until ``undo`` is closed."""
    attributes = getattr(owner, "__dict__", {})
    replaced = attributes.get(name)
    setattr(owner, name, wrapper)
    undo.callback(_restore_method, owner, name, replaced, wrapper)


def _restore_method(owner: Any, name: str, replaced: Any, wrapper: _Wrapper) -> None:
    """Replace ``wrapper`` by what ``owner`` had before, unless other code has replaced ``wrapper`` since then."""
    attributes = getattr(owner, "__dict__", {})
    has_another = name in attributes and attributes[name] is not wrapper
    if has_another:
        return
    if replaced is not None:
        setattr(owner, name, replaced)
    elif name in attributes:  # not by delattr, after which a Mock would lack the method
        del attributes[name]
    else:
        delattr(owner, name)


class _Wrapper:
    """Stands in for a method of ``owner``; a copy or a pickle of the owner has the plain method instead."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._method = getattr(owner, name)
        update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> Any:
        if isinstance(self._owner, ModuleType):  # which pickle does not support
            return resolve_name, (f"{self._owner.__name__}:{self._name}",)
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
        """Call the method within the context; no error of the context reaches training."""
        if torch.compiler.is_compiling():
            return self._method(*args, **kwargs)
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
        # torch's own optimizers, and that of a rehearsal, call their closure first. Then the phase begins only when the
        # closure returns, without a short first part before it.
        is_torchs_own = getattr(self._method, "__module__", "").startswith(
            "torch.optim."
        )
        self._calls_closure_first = is_torchs_own or getattr(
            optimizer, "calls_closure_first", False
        )
        self._is_open = False  # whether the phase is running

    @property
    def __func__(self) -> Any:
        """The plain function; torch's schedulers read it when they are made and replace ``step``."""
        return self._method.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's step as the phase optimizer, and its closure outside of this phase."""
        timeline = self._timeline
        guard = timeline.guard
        closure: Any = args[0] if args else kwargs.get("closure")
        # A user's own ``step`` may take something else as its first argument, such as a module.
        has_closure = callable(closure) and not isinstance(closure, Module)
        if has_closure:
            closure_outside_phase = partial(self._run_closure, closure)
            if args:
                args = (closure_outside_phase, *args[1:])
            else:
                kwargs["closure"] = closure_outside_phase
        if not (has_closure and self._calls_closure_first):
            self._mark(tape.OPTIMIZER)
        try:
            result = self._method(*args, **kwargs)
        except BaseException:
            guard.run(timeline.mark, tape.FAIL)
            if self._is_open:
                self._mark(tape.OPTIMIZED)
            raise
        if self._is_open:
            # ``_mark``, written out
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
            self._mark(tape.OPTIMIZED)
        result = closure(*args, **kwargs)
        # ``_mark``, written out, as this runs in each step of most optimizers
        timeline = self._timeline
        self._is_open = True
        try:
            timeline.note((tape.OPTIMIZER, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)
        return result

    def _mark(self, code: int) -> None:
        """Begin the phase optimizer (``tape.OPTIMIZER``), or end it (``tape.OPTIMIZED``).

        This runs within steps, so Guard.run and Timeline.mark are written out.
        """
        timeline = self._timeline
        self._is_open = code == tape.OPTIMIZER
        try:
            timeline.note((code, timeline.clock()))
        except BaseException as error:
            timeline.guard.handle(error)

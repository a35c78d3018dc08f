"""Marks at the optimizers themselves, where Lightning has no actions.

An optimizer's post-step hook marks exactly where its phase ends. Under manual optimization the user calls
``zero_grad``, ``manual_backward``, ``clip_gradients`` and perhaps a bare ``step``, none of which is an action: those
methods are wrapped on the instances.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, update_wrapper
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Span, Timeline


class OptimizerMarks:
    """The marks at the optimizers of one run, until ``undo`` is closed."""

    def __init__(self, timeline: Timeline, undo: ExitStack) -> None:
        self._timeline = timeline
        self._depth = 0
        self._undo = undo

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Mark every optimizer of ``trainer``, and under manual optimization the methods that the user calls."""
        manual = not module.automatic_optimization
        before_step = self._timeline.part.guard(self._before_step)
        for optimizer in trainer.optimizers:
            self._undo.callback(optimizer.register_step_post_hook(self._after_step).remove)
            # Its ``step`` may call that of a base class: torch fires the hooks around each of them.
            classes = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind)]
            if manual or len(classes) > 1:
                self._undo.callback(optimizer.register_step_pre_hook(before_step).remove)
        if manual:
            self._bracket(module, "manual_backward", at.BACKWARD)
            self._bracket(module, "clip_gradients", at.CLIP)
            # Lightning wraps each optimizer in an instance of a subclass, which does not see attributes of the inner
            # one.
            wrapped = LightningModule.optimizers(module)
            for owner in (*trainer.optimizers, *(wrapped if isinstance(wrapped, list) else [wrapped])):
                self._bracket(owner, "zero_grad", at.ZERO_GRAD)

    def _bracket(self, owner: Any, name: str, code: int) -> None:
        bracket(owner, name, Span(self._timeline, code), self._timeline.part, self._undo)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        timeline = self._timeline
        try:
            # Torch fires the hooks once for each class whose `step` runs: only the outermost call ends the phase. Where
            # no pre-hook counts, each call is one.
            self._depth -= 1
            if self._depth <= 0:
                self._depth = 0
                timeline.note((at.OPTIMIZED, timeline.clock()))
        except BaseException as error:
            timeline.part.failed(error)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._depth += 1
        # ``args`` begins with the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._timeline.mark(at.OPTIMIZER)
            return None
        around = update_wrapper(partial(self._run_closure, closure), closure)
        return ((args[0], around, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": around})

    def _run_closure(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the ``closure`` outside the optimizer's phase, which continues when it returns."""
        part = self._timeline.part
        part.run(self._timeline.mark, at.OPTIMIZED)
        try:
            result = closure(*args, **kwargs)
        except BaseException:
            part.run(self._timeline.mark, at.FAIL)
            raise
        part.run(self._timeline.mark, at.OPTIMIZER)
        return result


def bracket(owner: Any, name: str, context: AbstractContextManager[None], part: Guard, undo: ExitStack) -> None:
    """Have each call of ``owner.name`` run inside ``context``, guarded by ``part``, until ``undo`` is closed.

    Raises AttributeError where ``owner`` has no such method, or does not let it be replaced.
    """
    own = getattr(owner, "__dict__", {})
    replaced = own.get(name)
    setattr(owner, name, _Bracketed(owner, name, context, part))
    if replaced is not None:
        undo.callback(setattr, owner, name, replaced)
    else:  # delattr only where needed: a Mock would lose the method
        undo.callback(own.pop, name, None) if name in own else undo.callback(delattr, owner, name)


class _Bracketed:
    """A method of ``owner`` inside a context. A copy of the owner, or its pickle, has the plain method instead."""

    def __init__(self, owner: Any, name: str, context: AbstractContextManager[None], part: Guard) -> None:
        self._owner, self._name, self._context, self._part = owner, name, context, part
        self._method = getattr(owner, name)
        update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part, context = self._part, self._context
        part.run(context.__enter__)
        try:
            result = self._method(*args, **kwargs)
        except BaseException as error:
            part.run(context.__exit__, type(error), error, error.__traceback__)
            raise
        part.run(context.__exit__, None, None, None)
        return result

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)

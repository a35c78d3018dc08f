"""Marks at the optimizers themselves, where Lightning's actions do not reach.

An optimizer's post-step hook ends its phase exactly. Under manual optimization the user calls ``zero_grad``,
``manual_backward``, ``clip_gradients`` and perhaps a bare ``step``, none of which is an action: those calls are wrapped
on the instances.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lm_profiler.callbacks.marks.methods import bracket
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Span, Timeline


class OptimizerMarks:
    """Attached to the optimizers of one run; to close ``undo`` leaves no trace."""

    def __init__(self, timeline: Timeline, undo: ExitStack) -> None:
        self._timeline = timeline
        self._depth = 0
        self._undo = undo

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Mark every optimizer of ``trainer``, and under manual optimization what the user calls."""
        manual = not module.automatic_optimization
        before_step = self._timeline.part.guard(self._before_step)
        for optimizer in trainer.optimizers:
            self._undo.callback(optimizer.register_step_post_hook(self._after_step).remove)
            if manual or _steps_within_steps(optimizer):
                self._undo.callback(optimizer.register_step_pre_hook(before_step).remove)
        if manual:
            self._bracket(module, "manual_backward", at.BACKWARD)
            self._bracket(module, "clip_gradients", at.CLIP)
            # Lightning's wrappers are subclasses of the optimizers' own classes: they do not see the instances.
            wrapped = LightningModule.optimizers(module)
            for owner in (*trainer.optimizers, *(wrapped if isinstance(wrapped, list) else [wrapped])):
                self._bracket(owner, "zero_grad", at.ZERO_GRAD)

    def _bracket(self, owner: Any, name: str, code: int) -> None:
        bracket(owner, name, Span(self._timeline, code), self._timeline.part, self._undo)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        timeline = self._timeline
        try:
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
        around = update_wrapper(partial(self._without, closure), closure)
        return ((args[0], around, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": around})

    def _without(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The closure is not the optimizer's arithmetic, which goes on whenever it returns."""
        part = self._timeline.part
        part.run(self._timeline.mark, at.OPTIMIZED)
        try:
            result = closure(*args, **kwargs)
        except BaseException:
            part.run(self._timeline.mark, at.FAIL)
            raise
        part.run(self._timeline.mark, at.OPTIMIZER)
        return result


def _steps_within_steps(optimizer: Optimizer) -> bool:
    """Whether its ``step`` may call another class's: torch fires the hooks around each."""
    classes = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return sum("step" in vars(kind) for kind in classes) > 1

"""Marks at the optimizers themselves, where Lightning's actions do not reach.

An optimizer's post-step hook ends its phase exactly. Under manual optimization the user calls ``zero_grad``,
``manual_backward``, ``clip_gradients`` and perhaps a bare ``step``, none of which is an action: those calls are wrapped
on the instances.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lm_profiler.measure import timeline as at
from lm_profiler.measure.timeline import Timeline


class OptimizerMarks:
    """Attached to the optimizers of one run; ``detach`` leaves no trace."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._depth = 0
        self._undo: list[Callable[[], None]] = []

    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Mark every optimizer of ``trainer``, and under manual optimization what the user calls."""
        for optimizer in trainer.optimizers:
            self._undo.append(optimizer.register_step_post_hook(self._after_step).remove)
            if not module.automatic_optimization or _steps_within_steps(optimizer):
                self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
            if not module.automatic_optimization:
                self._wrap(optimizer, "zero_grad", at.ZERO_GRAD)
        if not module.automatic_optimization:
            self._wrap(module, "manual_backward", at.BACKWARD)
            self._wrap(module, "clip_gradients", at.CLIP)
            # Lightning's wrappers are subclasses of the optimizers' own classes: they do not see the instances.
            for wrapper in trainer.strategy._lightning_optimizers:
                self._wrap(wrapper, "zero_grad", at.ZERO_GRAD)

    def detach(self) -> None:
        """Take all of it out again."""
        while self._undo:
            self._undo.pop()()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            self._timeline.close(at.OPTIMIZER)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._depth += 1
        # ``args`` begins with the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._open()
            return None
        around = self._around(closure)
        return ((args[0], around, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": around})

    def _open(self) -> None:
        if self._timeline.current != at.OPTIMIZER:
            self._timeline.enter(at.OPTIMIZER)

    def _around(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure is not the optimizer's arithmetic, which goes on whenever it returns."""

        @wraps(closure)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._timeline.close(at.OPTIMIZER)
            try:
                result = closure(*args, **kwargs)
            except BaseException:
                self._timeline.fail()
                raise
            self._open()
            return result

        return marked

    def _wrap(self, owner: Any, name: str, code: int) -> None:
        original = getattr(owner, name)
        timeline = self._timeline

        @wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            timeline.enter(code)
            try:
                return original(*args, **kwargs)
            except BaseException:
                timeline.fail()
                raise
            finally:
                timeline.leave()

        replaced = owner.__dict__.get(name)
        setattr(owner, name, marked)
        self._undo.append(
            (lambda: delattr(owner, name)) if replaced is None else (lambda: setattr(owner, name, replaced))
        )


def _steps_within_steps(optimizer: Optimizer) -> bool:
    """Whether its ``step`` may call another class's: torch fires the hooks around each."""
    classes = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return sum("step" in vars(kind) for kind in classes) > 1

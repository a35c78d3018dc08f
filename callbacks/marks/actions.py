"""What each of Lightning's actions means for the timeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lm_profiler.callbacks.marks.spans import (
    NOTHING,
    Action,
    Clip,
    Died,
    Done,
    Epoch,
    Forward,
    Loop,
    Marked,
    OptimizerStep,
)
from lm_profiler.callbacks.namespaces import STEPS, overrides, verb_of
from lm_profiler.measure.clocks import timeline as at
from lm_profiler.measure.clocks.timeline import Span, Timeline

# Hooks that Lightning calls inside a phase and that are not its work: a user's gradient norm is not the backward pass.
_HOOKS_INSIDE = ("on_before_backward", "on_after_backward", "on_after_batch_transfer")


class Actions(dict[str, Marked]):
    """The span of each action, looked up when the action is first seen.

    Args:
        trainer: whose actions.
        timeline: takes the marks; where its part is out, steps are counted and nothing else.
        loop: is told what happens to steps and epochs.
        died: gets the error that ended the run, where somebody's ``on_exception`` raises; does not raise.
    """

    def __init__(self, trainer: Any, timeline: Timeline, loop: Loop, died: Callable[[BaseException], object]) -> None:
        super().__init__()
        self._trainer = trainer
        self._timeline = timeline
        self._loop = loop
        self._died = died
        verb = verb_of(trainer)
        self._forward = STEPS[verb]
        self._fitting = verb == "fit"
        self._automatic = self._fitting and trainer.lightning_module.automatic_optimization
        self._epoch = Epoch(loop, timeline.part)
        # All that is needed to count steps: where they are done, and where the loop is left.
        ends = ("[LightningModule]", ".optimizer_step") if self._automatic else ("[Strategy]", f".{self._forward}")
        self._counting: list[tuple[str, str, Marked]] = [(*ends, Done(loop))]
        if self._fitting:
            self._counting.append(("run_training_epoch", "", self._epoch))

    def __missing__(self, action_name: str) -> Marked:
        part = self._timeline.part
        span = part.run(self._span, action_name) or NOTHING
        if part.out:
            for owner, hook, counting in self._counting:
                if action_name.startswith(owner) and action_name.endswith(hook):
                    span = counting
        self[action_name] = span
        return span

    def _span(self, action_name: str) -> Marked | None:
        """What ``[Owner]Class.hook`` means for the timeline; None for nothing."""
        owner, hook = action_name.partition("]")[0] + "]", action_name.rpartition(".")[2]
        if owner == "[Strategy]":
            return self._strategy_span(hook)
        if hook == "on_exception":
            return Died(self._died)
        if hook in _HOOKS_INSIDE:
            return Span(self._timeline, at.OTHER) if self._is_users(owner, action_name, hook) else None
        if not self._fitting:
            return None
        if action_name == "run_training_epoch":
            return self._epoch
        return self._module_span(hook) if owner == "[LightningModule]" else None

    def _strategy_span(self, hook: str) -> Marked | None:
        if hook == self._forward:
            return Forward(self._timeline, None if self._automatic else self._loop)
        if hook == "batch_to_device":
            return Span(self._timeline, at.TRANSFER)
        return Span(self._timeline, at.BACKWARD) if hook == "backward" else None

    def _module_span(self, hook: str) -> Marked | None:
        timeline = self._timeline
        if hook == "optimizer_zero_grad":
            return Span(timeline, at.ZERO_GRAD)
        if hook == "configure_gradient_clipping":
            return Clip(timeline, at.CLIP)
        if hook == "on_before_optimizer_step" and not self._automatic:
            # There is no clipping hook then: this is the last one after the closure and before the arithmetic.
            return Action(timeline, partial(timeline.enter, at.OPTIMIZER))
        if hook == "optimizer_step":
            return OptimizerStep(timeline, self._loop)
        if hook in ("on_validation_model_zero_grad", "on_validation_model_eval"):
            # Validation amid training belongs to no step; the loop comes back by asking for a batch.
            return Action(timeline, timeline.go_outside)
        return None

    def _is_users(self, owner: str, action_name: str, hook: str) -> bool:
        candidates: list[object] = [self._trainer.lightning_module] if owner == "[LightningModule]" else []
        if owner == "[LightningDataModule]":
            candidates = [getattr(self._trainer, "datamodule", None)]
        elif owner == "[Callback]":
            key = action_name[len(owner) : -len(hook) - 1]
            candidates = [c for c in self._trainer.callbacks if c.state_key == key]
        return any(overrides(candidate, hook) for candidate in candidates)

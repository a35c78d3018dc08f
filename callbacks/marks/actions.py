"""Maps each of Lightning's actions to what it means for the timeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from lm_profiler.callbacks.marks.between import VALIDATION
from lm_profiler.callbacks.marks.spans import (
    NOTHING,
    Action,
    Died,
    Done,
    Epoch,
    LastSpan,
    Loop,
    Marked,
    OptimizerStep,
    Saved,
)
from lm_profiler.callbacks.namespaces import STEPS, nearest, overrides, verb_of
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Span, Timeline

# Hooks that Lightning calls inside a phase and that are not its work: a user's gradient norm is not the backward pass.
_HOOKS_INSIDE = ("on_before_backward", "on_after_backward", "on_after_batch_transfer")

# matches the part of ``[Owner]Class.hook`` that is cut out, to give ``[Owner].hook``
_CLASS = re.compile(r"\].*\.", re.DOTALL)


class Actions(dict[str, Marked]):
    """The span of each action, looked up when the action is first seen.

    Args:
        trainer: the run's.
        timeline: takes the marks; once its part is out, steps are counted and nothing else.
        loop: is told what happens to steps and epochs.
        died: called with the error that ended the run, where another callback's ``on_exception`` raises; does not
            raise.
    """

    def __init__(self, trainer: Any, timeline: Timeline, loop: Loop, died: Callable[[BaseException], object]) -> None:
        super().__init__()
        self._trainer = trainer
        self._timeline = timeline
        self._died = died
        self._around: Callable[[str, Marked], Marked] | None = None
        verb = verb_of(trainer)
        fitting = verb == "fit"
        automatic = fitting and trainer.lightning_module.automatic_optimization
        forward = f"[Strategy].{STEPS[verb]}"
        self._spans: dict[str, Marked] = {
            forward: Span(timeline, at.FORWARD) if automatic else LastSpan(timeline, at.FORWARD, loop),
            "[Strategy].batch_to_device": Span(timeline, at.TRANSFER),
            "[Strategy].backward": Span(timeline, at.BACKWARD),
        }
        # All that is needed to count steps: where they are done, and where the loop is left.
        self._counting: dict[str, Marked] = {"[LightningModule].optimizer_step" if automatic else forward: Done(loop)}
        if fitting:
            epoch = self._counting["run_training_epoch"] = Epoch(loop, timeline.part)
            # Validation amid training belongs to no step; the loop comes back by asking for a batch.
            outside = Action(timeline, partial(timeline.go_outside, VALIDATION))
            # Lightning's stand-in for an optimizer has no arithmetic.
            updates = not all(nearest(optimizer) for optimizer in trainer.optimizers)
            clipped = at.CLIPPED if updates else at.LEAVE
            self._spans |= {
                "run_training_epoch": epoch,
                "save_checkpoint": Saved(timeline),
                "[LightningModule].optimizer_zero_grad": Span(timeline, at.ZERO_GRAD),
                "[LightningModule].configure_gradient_clipping": Span(timeline, at.CLIP, clipped),
                "[LightningModule].optimizer_step": OptimizerStep(timeline, loop),
                "[LightningModule].on_validation_model_zero_grad": outside,
                "[LightningModule].on_validation_model_eval": outside,
            }
            if not automatic:
                # There is no clipping hook then: this is the last one after the closure and before the arithmetic.
                begins = Action(timeline, partial(timeline.mark, at.OPTIMIZER))
                self._spans["[LightningModule].on_before_optimizer_step"] = begins

    def __missing__(self, action_name: str) -> Marked:
        part = self._timeline.part
        kind = _CLASS.sub("].", action_name)
        span = part.run(self._span, action_name, kind) or NOTHING
        if part.out:
            span = self._counting.get(kind, NOTHING)
        if self._around is not None:
            span = self._around(action_name, span)
        self[action_name] = span
        return span

    def surround(self, around: Callable[[str, Marked], Marked] | None) -> None:
        """Let ``around`` make the span of each action from now on; None gives the plain span back."""
        self._around = around
        known = list(self) if around is not None else []  # made now, so that the first step takes no longer
        self.clear()
        for name in known:
            self[name]

    def _span(self, action_name: str, kind: str) -> Marked | None:
        """Return the span of ``[Owner]Class.hook``, whose short name is ``kind``; None where it means nothing."""
        owner, _, hook = kind.partition(".")
        if hook == "on_exception":
            return Died(self._died)
        if hook in _HOOKS_INSIDE:
            return Span(self._timeline, at.OTHER) if self._is_users(owner, action_name, hook) else None
        return self._spans.get(kind)

    def _is_users(self, owner: str, action_name: str, hook: str) -> bool:
        return any(overrides(each, hook) for each in candidates(self._trainer, owner, action_name, hook))


def candidates(trainer: Any, owner: str, action_name: str, hook: str) -> list[object]:
    """Return the objects whose ``hook`` the action may be: several where callbacks share a state key."""
    if owner == "[Callback]":
        key = action_name[len(owner) : -len(hook) - 1]
        return [callback for callback in trainer.callbacks if callback.state_key == key]
    alone = {"[LightningModule]": "lightning_module", "[LightningDataModule]": "datamodule", "[Strategy]": "strategy"}
    return [getattr(trainer, alone[owner], None)] if owner in alone else []

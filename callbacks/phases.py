"""Marks the phases, from Lightning's own profiler actions.

Lightning wraps every action of its loops in ``trainer.profiler``. ``PhaseProfiler`` stands there for the run, turns
the actions that begin or end a phase into marks, and passes all of them on to the profiler that the user configured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import TrainerFn

from lm_profiler.measure import timeline as at
from lm_profiler.measure.timeline import StepMarks, Timeline

_FETCHES = {
    TrainerFn.FITTING: "[_TrainingEpochLoop].train_dataloader_next",
    TrainerFn.VALIDATING: "[_EvaluationLoop].val_next",
    TrainerFn.TESTING: "[_EvaluationLoop].test_next",
    TrainerFn.PREDICTING: "[_PredictionLoop].predict_next",
}
_FORWARDS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
_MANUAL_STEP = "optimizer_step"
# Hooks that Lightning calls inside a phase and that are not its work: a user's gradient norm is not the backward pass.
_HOOKS_INSIDE = ("on_before_backward", "on_after_backward", "on_after_batch_transfer")
_HOOK_OWNERS: dict[str, type] = {
    "[Callback]": Callback,
    "[LightningModule]": LightningModule,
    "[LightningDataModule]": LightningDataModule,
}
_NOTHING = nullcontext()


def _nothing() -> None:
    pass


class _Span(AbstractContextManager[None]):
    """What to do when an action begins and ends; reusable, so that a step allocates none."""

    __slots__ = ("_enter", "_leave", "_timeline")

    def __init__(self, timeline: Timeline, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._timeline = timeline
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is not None:
            self._timeline.fail()
        self._leave()


class _Both(AbstractContextManager[None]):
    """A span inside the user's own profiler, whose cost is then outside of the phase."""

    def __init__(self, outer: Callable[[], AbstractContextManager[Any]], span: _Span) -> None:
        self._outer = outer
        self._open: list[AbstractContextManager[Any]] = []
        self._span = span

    def __enter__(self) -> None:
        outer = self._outer()
        outer.__enter__()
        self._open.append(outer)
        self._span.__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._span.__exit__(kind, value, traceback)
        self._open.pop().__exit__(kind, value, traceback)


class PhaseProfiler(Profiler):
    """Stands in for ``trainer.profiler`` while the stages last.

    Args:
        trainer: its profiler is kept and forwarded to; ``restore`` puts it back.
        timeline: takes the marks.
        step_ended: gets each finished step's marks, between that step and the next. It may raise StopIteration, which
            the loop takes for the end of the data.
    """

    def __init__(self, trainer: Trainer, timeline: Timeline, step_ended: Callable[[StepMarks], None]) -> None:
        super().__init__()
        assert trainer.state.fn is not None
        self._trainer = trainer
        self._wrapped: Profiler = trainer.profiler
        self._user = None if type(self._wrapped) is PassThroughProfiler else self._wrapped
        self._timeline = timeline
        self._step_ended = step_ended
        self._step_done = False
        self._fetch = _FETCHES[trainer.state.fn]
        self._forward = _FORWARDS[trainer.state.fn]
        self._fitting = trainer.state.fn is TrainerFn.FITTING
        self._automatic = self._fitting and trainer.lightning_module.automatic_optimization
        self._spans: dict[str, AbstractContextManager[Any]] = {}
        self._unmarked: set[str] = set()

    def restore(self) -> None:
        """Give the Trainer the user's profiler back."""
        if self._trainer.profiler is self:
            self._trainer.profiler = self._wrapped

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        span = self._spans.get(action_name)
        if span is not None:
            return span
        if self._user is not None and action_name in self._unmarked:
            return self._user.profile(action_name)
        return self._learn(action_name)

    def start(self, action_name: str) -> None:
        if self._user is not None:
            self._user.start(action_name)
        if action_name == self._fetch:
            self._ask_for_batch()

    def stop(self, action_name: str) -> None:
        if action_name == self._fetch:
            self._timeline.leave()
        elif action_name == _MANUAL_STEP:
            self.close_optimizer()
        if self._user is not None:
            self._user.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        # Whatever else somebody asks of trainer.profiler, they mean their own.
        if name.startswith("__") or "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def close_step(self) -> None:
        """The loop is left: the step is over if it was done, and otherwise waits for the loop to come back."""
        if not self._timeline.running:
            return
        if self._step_done:
            self._end_step()
        else:
            self._timeline.enter(at.OUTSIDE)

    def close_optimizer(self) -> None:
        """The optimizer's arithmetic is over."""
        if self._timeline.current == at.OPTIMIZER:
            self._timeline.leave()

    def _ask_for_batch(self) -> None:
        timeline = self._timeline
        timeline.return_inside()
        if timeline.running and self._step_done:
            self._end_step()
        if not timeline.running:
            timeline.begin_step()
        timeline.enter(at.DATA)

    def _end_step(self) -> None:
        self._step_done = False
        self._step_ended(self._timeline.end_step())

    def _begin_forward(self) -> None:
        if not self._timeline.running:  # training_step(dataloader_iter) fetches inside
            self._timeline.begin_step()
        self._timeline.enter(at.FORWARD)

    def _end_forward(self) -> None:
        self._timeline.leave()
        if not self._automatic:
            self._step_done = True

    def _end_optimizer_step(self) -> None:
        self.close_optimizer()
        self._step_done = True

    def _learn(self, action_name: str) -> AbstractContextManager[Any]:
        span = self._span(action_name)
        if self._user is None:
            self._spans[action_name] = span or _NOTHING
            return span or _NOTHING
        if span is None:
            self._unmarked.add(action_name)
            return self._user.profile(action_name)
        both = _Both(partial(self._user.profile, action_name), span)
        self._spans[action_name] = both
        return both

    def _span(self, action_name: str) -> _Span | None:
        """What ``[Owner]Class.hook`` means for the timeline; None for nothing."""
        owner, hook = action_name.partition("]")[0] + "]", action_name.rpartition(".")[2]
        if owner == "[Strategy]":
            return self._strategy_span(hook)
        if hook in _HOOKS_INSIDE:
            return self._part(at.OTHER) if self._is_users(owner, action_name, hook) else None
        if not self._fitting:
            return None
        if action_name == "run_training_epoch":
            return _Span(self._timeline, _nothing, self.close_step)
        return self._module_span(hook) if owner == "[LightningModule]" else None

    def _strategy_span(self, hook: str) -> _Span | None:
        if hook == self._forward:
            return _Span(self._timeline, self._begin_forward, self._end_forward)
        if hook == "batch_to_device":
            return self._part(at.TRANSFER)
        return self._part(at.BACKWARD) if hook == "backward" else None

    def _module_span(self, hook: str) -> _Span | None:
        timeline = self._timeline
        if hook == "optimizer_zero_grad":
            return self._part(at.ZERO_GRAD)
        if hook == "configure_gradient_clipping":
            return self._part(at.CLIP)
        if hook == "on_before_optimizer_step":
            # The last hook before clipping and the arithmetic, after the closure, whatever the precision plugin.
            return _Span(timeline, _nothing, partial(timeline.enter, at.OPTIMIZER))
        if hook == "optimizer_step":
            return _Span(timeline, _nothing, self._end_optimizer_step)
        if hook in ("on_validation_model_zero_grad", "on_validation_model_eval"):
            # Validation amid training belongs to no step; the loop comes back by asking for a batch.
            return _Span(timeline, partial(timeline.enter, at.OUTSIDE), _nothing)
        return None

    def _part(self, code: int) -> _Span:
        return _Span(self._timeline, partial(self._timeline.enter, code), self._timeline.leave)

    def _is_users(self, owner: str, action_name: str, hook: str) -> bool:
        base = _HOOK_OWNERS.get(owner)
        candidates: list[object] = [self._trainer.lightning_module]
        if owner == "[LightningDataModule]":
            candidates = [getattr(self._trainer, "datamodule", None)]
        elif owner == "[Callback]":
            key = action_name[len(owner) : -len(hook) - 1]
            candidates = [c for c in self._trainer.callbacks if c.state_key == key]
        return base is not None and any(
            getattr(type(c), hook, None) is not getattr(base, hook) for c in candidates
        )

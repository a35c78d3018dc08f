"""Maps each of Lightning's actions to a context that takes its marks; a step enters some thirty of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lm_profiler.analysis.watch.ledger import VALIDATION
from lm_profiler.callbacks.marks.namespaces import STEP_METHODS, overrides, verb_of
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import tape
from lm_profiler.measure.clocks.timeline import Span, Timeline

Marked = AbstractContextManager[None]

# Hooks that Lightning calls inside a phase, but whose time must not count as that phase: a user's gradient norm is not
# the backward pass. The last one is inside a phase only under manual optimization: then it is inside forward.
_HOOKS_INSIDE = (
    "on_before_backward",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_optimizer_step",
)

# Hooks that Lightning calls between steps, when an epoch begins or ends; their time is noted by their names.
_EPOCH_HOOKS = ("train_dataloader", "on_train_epoch_start", "on_train_epoch_end")

# The most spans that are kept: a program may give its own actions a new name in every step.
_MOST_NAMES = 10_000

# matches ``]Class.`` in ``[Owner]Class.hook``
_CLASS = re.compile(r"\].*\.", re.DOTALL)


class Nothing(AbstractContextManager[None]):
    """A context that does nothing. A step enters thirty of them, and built-in methods cost a tenth of Python's."""

    __enter__ = staticmethod(bool)  # type: ignore[assignment]
    # takes any arguments; returns "", which is false, so that exceptions are raised
    __exit__ = staticmethod("".format)  # type: ignore[assignment]


NOTHING = Nothing()


class LoopEvents(Protocol):
    """Receives the ends of steps and epochs from the spans; ``PhaseProfiler`` implements it."""

    is_step_done: bool  # whether the work of the step is done
    must_end: bool  # whether the loop must end now

    def enter_epoch(self) -> None: ...

    def leave_epoch(self) -> None: ...


@dataclass(eq=False)
class Action(Nothing):
    """Calls ``leave`` when an action has succeeded, and marks its failure otherwise."""

    timeline: Timeline
    leave: Callable[[], None]

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        """Call ``leave`` if the action succeeded, or mark that an error passed; no error of ours reaches training."""
        try:
            if kind is None:
                self.leave()
            else:
                self.timeline.mark(tape.FAIL)
        except BaseException as error:
            self.timeline.guard.handle(error)


@dataclass(eq=False)
class CheckpointSaving(Nothing):
    """The saving of a checkpoint: adds its start and its end to the timeline."""

    timeline: Timeline

    def __enter__(self) -> None:  # type: ignore[override]
        self.timeline.guard.run(self._note_instant)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        self.timeline.guard.run(self._note_instant)

    def _note_instant(self) -> None:
        self.timeline.checkpoint_instants_ns.append(self.timeline.clock())


@dataclass(eq=False)
class EpochHook(Nothing):
    """A hook of the program at the start or end of an epoch: adds its start, its end and its name to the timeline."""

    timeline: Timeline
    name: str
    _begin_ns: int = 0

    def __enter__(self) -> None:  # type: ignore[override]
        self._begin_ns = self.timeline.guard.run(self.timeline.clock, otherwise=0)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        self.timeline.guard.run(self._note_hook)

    def _note_hook(self) -> None:
        self.timeline.epoch_hooks.append(
            (self._begin_ns, self.timeline.clock(), self.name)
        )


class LastSpan(Span):
    """The last phase of a step: forward, if Lightning calls no optimizer step after it."""

    def __init__(self, timeline: Timeline, code: int, loop: LoopEvents) -> None:
        super().__init__(timeline, code)
        self._loop = loop

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Note that the step is done, and mark the end of its last phase."""
        if kind is None:
            self._loop.is_step_done = True
        try:
            super().__exit__(kind, value, traceback)
        except BaseException as error:
            self._timeline.guard.handle(error)


@dataclass(eq=False)
class OptimizerStep(Nothing):
    """Lightning's whole optimizer step, closure included. When it ends, the step's work is done."""

    timeline: Timeline
    loop: LoopEvents

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        """Note that the step is done, or mark that an error passed."""
        if kind is None:
            self.loop.is_step_done = True
            return
        self.timeline.guard.run(self.timeline.mark, tape.FAIL)


@dataclass(eq=False)
class Epoch(Nothing):
    """An epoch of the training loop.

    If the loop must end, the context raises StopIteration when the epoch ends. Then the loop ends too, without its own
    work at the end of an epoch.
    """

    loop: LoopEvents
    guard: Guard

    def __enter__(self) -> None:  # type: ignore[override]
        self.guard.run(self.loop.enter_epoch)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        """Report to the loop that the epoch has ended, and end the fit if the loop must end."""
        if kind is not None:
            return
        try:
            self.loop.leave_epoch()
        except BaseException as error:
            self.guard.handle(error)
        if self.loop.must_end:
            raise StopIteration  # which ends Lightning's fit loop


@dataclass(eq=False)
class SpanInUsersProfiler(AbstractContextManager[Any]):
    """A span inside the context of the user's own profiler, so that the profiler's cost is outside the phase."""

    users_context: AbstractContextManager[Any]
    span: Marked

    def __enter__(self) -> Any:
        value = self.users_context.__enter__()
        self.span.__enter__()
        return value

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Leave the span first, and then the context of the user's profiler."""
        try:
            self.span.__exit__(kind, value, traceback)
        finally:  # ``Epoch`` may raise StopIteration
            self.users_context.__exit__(kind, value, traceback)


class Actions(dict[str, Marked]):
    """The span of each action by the action's name; a span is made when its action is first seen.

    ``timeline`` takes the marks. Once its guard is disabled, new spans only count steps.
    """

    def __init__(self, trainer: Any, timeline: Timeline, loop: LoopEvents) -> None:
        super().__init__()
        self._trainer = trainer
        self._timeline = timeline
        # makes the span to use from an action's name and its plain span
        self._make_surrounding_span: Callable[[str, Marked], Marked] | None = None
        verb = verb_of(trainer)
        is_fit = verb == "fit"
        is_automatic = is_fit and trainer.lightning_module.automatic_optimization
        forward = f"[Strategy].{STEP_METHODS[verb]}"
        if is_automatic:
            forward_span = Span(timeline, tape.FORWARD)
            step_end = "[LightningModule].optimizer_step"
        else:
            forward_span = LastSpan(timeline, tape.FORWARD, loop)
            step_end = forward
        # the actions that counting steps needs: one ends a step, the other the loop
        self._counting_actions = (step_end, "run_training_epoch")
        self._span_by_kind: dict[str, Marked] = {
            forward: forward_span,
            "[Strategy].batch_to_device": Span(timeline, tape.TRANSFER),
            "[Strategy].backward": Span(timeline, tape.BACKWARD),
        }
        if is_fit:
            # Validation during training belongs to no step. The step continues when the loop asks for a batch.
            validation = Action(timeline, partial(timeline.go_outside, VALIDATION))
            self._span_by_kind |= {
                "run_training_epoch": Epoch(loop, timeline.guard),
                "save_checkpoint": CheckpointSaving(timeline),
                "[LightningModule].optimizer_zero_grad": Span(timeline, tape.ZERO_GRAD),
                "[LightningModule].configure_gradient_clipping": Span(
                    timeline, tape.CLIP
                ),
                "[LightningModule].optimizer_step": OptimizerStep(timeline, loop),
                "[LightningModule].on_validation_model_zero_grad": validation,
                "[LightningModule].on_validation_model_eval": validation,
            }

    def __missing__(self, action_name: str) -> Marked:
        """Make the span of an action that has none yet, keep it, and return it."""
        if len(self) >= _MOST_NAMES:
            # The program keeps using new names. Without this the spans would fill the memory.
            self.clear()
        guard = self._timeline.guard
        # without the class: ``[Strategy].backward`` for ``[Strategy]DDPStrategy.backward``
        kind = _CLASS.sub("].", action_name)
        span = guard.run(self._span_of_hook, action_name, kind) or NOTHING
        if guard.is_disabled:
            # The guard may have been disabled just now, by ``_span_of_hook``.
            span = self._counting_span(kind)
        if self._make_surrounding_span is not None:
            span = self._make_surrounding_span(action_name, span)
        self[action_name] = span
        return span

    def _counting_span(self, kind: str) -> Marked:
        """Return the span to use while the guard is disabled: only steps are counted."""
        if kind in self._counting_actions:
            return self._span_by_kind[kind]
        return NOTHING

    def surround(self, surrounding: Callable[[str, Marked], Marked] | None) -> None:
        """Use the spans that ``surrounding`` makes from an action's name and its plain span; None: the plain spans."""
        self._make_surrounding_span = surrounding
        action_names = list(self)
        self.clear()
        if surrounding is None:
            return
        for action_name in action_names:
            # Looking the span up makes it. Made later, it would slow down the first step.
            self[action_name]

    def _span_of_hook(self, action_name: str, kind: str) -> Marked | None:
        """Return the span of ``[Owner]Class.hook``, whose short name is ``kind``; None if the action is ignored."""
        owner, _, hook = kind.partition(".")
        if hook in _HOOKS_INSIDE:
            if self._is_users(owner, action_name, hook):
                return Span(self._timeline, tape.OTHER)
            return None
        if hook in _EPOCH_HOOKS and self._is_users(owner, action_name, hook):
            owning_object = candidate_owners(self._trainer, owner, action_name, hook)[0]
            return EpochHook(self._timeline, f"{type(owning_object).__name__}.{hook}")
        return self._span_by_kind.get(kind)

    def _is_users(self, owner: str, action_name: str, hook: str) -> bool:
        """Return whether the user's program has code in the ``hook``."""
        owning_objects = candidate_owners(self._trainer, owner, action_name, hook)
        return any(overrides(owning_object, hook) for owning_object in owning_objects)


# the attribute of the Trainer that holds the owner of an action, unless the owner is a callback
_OWNER_ATTRIBUTES = {
    "[LightningModule]": "lightning_module",
    "[LightningDataModule]": "datamodule",
    "[Strategy]": "strategy",
}


def candidate_owners(
    trainer: Any, owner: str, action_name: str, hook: str
) -> list[object]:
    """Return the objects whose ``hook`` the action may be: several if callbacks share a state key.

    ``owner`` is the beginning of ``action_name``, such as ``[Callback]``, and ``hook`` its end.
    """
    if owner == "[Callback]":
        # The name is ``[Callback]state_key.hook``, and the key may contain dots.
        key = action_name.removeprefix(owner).removesuffix(f".{hook}")
        return [callback for callback in trainer.callbacks if callback.state_key == key]
    if owner not in _OWNER_ATTRIBUTES:
        return []
    return [getattr(trainer, _OWNER_ATTRIBUTES[owner], None)]

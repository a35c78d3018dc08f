"""What happens when one of the loop's actions begins and ends, as context managers that a step can reuse."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lm_profiler.measure import timeline as at
from lm_profiler.measure.timeline import Span, Timeline

Marked = AbstractContextManager[None]


class Nothing(AbstractContextManager[None]):
    """A context that does nothing, thirty times a step. Built-in methods cost a tenth of Python frames there."""

    __slots__ = ()
    __enter__ = staticmethod("".format)  # type: ignore[assignment]
    __exit__ = staticmethod("".format)  # type: ignore[assignment]  # takes anything; "" lets exceptions through


NOTHING = Nothing()


class Action(Nothing):
    """Does something when an action has ended well; fails like a span."""

    __slots__ = ("_leave", "_timeline")

    def __init__(self, timeline: Timeline, leave: Callable[[], None]) -> None:
        self._timeline = timeline
        self._leave = leave

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is None:
            self._leave()
        else:
            self._timeline.fail()


class Forward(Span):
    """The forward pass; where no optimizer step follows in the loop's own hands, its end is the step's."""

    __slots__ = ("_done",)

    def __init__(self, timeline: Timeline, done: Callable[[], None] | None) -> None:
        super().__init__(timeline, at.FORWARD)
        self._done = done

    def __enter__(self) -> None:
        if not self._timeline.running:  # training_step(dataloader_iter) fetches inside
            self._timeline.begin_step()
        super().__enter__()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        super().__exit__(kind, value, traceback)
        if kind is None and self._done is not None:
            self._done()


class Clip(Span):
    """Clipping, the last thing before the optimizer's own arithmetic, which begins where it ends."""

    __slots__ = ()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        timeline = self._timeline
        if kind is not None:
            timeline.fail()
        timeline.stack[-1] = at.OPTIMIZER
        if timeline.live:
            timeline.mark(at.OPTIMIZER)


class Steps(Protocol):
    """Whoever wants to know that a step is done."""

    step_done: bool


class OptimizerStep(Nothing):
    """The whole of Lightning's optimizer step. Where it ends the step is done, and the optimizer's arithmetic over."""

    __slots__ = ("_steps", "_timeline")

    def __init__(self, timeline: Timeline, steps: Steps) -> None:
        self._timeline = timeline
        self._steps = steps

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is not None:
            self._timeline.fail()
            return
        self._steps.step_done = True
        if self._timeline.stack[-1] == at.OPTIMIZER:  # one whose own hook did not say so
            self._timeline.leave()


class Both(AbstractContextManager[None]):
    """A span inside the user's own profiler, whose cost is then outside of the phase."""

    def __init__(self, user: AbstractContextManager[Any], span: Marked) -> None:
        self._user = user
        self._span = span

    def __enter__(self) -> None:
        self._user.__enter__()
        self._span.__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._span.__exit__(kind, value, traceback)
        self._user.__exit__(kind, value, traceback)

"""Context managers for the loop's actions, made once and entered again in every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Span, Timeline

Marked = AbstractContextManager[None]


class Nothing(AbstractContextManager[None]):
    """A context that does nothing, some thirty times a step: built-in methods cost a tenth of Python functions."""

    __enter__ = staticmethod("".format)  # type: ignore[assignment]
    __exit__ = staticmethod("".format)  # type: ignore[assignment]  # takes anything; "" lets exceptions through


NOTHING = Nothing()


class Loop(Protocol):
    """What the spans tell of steps and epochs; ``PhaseProfiler`` is one."""

    step_done: bool
    cut: bool

    def enter_epoch(self) -> None:
        """Note that an epoch begins."""

    def leave_epoch(self) -> None:
        """Note that the epoch is over, ``cut`` or not."""


@dataclass(eq=False)
class Done(Nothing):
    """The action that ends a step, where the instruments failed and steps are only counted."""

    loop: Loop

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is None:
            self.loop.step_done = True


@dataclass(eq=False)
class Action(Nothing):
    """Calls ``leave`` when an action has ended well, and marks its failure otherwise."""

    timeline: Timeline
    leave: Callable[[], None]

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        try:
            if kind is None:
                self.leave()
            else:
                self.timeline.mark(at.FAIL)
        except BaseException as error:
            self.timeline.part.failed(error)


@dataclass(eq=False)
class Saved(Nothing):
    """The saving of a checkpoint: adds its beginning and its end to the timeline's ``saved``."""

    timeline: Timeline

    def __enter__(self) -> None:  # type: ignore[override]
        self._note()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        self._note()

    def _note(self) -> None:
        try:
            self.timeline.saved.append(self.timeline.clock())
        except BaseException as error:
            self.timeline.part.failed(error)


@dataclass(eq=False)
class Died(Nothing):
    """Another callback's ``on_exception``. Where that raises, ours is not called, and ``told`` gets the error here."""

    told: Callable[[BaseException], object]

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:  # type: ignore[override]
        if value is not None:
            self.told(value.__context__ or value)


class LastSpan(Span):
    """The phase that ends the step: forward, where Lightning calls no optimizer step after it."""

    def __init__(self, timeline: Timeline, code: int, loop: Loop) -> None:
        super().__init__(timeline, code)
        self._loop = loop

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None:
            self._loop.step_done = True
        try:
            super().__exit__(kind, value, traceback)
        except BaseException as error:
            self._timeline.part.failed(error)


@dataclass(eq=False)
class OptimizerStep(Nothing):
    """Lightning's whole optimizer step. At its end the step is done, and so is the optimizer's arithmetic."""

    timeline: Timeline
    loop: Loop

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is None:
            self.loop.step_done = True  # first, so that the step counts whatever fails below
        timeline = self.timeline
        try:
            # The optimizer's post-step hook has marked this already, unless its step was skipped, as by a gradient
            # scaler.
            timeline.note((at.OPTIMIZED if kind is None else at.FAIL, timeline.clock()))
        except BaseException as error:
            timeline.part.failed(error)


@dataclass(eq=False)
class Epoch(Nothing):
    """An epoch of the training loop.

    Where it is cut, it ends with StopIteration: the loop ends too, and skips its own work at the end of an epoch.
    """

    loop: Loop
    part: Guard

    def __enter__(self) -> None:  # type: ignore[override]
        self.part.run(self.loop.enter_epoch)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is not None:
            return
        try:
            self.loop.leave_epoch()
        except BaseException as error:
            self.part.failed(error)
        if self.loop.cut:
            raise StopIteration


@dataclass(eq=False)
class Both(AbstractContextManager[None]):
    """A span inside the user's own profiler, so that the profiler's cost is outside the phase."""

    user: AbstractContextManager[Any]
    span: Marked

    def __enter__(self) -> None:
        self.user.__enter__()
        self.span.__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        try:
            self.span.__exit__(kind, value, traceback)
        finally:  # where an epoch is cut, the span raises
            self.user.__exit__(kind, value, traceback)

"""What happens when one of the loop's actions begins and ends, as context managers that a step can reuse."""

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
    """A context that does nothing, thirty times a step. Built-in methods cost a tenth of Python frames there."""

    __enter__ = staticmethod("".format)  # type: ignore[assignment]
    __exit__ = staticmethod("".format)  # type: ignore[assignment]  # takes anything; "" lets exceptions through


NOTHING = Nothing()


class Loop(Protocol):
    """Whoever counts the steps and is told of the epochs of the training loop."""

    step_done: bool
    cut: bool

    def enter_epoch(self) -> None:
        """One begins."""

    def leave_epoch(self) -> None:
        """It is over, ``cut`` or not."""


@dataclass(eq=False)
class Done(Nothing):
    """Where this action ends well the step is done. All that is left where the instruments failed."""

    loop: Loop

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is None:
            self.loop.step_done = True


@dataclass(eq=False)
class Action(Nothing):
    """Does something when an action has ended well; fails like a span."""

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
    """A checkpoint, wherever it is saved: ``saved`` of the timeline has when each begins and ends, in turn."""

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
    """Another callback's ``on_exception``: where that raises, ours would never be told of the run's own error."""

    told: Callable[[BaseException], object]

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:  # type: ignore[override]
        if value is not None:
            self.told(value.__context__ or value)


class LastSpan(Span):
    """The part whose end is the step's: forward, where no optimizer step follows in the loop's own hands."""

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
    """The whole of Lightning's optimizer step. Where it ends the step is done, and the optimizer's arithmetic over."""

    timeline: Timeline
    loop: Loop

    def __exit__(self, kind: object, value: object, traceback: object) -> None:  # type: ignore[override]
        if kind is None:
            self.loop.step_done = True  # first: it counts whatever fails
        timeline = self.timeline
        try:
            # An optimizer's own hook may not have said so.
            timeline.note((at.OPTIMIZED if kind is None else at.FAIL, timeline.clock()))
        except BaseException as error:
            timeline.part.failed(error)


@dataclass(eq=False)
class Epoch(Nothing):
    """An epoch of the training loop, which it leaves with StopIteration where it is cut: the loop takes that for the
    end of training, without the end of an epoch that never was."""

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
    """A span inside the user's own profiler, whose cost is then outside of the phase."""

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

"""Counts the FLOPs of whole steps: enters and leaves the counter at the marks of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from lm_profiler.measure.clocks.steps import BACKWARD, FORWARD
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.record.run import Flops
from lm_profiler.torch_names import MODE_STACK


class StepFlops:
    """Counts forward and backward passes of a stage that is not timed: an observer of marks.

    The mode is entered where the outermost of the two begins, and left where it ends; another part in between (an
    optimizer under manual optimization) does not count. Data, hooks and optimizers run without the mode.

    Args:
        timeline: the timeline whose marks are observed.
        traffic: sees the operators of forward passes, and when one begins.
        on_shapes: whether the steps run on fake tensors.
    """

    def __init__(self, timeline: Timeline, traffic: ForwardTraffic | None = None, on_shapes: bool = False) -> None:
        self._timeline = timeline
        self._counter = FlopCounter(traffic, on_shapes)
        self._traffic = traffic
        self._entered = self._in_forward = False
        self._constructor = ExitStack()

    def __call__(self, code: int) -> None:
        stack = self._timeline.stack
        self._counter.counting = stack[-1] in (FORWARD, BACKWARD)
        forward = FORWARD in stack
        if forward and not self._in_forward and self._traffic is not None:
            self._traffic.begin()
        self._in_forward = forward
        self._enter(FORWARD in stack or BACKWARD in stack)

    def stop(self) -> None:
        """Leave the mode, if a step did not end."""
        self._enter(False)

    def flops(self) -> Flops:
        """Return the FLOPs of all steps so far. Raises UncountableError where the work of an operator is unknown."""
        return self._counter.flops()

    def by_dtype(self) -> dict[str, dict[str, int]]:
        """Return the same by kind of work and dtype."""
        return self._counter.by_dtype()

    def _enter(self, wanted: bool) -> None:
        if wanted == self._entered:
            return
        if wanted:
            self._constructor.enter_context(_constructed_without(self._counter))
            self._counter.__enter__()
        elif MODE_STACK.find()()[-1:] == [self._counter]:
            self._counter.__exit__(None, None, None)
            self._constructor.close()
        else:  # the step left a mode of its own behind, which lies on top: ours goes when that one has gone
            self._counter.counting = False
            return
        self._entered = wanted


@contextmanager
def _left(mode: FlopCounter) -> Iterator[None]:
    """Leave ``mode``, the innermost one, within this context."""
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


@contextmanager
def _constructed_without(mode: FlopCounter) -> Iterator[None]:
    """Have Tensor's constructor leave ``mode`` while it runs.

    A tensor that an operator returns through a mode has a Python object already, and torch refuses to make one of a
    subclass from it: ``class Own(torch.Tensor)``, made by ``Own(tensor)``, would raise (``THPVariable_NewWithVar`` in
    torch's ``python_variable.cpp``). A constructor runs no matmul, so nothing is lost.
    """
    innermost = MODE_STACK.find()
    replaced, construct = vars(Tensor).get("__new__"), Tensor.__new__

    def new(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        # Not under a Guard: all that could fail in here is torch's.
        with _left(mode) if innermost()[-1:] == [mode] else nullcontext():
            return construct(kind, *args, **kwargs)

    type.__setattr__(Tensor, "__new__", staticmethod(new))
    try:
        yield
    finally:
        if replaced is None:
            type.__delattr__(Tensor, "__new__")
        else:  # the replacement of an outer run
            type.__setattr__(Tensor, "__new__", replaced)

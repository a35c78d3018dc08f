"""One step of any module, forward and backward on fake tensors, under the observers that count a real one."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lm_profiler.callbacks.instruments.sent_step import shape_of
from lm_profiler.measure.clocks.tape import BACKWARD, END, FORWARD
from lm_profiler.measure.clocks.timeline import Span, Timeline
from lm_profiler.measure.copies.module_copies import ModuleCopy, undisturbed
from lm_profiler.measure.counts.flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.record.run_record import Flops

CPU = torch.device("cpu")


class Counted(NamedTuple):
    flops: Flops
    by_dtype: Mapping[str, Mapping[str, int]]
    read_bytes: int | None


def count_work(module: nn.Module, step: Callable[[Any, Any], Any], batch: Any, is_trained: bool = True) -> Counted:
    """Of ``step(copy, batch)`` and the backward pass of the loss that it returns, itself or under ``loss``."""
    timeline, forward = Timeline(), ForwardTraffic()
    flops = StepFlops(timeline, forward, on_shapes=True)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(module))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.set_grad_enabled(is_trained))
        copy, shapes = ModuleCopy(partial(shape_of, device=CPU), CPU)((module, batch))
        timeline.observers = (flops,)
        stack.callback(flops.stop)
        with Span(timeline, FORWARD):
            result = step(copy, shapes)
        if is_trained:
            loss = result.get("loss") if isinstance(result, Mapping) else result
            with Span(timeline, BACKWARD):
                loss.backward()
    return Counted(flops.flops(), flops.by_dtype(), forward.take())


def steps_of(function: Any, *inputs: Any) -> StepFlops:
    """Count a real step that applies ``function``, and uses its result and the gradient of the first input."""
    timeline = Timeline()
    steps = StepFlops(timeline)
    timeline.observers = (steps,)
    with Span(timeline, FORWARD):
        loss = (function.apply(*inputs) * 2).sum()
    with Span(timeline, BACKWARD):
        loss.backward()
        (inputs[0].grad + 1).sum()
    timeline.mark(END)
    steps.stop()
    return steps

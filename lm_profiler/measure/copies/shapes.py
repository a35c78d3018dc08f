"""The work of a step from shapes alone: a copy of the module runs it on torch's fake tensors, which have no data.

Fake tensors say that they are on the CPU, and choose the operators that a CPU would: its fused attention too, and under
autocast its dtypes. The same observers of marks count as in a real step, so that both find the same. What the optimizer
moves is summed over the shapes of its states; it does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.clocks.timeline import (
    BACKWARD,
    CLIP,
    CLIPPED,
    DATA,
    END,
    FORWARD,
    LEAVE,
    OPTIMIZED,
    OPTIMIZER,
    ZERO_GRAD,
    Span,
    Timeline,
)
from lm_profiler.measure.copies.module_copy import ModuleCopy, UncopyableError, undisturbed
from lm_profiler.measure.copies.step_loop import OptimizerShapes, Step, StepLoop, loss_of
from lm_profiler.measure.copies.turns import Turns
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.counts.flops import WORK
from lm_profiler.measure.counts.step_flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.memory.levels import SavedTensors
from lm_profiler.measure.memory.traffic import TrafficReader
from lm_profiler.record.run import Flops
from lm_profiler.torch_names import FAKE_MODE

META = torch.device("meta")
"""Where fake tensors have their storages, and tensors that are sent to another process."""

_CPU = torch.device("cpu")
_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_DEFAULT = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}


@dataclass(frozen=True)
class Counted:
    """The work of one step on one device.

    ``by_dtype`` has its FLOPs by work and by dtype of the factors, ``by_phase`` and ``read_bytes`` what it moves at
    least, as ``StepTraffic`` has it.
    """

    flops: Flops
    by_dtype: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    read_bytes: int | None = None
    by_phase: Mapping[str, int] = field(default_factory=dict)

    def with_more(self, two: Counted, batches: int) -> Counted:
        """Of ``batches`` batches, where this is of one and ``two`` of two: all after the first are alike."""
        more = partial(_further, times=batches - 1)
        by_dtype = {work: more(self.by_dtype.get(work, {}), of) for work, of in two.by_dtype.items()}
        forward, backward, again = (sum(by_dtype.get(work, {}).values()) for work in WORK)
        return Counted(
            Flops(forward=forward, backward=backward, recomputation=again),
            by_dtype,
            None if self.read_bytes is None or two.read_bytes is None else batches * self.read_bytes,
            more(self.by_phase, two.by_phase),
        )


def _further(one: Mapping[str, int], two: Mapping[str, int], times: int) -> dict[str, int]:
    return {key: one.get(key, 0) + times * (two[key] - one.get(key, 0)) for key in two}


def count_work(module: nn.Module, step: Step, batch: Any, loop: StepLoop | None = None) -> Counted:
    """The work of a step of ``loop``, run eagerly on a copy of ``module`` that has shapes only, in this process.

    The module, its gradients and the random states stay as they are; opaque objects are shared with the copy, which
    is why ``count_apart`` calls this elsewhere. Module hooks do not run, so products made in them are not counted.

    Raises:
        UncountableError: there is no loss, or an operator whose work is unknown.
        UncopyableError: a weight has no shape, or the module is a ScriptModule or would communicate.
        Exception: whatever the step raises where shapes are not enough for it.
    """
    loop = loop or StepLoop()
    # Also tensors that the step makes without naming a device are fake. Anomaly detection reads values.
    with (
        undisturbed(module),
        nullcontext() if loop.on_cpu else _attention_in_its_dtype(),
        FAKE_MODE.find()(allow_non_fake_inputs=True),
        torch.autograd.set_detect_anomaly(False),
        torch.set_grad_enabled(loop.kind != "evaluation"),
    ):
        copy, optimizers, shapes = ModuleCopy(_fake, _CPU)((module, list(loop.optimizers), batch))
        count = partial(_count, copy, step, shapes, loop, optimizers)
        if loop.kind != "evaluation":
            count(1)  # leaves gradients behind, as the step before did
        one = count(1)
        return one if loop.batches == 1 else one.with_more(count(2), loop.batches)


def _count(
    module: nn.Module, step: Step, batch: Any, loop: StepLoop, optimizers: Sequence[OptimizerShapes], batches: int
) -> Counted:
    timeline, forward, saved = Timeline(), ForwardTraffic(), SavedTensors()
    stands_in = [_Optimizer(each, timeline) for each in optimizers]
    traffic = TrafficReader(module, stands_in, META, timeline, saved, forward)
    flops = StepFlops(timeline, forward, on_shapes=True)
    timeline.observers = (traffic, flops)
    saved.watch()
    timeline.mark(DATA)
    timeline.mark(LEAVE)
    try:
        if loop.kind == "manual":
            _hand_over(module, stands_in, timeline)
        _run(module, step, batch, loop, stands_in, timeline, batches)
        timeline.mark(END)
    finally:
        flops.stop()
        saved.unwatch()
    traffic.step_ended()
    moved = traffic.traffic
    assert moved is not None
    by_phase = {phase: count for phase, count in moved.by_phase.items() if count is not None}
    return Counted(flops.flops(), flops.by_dtype(), moved.forward_read, by_phase)


def _run(
    module: Any,
    step: Step,
    batch: Any,
    loop: StepLoop,
    optimizers: Sequence[_Optimizer],
    timeline: Timeline,
    batches: int,
) -> None:
    """As Lightning's loop does: the gradients are cleared between the first forward and backward pass."""
    for index in range(batches):
        with Span(timeline, FORWARD), _numbers_of(loop.precision):
            loss = loss_of(step(module, batch))
        if loop.kind != "automatic":
            continue
        if not isinstance(loss, Tensor):
            raise UncountableError("on a copy the step gave no loss")
        loss = loss / loop.batches
        for optimizer in optimizers if index == 0 else ():
            with Span(timeline, ZERO_GRAD):
                clear = getattr(module, "optimizer_zero_grad", None)
                optimizer.cleared() if clear is None else clear(0, 0, optimizer)
        with Span(timeline, BACKWARD):
            loss.backward()
    if loop.kind == "automatic" and optimizers:
        timeline.mark(CLIP)
        timeline.mark(CLIPPED)
        timeline.mark(OPTIMIZED)


def _hand_over(module: Any, optimizers: Sequence[_Optimizer], timeline: Timeline) -> None:
    """What a step under manual optimization calls; it has no Trainer here."""

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with Span(timeline, BACKWARD):
            loss.backward(*args, **kwargs)

    def clip(*args: Any, **kwargs: Any) -> None:
        with Span(timeline, CLIP):
            pass

    given = list(optimizers) if len(optimizers) != 1 else optimizers[0]
    vars(module).update(manual_backward=backward, clip_gradients=clip, optimizers=lambda use_pl_optimizer=True: given)
    turns = Turns(optimizers)
    vars(module).update(toggle_optimizer=turns.toggle, untoggle_optimizer=turns.untoggle)
    for each in optimizers:
        each.turns = turns


class _Optimizer(Optimizer):
    """Stands where an optimizer would, and steps without arithmetic."""

    def __init__(self, of: OptimizerShapes, timeline: Timeline) -> None:
        super().__init__(of.parameters, {})
        self.state.update(zip(of.parameters, of.states, strict=True))
        self.optimizer = self  # as Lightning's wrapper has it
        self.turns = Turns([self])
        self._timeline = timeline

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        result = None if closure is None else closure()
        with Span(self._timeline, OPTIMIZER):
            return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        with Span(self._timeline, ZERO_GRAD):
            self.cleared(set_to_none)

    def cleared(self, set_to_none: bool = True) -> None:
        """Without a mark."""
        super().zero_grad(set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """As Lightning's wrapper has it."""
        with self.turns.of(self):
            yield


@contextmanager
def _numbers_of(precision: str) -> Iterator[None]:
    """Autocast, or the dtype of new tensors, in which Lightning runs a step."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(_DEFAULT.get(precision, default))
    half = _AUTOCAST.get(precision)
    try:
        with nullcontext() if half is None else torch.autocast("cpu", half):
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _attention_in_its_dtype() -> Iterator[None]:
    """Half precision too: where no fused kernel is chosen here, torch computes it in float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _fake(tensor: Tensor) -> Tensor:
    return shape_of(tensor, _CPU)


def shape_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like it, with nothing in it that was in ``tensor``."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        raise UncopyableError("a tensor has no shape yet, or is not a dense one")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

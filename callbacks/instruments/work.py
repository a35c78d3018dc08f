"""Counts the work of a step, while an untimed step runs; on shapes alone where none ran or it is compiled."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer

from lm_profiler.callbacks.instruments.sent_step import SentStep
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.copies.module_copies import UncopyableError
from lm_profiler.measure.counts.flops import StepFlops, UncountableError
from lm_profiler.measure.counts.recompiles import is_compiled_in, recompilations
from lm_profiler.measure.counts.traffic import ForwardTraffic, StepTraffic
from lm_profiler.processes.child import Child, Named, NoAnswer
from lm_profiler.record.run import Flops, Verb

LIMIT_S, LIMIT_BYTES = 60.0, 4 << 30  # most CPU time and memory of a process that counts on shapes alone


def batches_per_step(trainer: Trainer, verb: Verb) -> int:
    """Return how many batches a step has, on all ranks together."""
    return (trainer.accumulate_grad_batches if verb == "fit" else 1) * trainer.world_size


@dataclass(frozen=True)
class SeenFlops:
    """What was counted in the ``memory`` stage, all of its steps together."""

    flops: Flops | None = None
    unknown: str | None = None  # why FLOPs are unknown; None where no step of that stage ran
    compiled: bool = False  # whether the step is compiled, and FLOPs have to be counted on a copy
    # FLOPs of one rank, by the work and the dtype of the factors
    by_dtype: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepWork:
    """The work of one step: FLOPs over all ranks, and those of one rank by the work and by dtype.

    ``traffic`` is the least that one rank moves, where that was counted on shapes alone.
    """

    flops: Flops
    by_dtype: Mapping[str, Mapping[str, int]]
    traffic: StepTraffic | None = None


def of_all_ranks(seen: Sequence[SeenFlops]) -> SeenFlops:
    """Return the sum of what all ranks counted, with the dtypes of rank 0; unknown where one of them does not know."""
    known = [rank.flops for rank in seen if rank.flops is not None]
    if len(known) < len(seen):
        return next(rank for rank in seen if rank.flops is None)
    return SeenFlops(_flops(lambda kind: sum(getattr(flops, kind) for flops in known)), by_dtype=seen[0].by_dtype)


@dataclass(eq=False)
class FlopsWatch:
    """Instrument that counts the FLOPs of the steps of the ``memory`` stage.

    Where compiled code may run it counts nothing: a dispatch mode would make torch.compile recompile the step, or run
    it differently.
    """

    timeline: Timeline  # its marks tell forward from backward
    module: Callable[[], torch.nn.Module]  # returns the model; called once it exists
    forward: ForwardTraffic | None = None  # is told of the operators of forward passes
    part: Guard = UNGUARDED
    facts: dict[str, SeenFlops] = field(default_factory=dict)
    _step: StepFlops | None = None
    _observers: tuple[Callable[[int], None], ...] = ()
    name: str = "FLOPs"

    def begin(self, stage: str) -> None:
        if stage != "memory":
            return
        # Functions that were compiled belong to no module, so any compilation counts.
        if recompilations() > 0 or is_compiled_in(self.module()):
            self.facts["flops"] = SeenFlops(unknown="the step is compiled", compiled=True)
        elif _has_cuda_graphs():
            self.facts["flops"] = SeenFlops(unknown="the step may replay CUDA graphs, whose FLOPs cannot be counted")
        else:
            self._step = StepFlops(self.timeline, self.forward)
            self._observers = (self.part.guard(self._step),)
            self.timeline.observers += self._observers

    def end(self, stage: str) -> None:
        step = self._step
        if step is None:
            return
        self.discard()
        try:
            self.facts["flops"] = SeenFlops(step.flops(), by_dtype=step.by_dtype())
        except UncountableError as error:
            self.facts["flops"] = SeenFlops(unknown=str(error))

    def discard(self) -> None:
        if self._step is not None:
            self.timeline.unobserve(*self._observers)
            self._step.stop()
            self._step = None  # only now: what could not be undone is tried again by the next call


def _has_cuda_graphs() -> bool:
    # Torch keeps no list of its graphs, so all objects are looked through. By type(), since isinstance would ask
    # each object for its `__class__`, which in somebody's proxy is code of theirs.
    return torch.cuda.is_initialized() and any(issubclass(type(o), torch.cuda.CUDAGraph) for o in gc.get_objects())


def step_work(trainer: Trainer, verb: Verb, seen: SeenFlops, steps: int, batch: Callable[[], Any]) -> StepWork:
    """Return the work of one step: that of steps which were looked at, or else of one on shapes alone.

    Both find the same, but another process takes seconds, and what was seen costs nothing more.

    Args:
        trainer: the run's.
        verb: what it runs.
        seen: what all ranks counted, in all steps of the memory stage.
        steps: number of these steps.
        batch: returns the first batch, as ``without_data`` made it.

    Raises:
        UncountableError: the work is unknown.
        Exception: whatever ``batch`` raises.
    """
    if seen.unknown is not None and not seen.compiled:
        raise UncountableError(seen.unknown)
    if seen.flops is not None and steps:
        return StepWork(seen.flops.times(1 / steps), _per_step(seen.by_dtype, steps))
    counted = count_elsewhere(trainer, verb, batch())
    assert counted.traffic is not None
    by_phase: dict[str, int | None] = dict(counted.traffic.by_phase)
    compiled = recompilations() > 0 or is_compiled_in(trainer.lightning_module)
    if compiled or trainer.strategy.root_device.type != "cpu":
        # A copy on the CPU does not show what another device's kernels, or a compiler, keep for backward.
        by_phase |= {phase: None for phase in ("forward", "backward") if phase in by_phase}
    return StepWork(
        _flops(lambda kind: getattr(counted.flops, kind) * trainer.world_size),
        counted.by_dtype,
        counted.traffic._replace(by_phase=by_phase),
    )


def count_elsewhere(trainer: Trainer, verb: Verb, batch: Any) -> StepWork:
    """Return the work of a step on one rank, rehearsed on shapes alone in a fresh process.

    That takes the few seconds in which the process imports torch, Lightning and the module's own code. Whatever the
    step changes there has no effect here.

    Raises:
        UncountableError: the step cannot be sent, run or counted there.
    """
    try:
        sent = SentStep.of(trainer, verb, batch)
    except UncopyableError as error:
        raise UncountableError(str(error)) from None
    # By name, because `rehearse` is a floor above, and this process need not load it.
    find = Named("lm_profiler.rehearse.sent.count", (sent,))
    try:
        answer: StepWork | str = Child(find, LIMIT_S, fresh=True, limit_bytes=LIMIT_BYTES).answer()
    except NoAnswer as error:
        raise UncountableError(f"on a copy without data: {error}") from None
    if isinstance(answer, str):
        raise UncountableError(answer)
    return answer


def _per_step(by_dtype: Mapping[str, Mapping[str, int]], over: int) -> dict[str, dict[str, int]]:
    return {work: {dtype: round(n / over) for dtype, n in flops.items()} for work, flops in by_dtype.items()}


def _flops(of: Callable[[str], int]) -> Flops:
    return Flops(forward=of("forward"), backward=of("backward"), recomputation=of("recomputation"))

"""Counts the work of a step, while an untimed step runs; on shapes alone where none ran or it is compiled."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.callbacks.instruments.instrument import Instrument, SeenFlops
from lm_profiler.callbacks.instruments.sent_step import SentStep
from lm_profiler.callbacks.marks.namespaces import WHOLE, nearest, overrides
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.copies.module_copies import UncopyableError
from lm_profiler.measure.counts.flops import StepFlops, UncountableError
from lm_profiler.measure.counts.recompiles import is_compiled_in, recompilations
from lm_profiler.measure.counts.traffic import ForwardTraffic, StepTraffic
from lm_profiler.processes.child import Child, NamedCall, NoAnswer
from lm_profiler.record.run_record import Flops, Verb
from lm_profiler.torch_names import tree_leaves

LIMIT_S, LIMIT_BYTES = 60.0, 4 << 30  # most CPU time and memory of a process that counts on shapes alone

# strategies whose optimizers hold a rank's own shard; what a rank gathers from the others is unknown
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")
_FROM_SHARDS = ("zero_grad", "clip", "optimizer")  # phases that touch only a rank's own shard


@dataclass(frozen=True)
class StepWork:
    """The work of one step."""

    flops: Flops  # over all ranks
    by_dtype: Mapping[str, Mapping[str, int]]  # FLOPs of one rank, by the work and by dtype
    traffic: StepTraffic | None = None  # the least that one rank moves, where that was counted on shapes alone


@dataclass(eq=False)
class FlopsWatch(Instrument):
    """Instrument that counts FLOPs unless compiled code may run: a dispatch mode would make torch recompile it."""

    timeline: Timeline  # its marks tell forward from backward
    module: Callable[[], torch.nn.Module]  # returns the model; called once it exists
    forward: ForwardTraffic | None = None  # is told of the operators of forward passes
    name = "FLOPs"
    stage = "memory"
    _step: StepFlops | None = None

    def start(self) -> None:
        # Functions that were compiled belong to no module, so any compilation counts.
        if recompilations() > 0 or is_compiled_in(self.module()):
            self.facts["seen_flops"] = SeenFlops(unknown="the step is compiled", compiled=True)
        # Torch keeps no list of its graphs, so all objects are looked through. By type(), since isinstance would ask
        # each object for its `__class__`, which runs foreign code where the object is a proxy.
        elif torch.cuda.is_initialized() and any(issubclass(type(o), torch.cuda.CUDAGraph) for o in gc.get_objects()):
            why = "the step may replay CUDA graphs, whose FLOPs cannot be counted"
            self.facts["seen_flops"] = SeenFlops(unknown=why)
        else:
            self._step = StepFlops(self.timeline, self.forward)
            self.observe(self.timeline, self._step)

    def result(self) -> Mapping[str, Any]:
        if (step := self._step) is None:
            return {}
        self.discard()
        try:
            return {"seen_flops": SeenFlops(step.flops(), by_dtype=step.by_dtype())}
        except UncountableError as error:
            return {"seen_flops": SeenFlops(unknown=str(error))}

    def discard(self) -> None:
        super().discard()
        if self._step is not None:
            self._step.stop()
            self._step = None  # only now: what could not be undone is tried again by the next call


def of_all_ranks(seen: Sequence[SeenFlops]) -> SeenFlops:
    """Return the sum of what all ranks counted, with the dtypes of rank 0; unknown where one of them does not know."""
    known = [rank.flops for rank in seen if rank.flops is not None]
    if len(known) < len(seen):
        return next(rank for rank in seen if rank.flops is None)
    return SeenFlops(_flops(lambda kind: sum(getattr(flops, kind) for flops in known)), by_dtype=seen[0].by_dtype)


def batches_per_step(trainer: Trainer, verb: Verb) -> int:
    """Return how many batches a step has, on all ranks together."""
    return (trainer.accumulate_grad_batches if verb == "fit" else 1) * trainer.world_size


def step_work(trainer: Trainer, verb: Verb, seen: SeenFlops, steps: int, batch: Callable[[], Any]) -> StepWork:
    """Return the work of one step: from the ``steps`` that were observed, or else from one on shapes alone.

    Both give the same result, but another process takes seconds, while what all ranks have ``seen`` costs nothing more.
    ``batch`` returns the first batch, as ``without_data`` made it. Raises UncountableError where it is unknown.
    """
    if seen.unknown is not None and not seen.compiled:
        raise UncountableError(seen.unknown)
    if seen.flops is not None and steps:
        per_step = {work: {name: round(n / steps) for name, n in of.items()} for work, of in seen.by_dtype.items()}
        return StepWork(seen.flops.times(1 / steps), per_step)
    counted = count_elsewhere(trainer, verb, batch())
    assert counted.traffic is not None
    by_phase: dict[str, int | None] = dict(counted.traffic.by_phase)
    compiled = recompilations() > 0 or is_compiled_in(trainer.lightning_module)
    if compiled or trainer.strategy.root_device.type != "cpu":
        # A copy on the CPU does not show what another device's kernels, or a compiler, keep for backward.
        by_phase |= {phase: None for phase in ("forward", "backward") if phase in by_phase}
    flops = _flops(lambda kind: getattr(counted.flops, kind) * trainer.world_size)
    return StepWork(flops, counted.by_dtype, counted.traffic._replace(by_phase=by_phase))


def count_elsewhere(trainer: Trainer, verb: Verb, batch: Any) -> StepWork:
    """Return the work of a step on one rank, rehearsed on shapes alone in a fresh process, which takes some seconds.

    Raises:
        UncountableError: the step cannot be sent, run or counted there.
    """
    try:
        sent = SentStep.of(trainer, verb, batch).pickled()
    except UncopyableError as error:
        raise UncountableError(str(error)) from None
    # By name, because `rehearse` is a layer above, and this process need not load it.
    find = NamedCall("lm_profiler.rehearse.sent.count", (sent,))
    try:
        answer: StepWork | str = Child(find, LIMIT_S, fresh=True, limit_bytes=LIMIT_BYTES).answer()
    except NoAnswer as error:
        raise UncountableError(f"on a copy without data: {error}") from None
    if isinstance(answer, str):
        raise UncountableError(answer)
    return answer


def _flops(of: Callable[[str], int]) -> Flops:
    return Flops(forward=of("forward"), backward=of("backward"), recomputation=of("recomputation"))


def phase_work(
    trainer: Trainer, work: StepWork | None, traffic: StepTraffic | None, batch_bytes: int | None
) -> dict[str, Work]:
    """Return the least work of each phase that occurred in a step, on one device of the rank that writes the record.

    ``traffic`` is what a step of the memory stage moved; without such a step, the traffic of ``work`` counts.
    ``batch_bytes`` are those of all batches of a step on one rank.
    """
    on_shapes = None if work is None else work.traffic
    if (known := traffic or on_shapes) is None:
        return {}
    moved: dict[str, int | None] = dict(known.by_phase)
    moved["forward"] = _forward_bytes(traffic, on_shapes, batch_bytes)
    if "clip" in moved and trainer.lightning_module.automatic_optimization and not trainer.gradient_clip_val:
        # An overridden hook decides how to clip, without the Trainer's limit.
        moved["clip"] = None if overrides(trainer.lightning_module, "configure_gradient_clipping") else 0
    # A rank's own tensors do not show what no single rank holds whole. An optimizer may update only a part of its
    # parameters, as torch's ZeroRedundancyOptimizer does.
    strategy = nearest(trainer.strategy)
    if strategy not in WHOLE or any(hasattr(each, "consolidate_state_dict") for each in trainer.optimizers):
        own = _FROM_SHARDS if strategy in _SHARDED else ()
        moved = {phase: count if phase in own else None for phase, count in moved.items()}
    if len(trainer.optimizers) > 1:  # unknown: which of them a step updates
        moved = {phase: count if phase == "forward" else None for phase, count in moved.items()}
    of = {} if work is None else work.by_dtype
    # Backward recomputes what activation checkpointing did not keep.
    backward = Counter(of.get("backward", {})) + Counter(of.get("recomputation", {}))
    flops: dict[str, Mapping[str, int] | None] = {"forward": of.get("forward", {}), "backward": backward}
    if work is None:
        flops = {"forward": None, "backward": None}
    phases = {phase: Work(flops.get(phase, {}), count) for phase, count in moved.items()}
    if trainer.strategy.root_device.type != "cpu":
        phases["transfer"] = Work({}, batch_bytes, on_the_bus=True)
    return phases


def bytes_of_batch(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _forward_bytes(seen: StepTraffic | None, on_shapes: StepTraffic | None, batch_bytes: int | None) -> int | None:
    known = seen or on_shapes
    written, read = (None, None) if known is None else (known.by_phase.get("forward", 0), known.forward_read)
    if seen is not None and read is None:
        if written is not None:
            # The step is compiled. What autograd saved includes the batch, which forward did not write.
            written = None if batch_bytes is None else max(written - batch_bytes, 0)
        read = None if on_shapes is None else on_shapes.forward_read
    return None if read is None or written is None else read + written

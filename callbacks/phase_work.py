"""The least work of each phase of a step, on one device of the rank that writes the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.callbacks.instruments.work import StepWork
from lm_profiler.callbacks.namespaces import WHOLE, nearest, overrides
from lm_profiler.measure.counts.traffic import StepTraffic
from lm_profiler.torch_names import tree_leaves

# strategies under which optimizers hold a rank's own shard; what a rank gathers from the others is unknown
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")

_FROM_SHARDS = ("zero_grad", "clip", "optimizer")  # phases that touch nothing but a rank's own shard

_NOTHING = StepTraffic({}, None)


def phase_work(
    trainer: Trainer, work: StepWork | None, traffic: StepTraffic | None, batch_bytes: int | None
) -> dict[str, Work]:
    """Return the work of each phase that occurred in a step.

    Args:
        trainer: the run's.
        work: work of a step; None is unknown.
        traffic: bytes that a step of the memory stage moved; None where no step was looked at, so that those of
            ``work`` count.
        batch_bytes: bytes of all batches of a step on one rank; None is unknown.
    """
    on_shapes = None if work is None else work.traffic
    if traffic is None and on_shapes is None:
        return {}
    moved: dict[str, int | None] = dict((traffic or on_shapes or _NOTHING).by_phase)
    moved["forward"] = _forward_bytes(traffic, on_shapes, batch_bytes)
    if "clip" in moved and trainer.lightning_module.automatic_optimization:
        moved["clip"] = _clip_bytes(trainer, moved["clip"])
    # What no single rank holds whole cannot be told from its own tensors.
    strategy = nearest(trainer.strategy)
    if strategy not in WHOLE or _is_partitioned(trainer):
        known = _FROM_SHARDS if strategy in _SHARDED else ()
        moved = {phase: count if phase in known else None for phase, count in moved.items()}
    if len(trainer.optimizers) > 1:  # which of them a step updates is not seen
        moved = {phase: count if phase == "forward" else None for phase, count in moved.items()}
    flops = _flops(work)
    phases = {phase: Work(flops.get(phase, {}), count) for phase, count in moved.items()}
    if trainer.strategy.root_device.type != "cpu":
        phases["transfer"] = Work({}, batch_bytes, on_the_bus=True)
    return phases


def bytes_of_batch(batch: Any) -> int:
    """Return the bytes of all tensors in ``batch``."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _forward_bytes(seen: StepTraffic | None, on_shapes: StepTraffic | None, batch_bytes: int | None) -> int | None:
    written = (seen or on_shapes or _NOTHING).by_phase.get("forward", 0)
    read = None if seen is None else seen.forward_read
    if seen is not None and read is None and written is not None:
        # The step is compiled. What autograd saved is real, but has the batch among it, which forward did not write.
        written = None if batch_bytes is None else max(written - batch_bytes, 0)
    if read is None and on_shapes is not None:
        read = on_shapes.forward_read
    return None if read is None or written is None else read + written


def _clip_bytes(trainer: Trainer, gradients: int | None) -> int | None:
    """Return the bytes that clipping moves; None where an overridden hook decides without the Trainer's limit."""
    if trainer.gradient_clip_val:
        return gradients
    return None if overrides(trainer.lightning_module, "configure_gradient_clipping") else 0


def _flops(work: StepWork | None) -> dict[str, Mapping[str, int] | None]:
    """Return FLOPs by dtype of forward and backward, which recomputes what activation checkpointing did not keep."""
    if work is None:
        return {"forward": None, "backward": None}
    backward = Counter(work.by_dtype.get("backward", {}))
    backward.update(work.by_dtype.get("recomputation", {}))
    return {"forward": work.by_dtype.get("forward", {}), "backward": backward}


def _is_partitioned(trainer: Trainer) -> bool:
    """Return whether an optimizer updates only a part of its parameters, as torch's ZeroRedundancyOptimizer does."""
    return any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)

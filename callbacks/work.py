"""How much arithmetic a step asks for: counted once, after the run, on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils._pytree import tree_leaves, tree_map

from lm_profiler.measure.flops import Step, count_flops
from lm_profiler.record.run import Flops, Verb

_STEPS: dict[Verb, str] = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def step_of(module: LightningModule, verb: Verb) -> Step:
    """What runs a step of ``verb`` on a copy of ``module``."""
    name = _STEPS[verb]
    indexed = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)

    def step(copy: Any, batch: Any) -> Any:
        return getattr(copy, name)(batch, 0) if indexed else getattr(copy, name)(batch)

    return step


def batches_per_step(trainer: Trainer, verb: Verb) -> int:
    """Of all ranks together."""
    return (trainer.accumulate_grad_batches if verb == "fit" else 1) * trainer.world_size


class Work:
    """Keeps the shape of the run's first batch, once it was ``seen``, and counts the FLOPs of a step from it."""

    def __init__(self, verb: Verb) -> None:
        self._verb: Verb = verb
        self._batch: Any = None
        self._unlike_others: Exception | None = None
        self.seen = False

    def see(self, batch: Any) -> None:
        """Remember what ``batch`` looks like, but none of its memory."""
        self.seen = True
        try:
            self._batch = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, batch)
        except Exception as error:  # a tensor type of somebody's own; training goes on
            self._unlike_others = error

    def samples_per_step(self, trainer: Trainer) -> int | None:
        """Rows of one step over all ranks: the first dimension, where every tensor of the batch has the same."""
        tensors = [leaf for leaf in tree_leaves(self._batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        rows = {tensor.shape[0] for tensor in tensors}
        return rows.pop() * batches_per_step(trainer, self._verb) if len(rows) == 1 else None

    def flops_per_step(self, trainer: Trainer, module: LightningModule) -> Flops | None:
        """FLOPs of one step over all ranks; None where the module cannot run on shapes alone.

        Raises:
            Exception: whatever the module's own code raises there, or its batch when it was seen.
        """
        if not self.seen:
            return None
        if self._unlike_others is not None:
            raise self._unlike_others
        step = step_of(module, self._verb)
        counted = count_flops(module, step, self._batch, backward=self._verb == "fit" and module.automatic_optimization)
        if counted is None:
            return None
        batches = batches_per_step(trainer, self._verb)
        return Flops(
            forward=batches * counted.forward,
            backward=batches * counted.backward,
            recomputation=batches * counted.recomputation,
        )

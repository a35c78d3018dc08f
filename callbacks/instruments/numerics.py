"""The audit of the run's precision: one step on copies of the module, after everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils._pytree import tree_map

from lm_profiler.callbacks.instruments.work import step_of
from lm_profiler.measure.copies.numerics import audit
from lm_profiler.record.run import NumericsFacts, Verb


@dataclass(frozen=True, kw_only=True)
class NumericsOptions:
    """What the precision does to the numbers.

    Args:
        audit: After the run, put its first batch through copies of the model, in its precision and in float32: which
            dtypes parameters, outputs and gradients have, and how far loss, logits and gradients are off. Takes two
            steps, and the memory of a second model and its gradients.
    """

    audit: bool = False


def on_host(batch: Any) -> Any:
    """A copy of ``batch`` off the device."""
    return tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def numerics_facts(trainer: Trainer, verb: Verb, batch: Callable[[], Any]) -> NumericsFacts:
    """What the audit finds with ``batch``, as it was ``on_host``.

    Raises:
        ValueError: this run cannot be audited.
        Exception: whatever the module's own code raises, or asking for the batch.
    """
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    first = batch()
    if verb != "fit" or not module.automatic_optimization or trainer.world_size > 1 or _is_one_of_many():
        raise ValueError("expected a fit with automatic optimization on one device")
    scaler = getattr(plugin, "scaler", None)
    with _unattached(module):
        return audit(
            module,
            step_of(module, verb),
            first,
            trainer.strategy.root_device,
            plugin.forward_context(),
            1.0 if scaler is None else scaler.get_scale(),
        )


@contextmanager
def _unattached(module: LightningModule) -> Iterator[None]:
    """Without a Trainer, also for whoever reaches the real module from its copy: nothing is logged, nobody is asked."""
    attached = {part: part._trainer for part in module.modules() if hasattr(part, "_trainer")}
    for part in attached:
        part.__dict__["_trainer"] = None
    try:
        yield
    finally:
        for part, trainer in attached.items():
            part.__dict__["_trainer"] = trainer


def _is_one_of_many() -> bool:
    """Whether the step could talk to other processes, whoever joined them."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1

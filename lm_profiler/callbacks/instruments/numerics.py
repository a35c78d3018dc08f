"""Audits the run's precision, with one step on copies of the module after everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lm_profiler.callbacks.marks.namespaces import STEPS, trainer_of
from lm_profiler.measure.copies.module_copies import audit
from lm_profiler.record.run_record import NumericsFacts, Verb
from lm_profiler.torch_names import tree_map


class KeptLosses(Callback):
    """Keeps the losses of the first ``steps`` steps' batches, and the norms of the gradients that optimizers get."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._norms: dict[int, list[torch.Tensor]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step  # kept now: the Trainer counts on before the batch ends

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._step < self._steps and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._kept.setdefault(self._step, []).append(loss.detach().clone())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._step < self._steps:
            with suppress(Exception):  # gradients may be of any kind: then the norm is unknown, and training continues
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                self._norms.setdefault(self._step, []).append(_norm(gradients))

    @property
    def losses(self) -> list[float | None]:
        """The mean loss of each step over its batches; None where it is not finite."""
        # The sum is the mean: Lightning has divided each loss by the number of batches
        # (2.6.6: ClosureResult.from_training_step_output).
        return [_finite(torch.stack(losses).float().sum()) for losses in self._kept.values()]

    @property
    def gradient_norms(self) -> list[float | None]:
        """The norm of each step's gradients over all optimizers; None where it is not finite."""
        return [_finite(torch.stack(of_optimizers).norm()) for of_optimizers in self._norms.values()]


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if isfinite(value) else None


def _norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all ``gradients`` together, on the device, so that the host does not wait for it."""
    # In float32: squares of float16 values beyond 256 overflow.
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norm: torch.Tensor = torch.stack([each.detach().float().norm() for each in values]).norm()
    return norm


def on_host(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def numerics_facts(trainer: Trainer, verb: Verb, batch: Callable[[], Any]) -> NumericsFacts:
    """Return what the audit finds with ``batch``, which returns the copy that ``on_host`` made; may raise any error."""
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    first = batch()
    if verb != "fit" or not module.automatic_optimization or trainer.world_size > 1:
        raise ValueError("expected a fit with automatic optimization on one device")
    scaler = getattr(plugin, "scaler", None)
    scale, device = 1.0 if scaler is None else scaler.get_scale(), trainer.strategy.root_device
    with _unattached(module):
        facts = audit(module, partial(_step, STEPS[verb]), first, device, plugin.forward_context(), scale)
    kept = [each for each in trainer.callbacks if isinstance(each, KeptLosses)]  # type: ignore[attr-defined]
    losses = [loss for each in kept for loss in each.losses]
    norms = [norm for each in kept for norm in each.gradient_norms]
    return facts.model_copy(update={"losses": losses, "gradient_norms": norms})


def _step(name: str, module: Any, batch: Any) -> Any:
    method = getattr(module, name)
    return method(batch, 0) if is_param_in_hook_signature(method, "batch_idx", min_args=2) else method(batch)


@contextmanager
def _unattached(module: LightningModule) -> Iterator[None]:
    """Detach ``module`` and its parts from the Trainer: a copy may reach them, and its step must log nothing."""
    attached: list[tuple[Any, Any]] = [(part, of) for part in module.modules() if (of := trainer_of(part)) is not None]
    for part, _ in attached:
        part.trainer = None
    try:
        yield
    finally:
        for part, trainer in attached:
            part.trainer = trainer

"""Audits the run's precision: after all other stages, one step runs on copies of the module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lm_profiler.callbacks.marks.namespaces import STEP_METHODS, trainer_of
from lm_profiler.measure.copies.module_copies import audit
from lm_profiler.record.run_record import NumericsFacts, Verb


class KeptLosses(Callback):
    """Keeps the losses of the first ``steps`` steps' batches, and the norms of the gradients that optimizers get."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        # by step: the losses of its batches, and the norms of the gradients of its optimizers
        self._losses: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._norms: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # noted now, because the Trainer increases its count before the batch ends
        self._step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss of the batch, in the first steps."""
        if self._step >= self._steps:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses[self._step].append(loss.detach().clone())

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Keep the norm of the gradients, in the first steps."""
        if self._step >= self._steps:
            return
        # Gradients may be of any kind. If their norm cannot be computed, it is unknown, and training continues.
        with suppress(Exception):
            norm = _total_norm(_gradients_of(optimizer))
            self._norms[self._step].append(norm)

    @property
    def losses(self) -> list[float | None]:
        """The mean loss of each step over its batches; None if it is not finite."""
        # The sum is the mean: Lightning has divided each loss by the number of batches
        # (2.6.6: ClosureResult.from_training_step_output).
        return [
            _finite_or_none(torch.stack(losses).float().sum())
            for losses in self._losses.values()
        ]

    @property
    def gradient_norms(self) -> list[float | None]:
        """The norm of each step's gradients over all optimizers; None if it is not finite."""
        return [
            _finite_or_none(torch.stack(norms).norm()) for norms in self._norms.values()
        ]


def _finite_or_none(value: torch.Tensor) -> float | None:
    return float(value) if isfinite(value) else None


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the parameters that ``optimizer`` updates."""
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
    return gradients


def _total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all ``gradients`` together, on the device, so that the host does not wait for it."""
    norms = []
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        # In float32: squares of float16 values beyond 256 overflow.
        norms.append(values.detach().float().norm())
    norm: torch.Tensor = torch.stack(norms).norm()
    return norm


def numerics_facts(
    trainer: Trainer, verb: Verb, get_batch: Callable[[], Any]
) -> NumericsFacts:
    """Return how the numbers of a step differ from those in float32, and the losses that were kept.

    It may raise any error. ``get_batch`` returns the copy of a batch that ``copy_to_host`` made.
    """
    batch = get_batch()
    module = trainer.lightning_module
    plugin = trainer.precision_plugin
    if verb != "fit" or not module.automatic_optimization or trainer.world_size > 1:
        raise ValueError("expected a fit with automatic optimization on one device")
    scaler = getattr(plugin, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    device = trainer.strategy.root_device
    step = partial(_call_step, STEP_METHODS[verb])
    with _without_trainer(module):
        facts = audit(module, step, batch, device, plugin.forward_context(), scale)
    losses: list[float | None] = []
    norms: list[float | None] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, KeptLosses):
            losses.extend(callback.losses)
            norms.extend(callback.gradient_norms)
    return facts.model_copy(update={"losses": losses, "gradient_norms": norms})


def _call_step(name: str, module: Any, batch: Any) -> Any:
    """Call a step of the module with the index 0 of a batch, if it takes an index."""
    method = getattr(module, name)
    takes_index = is_param_in_hook_signature(method, "batch_idx", min_args=2)
    if takes_index:
        return method(batch, 0)
    return method(batch)


@contextmanager
def _without_trainer(module: LightningModule) -> Iterator[None]:
    """Detach ``module`` and its parts from the Trainer, so that a copy's step, which may reach them, logs nothing."""
    attached: list[tuple[Any, Any]] = []
    for part in module.modules():
        trainer = trainer_of(part)
        if trainer is not None:
            attached.append((part, trainer))
    for part, _ in attached:
        part.trainer = None
    try:
        yield
    finally:
        for part, trainer in attached:
            part.trainer = trainer

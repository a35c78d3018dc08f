"""Facts of the profiled module, as it stands after set-up."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lm_profiler.record.run import ModelFacts


def model_facts(trainer: Trainer, module: LightningModule) -> ModelFacts:
    """Its size, precision and optimizers."""
    parameters = list(module.parameters())
    embeddings = {id(m.weight) for m in module.modules() if type(m).__name__ == "Embedding"}
    total = sum(p.numel() for p in parameters)
    return ModelFacts(
        class_path=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=total,
        parameters_without_embedding=total - sum(p.numel() for p in parameters if id(p) in embeddings),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        bytes=sum(t.numel() * t.element_size() for t in (*parameters, *module.buffers())),
        precision=str(trainer.precision),
        optimizers=[type(optimizer).__name__.lstrip("_") for optimizer in trainer.optimizers],
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        compiled=is_compiled_in(module),
    )


def is_compiled_in(module: nn.Module) -> bool:
    """Whether any part of ``module`` is compiled."""
    return any(is_compiled(part) for part in module.modules())


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` itself was handed to torch.compile, in any of its ways, or to TorchScript."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning compiled the steps themselves
        or isinstance(module, torch.jit.ScriptModule)
    )

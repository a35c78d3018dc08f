"""Facts of the profiled module, as it stands after set-up."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

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
    )

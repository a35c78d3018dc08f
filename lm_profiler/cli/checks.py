"""What can be known to fail before anything is built or allocated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lm_profiler.cli.usage import UsageError, explain, says_what_was_expected
from lm_profiler.measure.memory import available_bytes
from lm_profiler.training import AttentionAlone, LanguageModel
from lm_profiler.training.footprint import refusal

_SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for a Trainer that cannot be had here, where Lightning's own words would not help."""
    if options["barebones"]:
        raise UsageError("trainer.barebones: expected false, given true; without hooks there is nothing to measure")
    if options["accumulate_grad_batches"] < 1:
        given = options["accumulate_grad_batches"]
        raise UsageError(f"trainer.accumulate_grad_batches: expected 1 or more, given {given}")
    accelerator = options["accelerator"]
    if not isinstance(accelerator, str) or accelerator == "auto":
        return
    here = [name for name in AcceleratorRegistry if AcceleratorRegistry[name]["accelerator"].is_available()]
    usable = {*here, "auto", *(["gpu"] if {"cuda", "mps"} & set(here) else [])}
    if accelerator not in usable:
        names = ", ".join(sorted(usable))
        raise UsageError(f"trainer.accelerator: expected one that this machine has ({names}), given {accelerator!r}")


def explain_trainer_error(error: Exception, options: Mapping[str, Any]) -> str:
    """Lightning's message in a line, with the Trainer options that it names as they were given."""
    message = str(error)
    if says_what_was_expected(message):
        return message
    if "\n  " in message:  # the parser's
        return explain(message, prefix="trainer")
    message = " ".join(message.split())
    named = [name for name in options if re.search(rf"\b{name}\b", message)]
    given = ", ".join(f"{name}={options[name]!r}" for name in named if name != "logger")
    return f"trainer: {message[:300].rstrip('.')}" + (f"; given {given}" if given else "")


def check_together(model: LightningModule, trainer: Trainer) -> None:
    """Raise ValueError for options of our own model that this Trainer would trip over in its first step."""
    if isinstance(model, LanguageModel):
        model.trainer = trainer
        model.check_precision()


def memory_refusal(model: LightningModule, data: object, trainer: Trainer, training: bool) -> str | None:
    """Why what ``model`` must hold for ``data`` cannot fit, and what would; None if it does, or nobody can say."""
    device = trainer.strategy.root_device
    available = available_bytes(device.type)
    if available is None or isinstance(trainer.strategy, _SHARDED):
        return None
    copies = trainer.num_devices if device.type == "cpu" else 1
    if isinstance(model, AttentionAlone):
        return model.footprint(data, trainer.precision, training).refusal(available // copies)
    if not isinstance(model, LanguageModel):
        return None
    return refusal(model.config, trainer.precision, model.optimizer_name, training, available, copies)

"""Checks that can fail before anything is built or allocated."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden

from lm_profiler.cli.errors import wrong_call
from lm_profiler.measure.boundary import say
from lm_profiler.models.transformer import check_attention
from lm_profiler.record.run import Verb
from lm_profiler.training import AttentionAlone, LanguageModel, WrappedDDP
from lm_profiler.usage_error import UsageError, expect

# Lightning makes a list entry and a process for each device: a mistyped number would exhaust the machine.
_MOST_DEVICES = 1024
_DATA: dict[Verb, str] = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
LOADERS = {verb: f"{data}_dataloader" for verb, data in _DATA.items()}


def check_trainer_options(options: Mapping[str, Any], verb: Verb) -> None:
    """Raise UsageError for Trainer options that cannot work here and that Lightning reports badly or not at all."""
    if options["barebones"]:
        raise UsageError("trainer.barebones: expected false, given true; without hooks there is nothing to measure")
    strategy = options["strategy"]
    if isinstance(strategy, str) and "." in strategy:
        expected = f"the name of a strategy, given {strategy}; a class is --trainer.strategy.class_path={strategy}"
        raise UsageError(f"trainer.strategy: expected {expected}")
    batches = options["accumulate_grad_batches"]
    expect(batches >= 1, "trainer.accumulate_grad_batches", "1 or more", batches)
    devices = str(options["devices"])
    if devices.isdecimal() and (len(devices) > 9 or int(devices) > _MOST_DEVICES):
        raise UsageError(f"trainer.devices: expected at most {_MOST_DEVICES:,}, given {devices[:30]}")
    ends = ("max_steps", "max_epochs") if verb == "fit" else ()
    for name in (*ends, f"limit_{_DATA[verb]}_batches"):
        if options[name] == 0:
            raise UsageError(f"trainer.{name}: expected something to run, given {options[name]}; leave it out")
    accelerator = options["accelerator"]
    if not isinstance(accelerator, str) or accelerator == "auto":
        return
    here = [name for name in AcceleratorRegistry if AcceleratorRegistry[name]["accelerator"].is_available()]
    usable = {*here, "auto", *(["gpu"] if {"cuda", "mps"} & set(here) else [])}
    names = ", ".join(sorted(usable))
    expect(accelerator in usable, "trainer.accelerator", f"one that this machine has ({names})", accelerator)


def trainer_error(error: Exception, options: Mapping[str, Any]) -> UsageError:
    """Return Lightning's message as one line, followed by the Trainer options that it names and their given values."""
    message = str(error)
    if isinstance(error, UsageError) or "\n  " in message:  # ours, or the parser's
        return wrong_call(error, prefix="trainer")
    message = " ".join(message.split())
    named = [name for name in options if re.search(rf"\b{name}\b", message)]
    given = ", ".join(f"{name}={options[name]!r}" for name in named if name != "logger")
    return UsageError(f"trainer: {message[:300].rstrip('.')}" + (f"; given {given}" if given else ""))


def check_launch(trainer: Trainer) -> None:
    """Raise UsageError where the number of launched processes is not the number that this Trainer expects.

    Lightning does not check this in time: two processes under torchrun with ``devices=1`` become two separate runs.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None and TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
    if isinstance(environment, TorchElasticEnvironment):
        _check_torchrun(environment.world_size(), trainer)
    elif environment is not None:
        environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
    elif int(os.environ.get("SLURM_NTASKS", 1)) > 1 and os.environ.get("SLURM_PROCID") == "0":
        tasks = os.environ["SLURM_NTASKS"]
        say(f"SLURM has {tasks} tasks: each is a run of its own, for --trainer.devices and --trainer.num_nodes are 1")


def _check_torchrun(started: int, trainer: Trainer) -> None:
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if started != devices * nodes:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        remedy = f"add --trainer.devices={here} --trainer.num_nodes={started // here}"
        expected = f"the {started} processes that torchrun started"
        raise UsageError(f"trainer.devices: expected {expected}, given {devices} x {nodes} (num_nodes); {remedy}")


def check_together(model: LightningModule, data: object, trainer: Trainer, verb: Verb) -> None:
    """Raise UsageError for options of model and data with which this Trainer would fail in or before its first step."""
    if data is None and not is_overridden(LOADERS[verb], model):
        name = type(model).__name__
        raise UsageError(f"data: expected a LightningDataModule, because {name} has no {LOADERS[verb]}, given null")
    if isinstance(trainer.strategy, WrappedDDP):
        trainer.strategy.wrapper_class  # noqa: B018  # it refuses a class that is no wrapper
    if isinstance(model, LanguageModel):
        model.trainer = trainer
        model.check_precision()


_DTYPES = {"64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}


def check_attention_of(model: LightningModule, trainer: Trainer, verb: Verb) -> None:
    """Check the numbers of an attention function that is not ours, on the run's device, in the dtype that it will see.

    Raises:
        UsageError: they are wrong.
    """
    if isinstance(model, LanguageModel):
        name, width = model.config.attention, model.config.head_dim
    elif isinstance(model, AttentionAlone):
        name, width = model.attention, model.d_model
    else:
        return
    kind, _, how = str(trainer.precision).partition("-")
    kept = how == "mixed" and isinstance(model, AttentionAlone)  # its Q, K and V are parameters
    dtype = torch.float32 if kept else _DTYPES.get(kind, torch.float32)
    try:
        check_attention(name, width, dtype, trainer.strategy.root_device, backward=verb == "fit")
    except UsageError as error:
        raise UsageError(f"model.{error}") from error.__cause__

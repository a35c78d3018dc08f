"""The command line of the Trainer's verbs: a LightningCLI that always adds the instruments."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.instruments.numerics import KeptLosses
from lm_profiler.callbacks.instruments.profiling_options import Launch
from lm_profiler.cli.call import OURS, Call
from lm_profiler.cli.options import wrong_call
from lm_profiler.cli.run_context import RunContext, take_over
from lm_profiler.cli.surroundings import check_port, quiet, say_who_shares
from lm_profiler.cli.trainer_options import INSTRUMENTS, LOADERS, LOOPS, OptionsCLI
from lm_profiler.measure.boundary import say
from lm_profiler.measure.device.environment import cpu_cores
from lm_profiler.models import transformer
from lm_profiler.models.config import size_lines
from lm_profiler.models.transformer import check_attention
from lm_profiler.record.calls import check_folder_name, command_line
from lm_profiler.record.run_record import Verb
from lm_profiler.record.secrets import masked, masked_line, masked_option
from lm_profiler.training import AttentionAlone, LanguageModel, WrappedDDP
from lm_profiler.usage_error import UsageError, expect

# the packages whose classes run no user code
_KNOWN = {"lm_profiler", "lightning", "lightning_fabric", "pytorch_lightning", "torch"}

_PASSED_ON = ("ckpt_path", "weights_only")  # options of the Trainer's methods rather than of its constructor

# what Lightning, torch and our own classes raise for wrong options
OPTION_ERRORS = (ValueError, TypeError, OverflowError, MisconfigurationException)

# Lightning makes a list entry and a process for each device: a mistyped number would exhaust the machine.
_MOST_DEVICES = 1024
_DTYPES = {"64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}


class EventsLogger(TensorBoardLogger):
    """Lightning's logger, without its empty ``hparams.yaml``."""

    def save(self) -> None:
        if self.hparams:
            super().save()
        else:
            self.experiment.flush()


class ProfilerCLI(OptionsCLI):
    """A LightningCLI whose Trainer always carries the instruments.

    The constructor reads the arguments, ``begin`` builds the Trainer, and ``run_verb`` builds data and model and runs.
    So a wrong option of the Trainer is refused before a model is built.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.context = RunContext(self.verb, self._launch(), self._get(self.config, "log_dir"))

    def __reduce__(self) -> tuple[Callable[[Sequence[str]], ProfilerCLI], tuple[Sequence[str]]]:
        return _read, (self.call.arguments,)  # another process parses the arguments again

    def _launch(self) -> Launch:
        """Return how the run is started, with secrets masked."""
        text = self.parser.dump(self.config, format="json", skip_unset=False, skip_validation=True)
        config = json.loads(text)[self.verb]
        # whether module and data are ours, and all other named classes are ours, Lightning's or torch's
        named = {one or other for one, other in re.findall(r'"class_path": ?"(\w+)|"attention": ?"(\w+)[\w.]*:', text)}
        parts = {str(config[key]["class_path"]).partition(".")[0] for key in OURS if config[key] is not None}
        self.is_ours = parts <= {"lm_profiler"} and named <= _KNOWN
        name = config["name"] or (Path(self.call.file).stem if self.call.file else "lm_profiler")
        check_folder_name(name, config["log_dir"])
        config = masked(config)
        return Launch(
            name=name,
            command=command_line(masked_line(self.call.arguments)),
            overrides={option: masked_option(option, value) for option, value in self.call.overrides.items()},
            config=config,
            config_yaml=yaml.safe_dump(config, sort_keys=False),
            kept=True,
        )

    def begin(self) -> None:
        """Build the Trainer, and claim the folder of the run."""
        given = vars(self._get(self.config, "trainer"))
        check_trainer_options(given, self.verb)
        try:
            self.config_init = self._instantiate(vars(self.config[self.verb]).keys() - {"model", "data"})
            trainer = self.instantiate_trainer()
            check_launch(trainer)
        except (*OPTION_ERRORS, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "SLURM" not in str(error):
                raise  # Lightning raises RuntimeError for wrong SLURM variables, others are the user's
            raise trainer_error(_cause(error), given) from error
        self.trainer = trainer
        skip_teardown(trainer)
        model = self._get(self.config, "model")
        if model is not None and str(model.class_path).startswith("lm_profiler.") and trainer.is_global_zero:
            for line in size_lines(model.init_args, named="model.size" in self.call.overrides):
                say(line)
        self._claim_folder(trainer)

    @property
    def check_memory(self) -> bool | None:
        """Whether to rehearse the run (True), to estimate what it holds (None), or to do neither (False)."""
        return self._get(self.config, "check_memory")  # type: ignore[no-any-return]

    def run_verb(self) -> None:
        """Build everything else and run the verb."""
        self.datamodule = self.build("data")
        self.model = self.build("model")
        if type(self.model) is LanguageModel and self._get(self.config, "trainer")["callbacks"] is None:
            self.model.stays = True
        source = self.datamodule if self.datamodule is not None else self.model
        self._get(self.config_init, "torch").apply(self.model)
        self._get(self.config_init, "loader").apply(source, LOADERS[self.verb])
        check_together(self.model, self.datamodule, self.trainer, self.verb)
        check_attention_of(self.model, self.trainer, self.verb)
        transformer.nvtx_parts = self._get(self.config_init, "trace").nvtx
        given = vars(self.config_init[self.verb])
        arguments = {key: given[key] for key in _PASSED_ON if key in given}
        arguments |= {"model": self.model, "datamodule": self.datamodule}
        if self.verb == "predict":
            arguments["return_predictions"] = False  # stored predictions would fill the memory
        self.context.launched(called_ns=time.perf_counter_ns())
        getattr(self.trainer, self.verb)(**arguments)

    def _claim_folder(self, trainer: Trainer) -> None:
        """Claim the folder of the run; the Trainer knows this process's rank, however the ranks were started."""
        context, config = self.context, self._get(self.config, "trainer")
        take_over(trainer)
        context.begin(trainer.global_rank)
        if context.folder is not None and context.profiler is not None:
            context.profiler.launched(folder=context.folder)
        if self._logs_by_default(config):
            log_dir = self._get(self.config, "log_dir")
            version = None if context.folder is None else int(context.folder.name.rpartition("_")[2])
            # With a default metric TensorBoard would show no other HPARAMS.
            trainer.logger = EventsLogger(log_dir, context.launch.name, version, default_hp_metric=False)

    @staticmethod
    def _logs_by_default(config: Any) -> bool:
        return config["logger"] in (None, True) and not config["fast_dev_run"]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer with the instruments; ``_claim_folder`` adds the TensorBoard logger."""
        config, context = self._get(self.config_init, "trainer"), self.context
        log_dir = self._get(self.config, "log_dir")
        if self._logs_by_default(config):
            kwargs["logger"] = False  # the logger needs the folder, which is not claimed yet
        if config["default_root_dir"] is None:
            kwargs["default_root_dir"] = log_dir
        if self.verb == "fit" and config["limit_val_batches"] is None:
            kwargs["limit_val_batches"] = 0
        peak = self._get(self.config, "peak_tflops")
        expect(peak is None or 0 < peak < math.inf, "peak_tflops", "a positive number of TFLOP/s", peak)
        context.profiler = TrainingProfiler(
            launch=context.launch,
            peak_flops_per_s=None if peak is None else peak * 1e12,
            verbose=self._get(self.config, "verbose"),
            verb=self.verb,
            log_dir=log_dir,
            **{key: self._get(self.config_init, key) for key in INSTRUMENTS},
            watch=self._get(self.config_init, "watch"),
        )
        losses = self._get(self.config_init, "numerics").losses
        theirs = config["callbacks"] or []
        callbacks = [*(theirs if isinstance(theirs, list) else [theirs]), context.profiler]
        callbacks += [KeptLosses(losses)] * bool(losses)
        return Trainer(**{**config, **kwargs, "callbacks": callbacks})

    def build(self, key: str) -> Any:
        """Build the ``model`` or the ``data``. An exception of the user's own code is raised unchanged."""
        try:
            return self._get(self._instantiate([key]), key)
        except OPTION_ERRORS as error:
            cause = _cause(error)
            if isinstance(cause, UsageError):
                raise UsageError(f"{key}.{cause}") from None
            raise cause from cause.__cause__

    def _instantiate(self, keys: Iterable[str]) -> Any:
        config = self.config.clone()
        for key in vars(config[self.verb]).keys() - set(keys):
            del config[self.verb][key]
        return self.parser.instantiate(config)


def skip_teardown(trainer: Trainer) -> None:
    """Keep ``trainer``'s teardown from copying optimizer states and gradients to the host (``Strategy.teardown``).

    With AdamW in float32 they are 12 of 16 bytes per parameter: for xl 24 GB, more than many hosts have free, and
    the copy takes longer than the run. A user's module is still copied: its last hooks may expect it on the CPU.
    """
    trainer.strategy.teardown = partial(_tear_down, trainer.strategy)  # type: ignore[method-assign]


def _tear_down(strategy: Strategy) -> None:
    optimizers, strategy.optimizers = strategy.optimizers, []
    try:
        if (module := strategy.lightning_module) is not None:
            Module.zero_grad(module)  # not a user's override, which expects to be called in a step
        type(strategy).teardown(strategy)
    finally:
        strategy.optimizers = optimizers


def _read(arguments: Sequence[str]) -> ProfilerCLI:
    with quiet():
        return ProfilerCLI(Call(arguments))


def _cause(error: Exception) -> Exception:
    """Return the exception that the class itself raised; the parser wraps it in a list of all types of the option."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


# -- checks that can fail before anything is built or allocated --------------------------------------------------------


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
    for name in (*ends, f"limit_{LOOPS[verb]}_batches"):
        if options[name] == 0:
            raise UsageError(f"trainer.{name}: expected something to run, given 0; leave it out")
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
        started, devices, nodes = environment.world_size(), trainer.num_devices, trainer.num_nodes
        if started != devices * nodes:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", started))
            remedy = f"add --trainer.devices={here} --trainer.num_nodes={started // here}"
            expected = f"the {started} processes that torchrun started"
            raise UsageError(f"trainer.devices: expected {expected}, given {devices} x {nodes} (num_nodes); {remedy}")
    elif environment is not None:
        environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
        if type(environment) is LightningEnvironment and not environment.creates_processes_externally:
            check_port()  # torch would report it only in a traceback
            if trainer.strategy.root_device.type == "cpu":
                say_who_shares(trainer.num_devices, cpu_cores(), "the step")
    elif int(os.environ.get("SLURM_NTASKS", 1)) > 1 and os.environ.get("SLURM_PROCID") == "0":
        tasks = os.environ["SLURM_NTASKS"]
        say(f"SLURM has {tasks} tasks: each is a separate run, as --trainer.devices and --trainer.num_nodes are 1")


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


def check_attention_of(model: LightningModule, trainer: Trainer, verb: Verb) -> None:
    """Raise UsageError if a user's attention function gives wrong results, on the run's device and in its dtype."""
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
        where, is_causal = trainer.strategy.root_device, getattr(model, "is_causal", True)
        check_attention(name, width, dtype, where, backward=verb == "fit", is_causal=is_causal)
    except UsageError as error:
        raise UsageError(f"model.{error}") from error.__cause__

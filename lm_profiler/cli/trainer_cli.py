"""The command line of the Trainer's verbs: a LightningCLI whose Trainer always has the instruments."""

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
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.instruments.numerics import KeptLosses
from lm_profiler.callbacks.instruments.profiling_options import Launch
from lm_profiler.cli.call import DEFAULT_CLASSES, Call
from lm_profiler.cli.option_errors import wrong_call
from lm_profiler.cli.run_context import RunContext, replace_launcher
from lm_profiler.cli.surroundings import check_port, quiet, warn_of_shared_cores
from lm_profiler.cli.trainer_options import INSTRUMENTS, LOADERS, LOOPS, OptionsCLI
from lm_profiler.measure.boundary import print_message
from lm_profiler.measure.counts.step_reader import seconds_compiling
from lm_profiler.measure.device.environment import cpu_cores
from lm_profiler.models import transformer
from lm_profiler.models.config import FP8_MULTIPLE, size_notes
from lm_profiler.models.transformer import check_attention, check_context
from lm_profiler.record.calls import check_folder_name, command_line
from lm_profiler.record.run_record import Verb
from lm_profiler.record.secrets import mask, mask_line, mask_option
from lm_profiler.training import AttentionAlone, FakeTokens, LanguageModel, WrappedDDP
from lm_profiler.training.optimizers import check_optimizer
from lm_profiler.usage_error import UsageError, expect

# the packages whose classes run no user code
_LIBRARIES = {
    "lm_profiler",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
}

# options of the Trainer's methods rather than of its constructor
_METHOD_OPTIONS = ("ckpt_path", "weights_only")

# the exceptions that Lightning, torch and our own classes raise for wrong options
OPTION_ERRORS = (ValueError, TypeError, OverflowError, MisconfigurationException)

# Lightning creates a list entry and a process for each device, so a mistyped number could exhaust the machine.
_MAX_DEVICES = 1024
# the package of each class and function that a config names, in the config as JSON
_NAMED_PACKAGE = re.compile(
    r'"class_path": ?"(\w+)|"(?:attention|optimizer)": ?"(\w+)[\w.]*:'
)
_DTYPES = {"64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}


class EventsLogger(TensorBoardLogger):
    """Lightning's logger, without its empty ``hparams.yaml``."""

    def save(self) -> None:
        """Write what was logged; ``hparams.yaml`` only if there are hyperparameters."""
        if self.hparams:
            super().save()
        else:
            self.experiment.flush()


class ProfilerCLI(OptionsCLI):
    """A LightningCLI whose Trainer always has the instruments.

    The constructor parses the arguments, ``begin`` builds the Trainer, and ``run_verb`` builds data and model and runs
    them. So a wrong option of the Trainer is refused before a model is built.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.context = RunContext(
            self.verb, self._launch(), self._get(self.config, "log_dir")
        )

    def __reduce__(
        self,
    ) -> tuple[Callable[[Sequence[str]], ProfilerCLI], tuple[Sequence[str]]]:
        # Another process recreates the object by parsing the arguments again.
        return _parse_again, (self.call.arguments,)

    def _launch(self) -> Launch:
        """Return how the run is started, with secrets masked."""
        text = self.parser.dump(
            self.config, format="json", skip_unset=False, skip_validation=True
        )
        config = json.loads(text)[self.verb]
        self.is_ours = _runs_only_our_code(config, text)
        name = config["name"]
        if not name:
            name = Path(self.call.file).stem if self.call.file else "lm_profiler"
        check_folder_name(name, config["log_dir"])
        config = mask(config)
        return Launch(
            name=name,
            command=command_line(mask_line(self.call.arguments)),
            overrides={
                option: mask_option(option, value)
                for option, value in self.call.overrides.items()
            },
            config=config,
            config_yaml=yaml.safe_dump(config, sort_keys=False),
            is_supervised=True,
        )

    def begin(self) -> None:
        """Build the Trainer, and claim the folder of the run."""
        options = vars(self._get(self.config, "trainer"))
        check_trainer_options(options, self.verb)
        try:
            self.config_init = self._instantiate(
                vars(self.config[self.verb]).keys() - {"model", "data"}
            )
            trainer = self.instantiate_trainer()
            check_launch(trainer)
        except (*OPTION_ERRORS, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "SLURM" not in str(error):
                raise  # Lightning raises RuntimeError for wrong SLURM variables; others come from the user's code.
            raise trainer_error(_cause_of(error), options) from error
        self.trainer = trainer
        skip_teardown(trainer)
        if trainer.is_global_zero:
            self._print_size()
        self._claim_folder(trainer)

    def _print_size(self) -> None:
        """Print lines about the size of the built-in model, if the name of the size is ambiguous."""
        model = self._get(self.config, "model")
        if model is None or not str(model.class_path).startswith("lm_profiler."):
            return
        for line in size_notes(
            model.init_args,
            is_on_command_line="model.size" in self.call.overrides,
        ):
            print_message(line)

    @property
    def check_memory(self) -> bool | None:
        """Whether to rehearse the run (True), to estimate its memory (None), or to do neither (False)."""
        return self._get(self.config, "check_memory")  # type: ignore[no-any-return]

    def run_verb(self) -> None:
        """Build data and model, check that they fit together, and run the verb."""
        self.datamodule = self.build("data")
        self.model = self._build_model()
        # The checks run the user's attention and optimizer, so torch's options have to be set before.
        self._apply_torch_and_loader_options()
        self._check_model_and_data()
        # The built-in model reads this flag in each step.
        transformer.nvtx_parts = self._get(self.config_init, "trace").nvtx
        arguments = self._method_arguments()
        # A watched run counts the time of the fit from here.
        self.context.add_launch_facts(called_ns=time.perf_counter_ns())
        getattr(self.trainer, self.verb)(**arguments)

    def _build_model(self) -> Any:
        """Build the model; the built-in one stays on its device after the run, unless callbacks might use it."""
        model = self.build("model")
        has_no_callbacks = self._get(self.config, "trainer")["callbacks"] is None
        if type(model) is LanguageModel and has_no_callbacks:
            model.stays = True
        return model

    def _apply_torch_and_loader_options(self) -> None:
        """Apply the options of ``torch`` to torch and the model, and those of ``loader`` to the loaders."""
        self._get(self.config_init, "torch").apply(self.model)
        has_data = self.datamodule is not None
        source = self.datamodule if has_data else self.model
        self._get(self.config_init, "loader").apply(source, LOADERS[self.verb])

    def _check_model_and_data(self) -> None:
        """Raise UsageError unless model, data, attention and optimizer can be used; record the time of autotuning."""
        check_together(self.model, self.datamodule, self.trainer, self.verb)
        autotuning_s = check_attention_of(self.model, self.trainer, self.verb)
        self.context.add_launch_facts(autotuning_check_s=autotuning_s)
        check_optimizer_of(self.model, self.verb)

    def _method_arguments(self) -> dict[str, Any]:
        """Return the arguments of the Trainer's method: ``fit``, ``validate``, ``test`` or ``predict``."""
        options = vars(self.config_init[self.verb])
        arguments = {key: options[key] for key in _METHOD_OPTIONS if key in options}
        arguments |= {"model": self.model, "datamodule": self.datamodule}
        if self.verb == "predict":
            # Lightning would keep all predictions in memory.
            arguments["return_predictions"] = False
        return arguments

    def _claim_folder(self, trainer: Trainer) -> None:
        """Claim the folder of the run. The Trainer knows the rank of this process, independent of the launcher."""
        context = self.context
        replace_launcher(trainer)
        context.begin(trainer.global_rank)
        if context.folder is not None and context.profiler is not None:
            context.profiler.launched(folder=context.folder)
        if self._logs_by_default(self._get(self.config, "trainer")):
            log_dir = self._get(self.config, "log_dir")
            version = None
            if context.folder is not None:
                version = int(context.folder.name.rpartition("_")[2])
            # With Lightning's default metric, TensorBoard would show no other HPARAMS.
            trainer.logger = EventsLogger(
                log_dir, context.launch.name, version, default_hp_metric=False
            )

    @staticmethod
    def _logs_by_default(config: Any) -> bool:
        return config["logger"] in (None, True) and not config["fast_dev_run"]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer with the instruments; ``_claim_folder`` adds the TensorBoard logger."""
        config = self._get(self.config_init, "trainer")
        log_dir = self._get(self.config, "log_dir")
        if self._logs_by_default(config):
            # The logger needs the folder, which is claimed later.
            kwargs["logger"] = False
        if config["default_root_dir"] is None:
            kwargs["default_root_dir"] = log_dir
        if self.verb == "fit" and config["limit_val_batches"] is None:
            kwargs["limit_val_batches"] = 0
        profiler = self._profiler(log_dir)
        self.context.profiler = profiler

        callbacks = config["callbacks"] or []
        if not isinstance(callbacks, list):
            callbacks = [callbacks]
        callbacks = [*callbacks, profiler]
        losses = self._get(self.config_init, "numerics").losses
        if losses:
            callbacks.append(KeptLosses(losses))

        arguments = dict(config)
        arguments.update(kwargs)
        arguments["callbacks"] = callbacks
        return Trainer(**arguments)

    def _profiler(self, log_dir: str) -> TrainingProfiler:
        """Return the callback that the options describe."""
        peak_flops_per_s = None
        peak_tflops = self._get(self.config, "peak_tflops")
        if peak_tflops is not None:
            is_valid = 0 < peak_tflops < math.inf
            expect(is_valid, "peak_tflops", "a positive number of TFLOP/s", peak_tflops)
            peak_flops_per_s = peak_tflops * 1e12
        instruments = {key: self._get(self.config_init, key) for key in INSTRUMENTS}
        return TrainingProfiler(
            launch=self.context.launch,
            peak_flops_per_s=peak_flops_per_s,
            verbose=self._get(self.config, "verbose"),
            verb=self.verb,
            log_dir=log_dir,
            watch=self._get(self.config_init, "watch"),
            **instruments,
        )

    def build(self, key: str) -> Any:
        """Build the ``model`` or the ``data``. An exception of the user's own code is raised unchanged."""
        try:
            return self._get(self._instantiate([key]), key)
        except OPTION_ERRORS as error:
            cause = _cause_of(error)
            if isinstance(cause, UsageError):
                raise UsageError(f"{key}.{cause}") from None
            raise cause from cause.__cause__

    def _instantiate(self, keys: Iterable[str]) -> Any:
        """Return the config in which the sections ``keys``, such as ``model``, are objects; other keys are left out."""
        config = self.config.clone()
        for key in vars(config[self.verb]).keys() - set(keys):
            del config[self.verb][key]
        return self.parser.instantiate(config)


def _runs_only_our_code(config: Mapping[str, Any], text: str) -> bool:
    """Return whether no code of the user is run.

    That is so if module and data are ours, and all other classes that the config names are ours, Lightning's or
    torch's. ``text`` is the config as JSON.
    """
    for key in DEFAULT_CLASSES:
        if config[key] is None:
            continue
        if not _is_in_package(config[key]["class_path"], "lm_profiler"):
            return False
    for class_package, named_package in _NAMED_PACKAGE.findall(text):
        if (class_package or named_package) not in _LIBRARIES:
            return False
    return True


def _is_in_package(class_path: object, package: str) -> bool:
    return str(class_path).partition(".")[0] == package


def skip_teardown(trainer: Trainer) -> None:
    """Prevent ``Strategy.teardown`` from copying optimizer states and gradients to the host.

    With AdamW in float32 they are 12 of 16 bytes per parameter. For xl that is 24 GB, more than many hosts have free,
    and copying takes longer than the run. A user's module is still copied, because its last hooks may expect it on the
    CPU.
    """
    trainer.strategy.teardown = partial(_tear_down, trainer.strategy)  # type: ignore[method-assign]


def _tear_down(strategy: Strategy) -> None:
    """Tear the strategy down as its class does, but without its optimizers, whose states it would copy to the host."""
    optimizers = strategy.optimizers
    strategy.optimizers = []
    try:
        module = strategy.lightning_module
        if module is not None:
            # A user's override of ``zero_grad`` may expect to be called in a step.
            Module.zero_grad(module)
        type(strategy).teardown(strategy)
    finally:
        strategy.optimizers = optimizers


def _parse_again(arguments: Sequence[str]) -> ProfilerCLI:
    with quiet():
        return ProfilerCLI(Call(arguments))


def _cause_of(error: Exception) -> Exception:
    """Return the exception that a class raised; the parser raises its own exception from it."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


# -- checks that can fail before anything is built or allocated --------------------------------------------------------


def check_trainer_options(options: Mapping[str, Any], verb: Verb) -> None:
    """Raise UsageError for Trainer options that cannot work here, but that Lightning refuses unclearly or late."""
    if options["barebones"]:
        raise UsageError(
            "trainer.barebones: expected false, given true; without hooks nothing can be measured"
        )
    strategy = options["strategy"]
    if isinstance(strategy, str) and "." in strategy:
        expected = f"the name of a strategy, given {strategy}; a class is --trainer.strategy.class_path={strategy}"
        raise UsageError(f"trainer.strategy: expected {expected}")
    batches = options["accumulate_grad_batches"]
    expect(batches >= 1, "trainer.accumulate_grad_batches", "1 or more", batches)
    devices = str(options["devices"])
    if devices.isdecimal() and (len(devices) > 9 or int(devices) > _MAX_DEVICES):
        raise UsageError(
            f"trainer.devices: expected at most {_MAX_DEVICES:,}, given {devices[:30]}"
        )
    limits = [f"limit_{LOOPS[verb]}_batches"]
    if verb == "fit":
        limits = ["max_steps", "max_epochs", *limits]
    for name in limits:
        if options[name] == 0:
            raise UsageError(
                f"trainer.{name}: expected more than 0, because 0 runs nothing; leave the option out"
            )
    accelerator = options["accelerator"]
    if isinstance(accelerator, str):
        _check_accelerator(accelerator)


def _check_accelerator(accelerator: str) -> None:
    """Raise UsageError if this machine has no such ``accelerator``."""
    if accelerator == "auto":
        return
    usable = {
        name
        for name in AcceleratorRegistry
        if AcceleratorRegistry[name]["accelerator"].is_available()
    }
    has_gpu = not usable.isdisjoint({"cuda", "mps"})
    usable.add("auto")
    if has_gpu:
        usable.add("gpu")
    names = ", ".join(sorted(usable))
    expect(
        accelerator in usable,
        "trainer.accelerator",
        f"one that this machine has ({names})",
        accelerator,
    )


def trainer_error(error: Exception, options: Mapping[str, Any]) -> UsageError:
    """Return Lightning's message on one line, followed by the values of the Trainer options that it names."""
    message = str(error)
    if isinstance(error, UsageError) or "\n  " in message:  # ours, or the parser's
        return wrong_call(error, prefix="trainer")
    message = " ".join(message.split())
    values = []
    for name, value in options.items():
        is_named = re.search(rf"\b{name}\b", message) is not None
        if is_named and name != "logger":
            values.append(f"{name}={value!r}")
    line = f"trainer: {message[:300].rstrip('.')}"
    if values:
        line += f"; given {', '.join(values)}"
    return UsageError(line)


def check_launch(trainer: Trainer) -> None:
    """Raise UsageError if the number of launched processes differs from the number that this Trainer expects.

    Lightning does not check this: two processes under torchrun with ``devices=1`` would become two separate runs.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None and TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
    if isinstance(environment, TorchElasticEnvironment):
        _check_torchrun(environment, trainer)
    elif environment is not None:
        environment.validate_settings(
            num_devices=trainer.num_devices, num_nodes=trainer.num_nodes
        )
        is_lightnings = type(environment) is LightningEnvironment
        if is_lightnings and not environment.creates_processes_externally:
            check_port()  # Torch would report a port that is in use only in a traceback.
            if trainer.strategy.root_device.type == "cpu":
                warn_of_shared_cores(trainer.num_devices, cpu_cores(), "the step")
    else:
        _warn_of_slurm_tasks()


def _warn_of_slurm_tasks() -> None:
    """In the first of several tasks of SLURM, print that each of them is a run of its own."""
    tasks = int(os.environ.get("SLURM_NTASKS", 1))
    if tasks > 1 and os.environ.get("SLURM_PROCID") == "0":
        print_message(
            f"SLURM has {tasks} tasks: each is a separate run, because --trainer.devices and --trainer.num_nodes are 1"
        )


def _check_torchrun(environment: TorchElasticEnvironment, trainer: Trainer) -> None:
    """Raise UsageError unless torchrun started as many processes as the Trainer has devices."""
    processes = environment.world_size()
    devices = trainer.num_devices
    nodes = trainer.num_nodes
    if processes == devices * nodes:
        return
    on_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    expected = f"the {processes} processes that torchrun started"
    remedy = f"add --trainer.devices={on_this_node} --trainer.num_nodes={processes // on_this_node}"
    raise UsageError(
        f"trainer.devices: expected {expected}, given {devices} x {nodes} (num_nodes); {remedy}"
    )


def check_together(
    model: LightningModule, data: object, trainer: Trainer, verb: Verb
) -> None:
    """Raise UsageError for options of model and data with which this Trainer would fail before its second step."""
    if data is None and not is_overridden(LOADERS[verb], model):
        name = type(model).__name__
        raise UsageError(
            f"data: expected a LightningDataModule, because {name} has no {LOADERS[verb]}, given null"
        )
    if isinstance(trainer.strategy, WrappedDDP):
        trainer.strategy.wrapper_class  # noqa: B018  # The property raises for a class that is not a wrapper.
    if isinstance(model, LanguageModel):
        model.trainer = trainer
        model.check_precision()
        if isinstance(data, FakeTokens):
            check_context(model.config, data.context_length)
            tokens = data.batch_size * data.context_length
            if model.config.fp8 and tokens % FP8_MULTIPLE != 0:
                raise UsageError(
                    "data.context_length: batch_size × context_length must be a multiple of "
                    f"{FP8_MULTIPLE} with fp8, given {tokens} tokens"
                )


def check_optimizer_of(model: LightningModule, verb: Verb) -> None:
    """Raise UsageError if a user's optimizer updates parameters differently from torch's optimizer of its name."""
    if not isinstance(model, LanguageModel) or verb != "fit":
        return
    try:
        check_optimizer(model.optimizer_name)
    except UsageError as error:
        raise UsageError(f"model.{error}") from error.__cause__


def check_attention_of(
    model: LightningModule, trainer: Trainer, verb: Verb
) -> float | None:
    """Compare a user's attention function with the definition, on the run's device and in its dtype.

    Return by how many seconds its first call took longer than its second one, without the time of torch.compile:
    kernels with autotuning tune themselves in the first call. Return None if nothing was checked, or if the time of
    torch.compile is unknown.

    Raises:
        UsageError: its results are wrong.
    """
    if isinstance(model, LanguageModel):
        name, width = model.config.attention, model.config.head_dim
    elif isinstance(model, AttentionAlone):
        name, width = model.attention, model.d_model
    else:
        return None
    bits, _, mode = str(trainer.precision).partition("-")
    dtype = _DTYPES.get(bits, torch.float32)
    if mode == "mixed" and isinstance(model, AttentionAlone):
        # Its Q, K and V are parameters, whose dtype mixed precision does not change.
        dtype = torch.float32
    device = trainer.strategy.root_device
    is_causal = getattr(model, "is_causal", True)
    options = getattr(model, "attention_options", None)
    began_s = time.time()
    try:
        first_call_extra_s = check_attention(
            name,
            width,
            dtype,
            device,
            backward=verb == "fit",
            is_causal=is_causal,
            options=options,
        )
    except UsageError as error:
        raise UsageError(f"model.{error}") from error.__cause__
    compile_s = seconds_compiling(began_s)
    if first_call_extra_s is None or compile_s is None:
        return None
    return max(first_call_extra_s - compile_s, 0.0)

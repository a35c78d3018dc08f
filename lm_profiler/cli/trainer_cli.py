"""The command line of the Trainer's verbs: a LightningCLI that always adds the instruments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.instruments.numerics import KeptLosses
from lm_profiler.callbacks.launch import Launch
from lm_profiler.cli.call import Call
from lm_profiler.cli.checks import (
    LOADERS,
    check_attention_of,
    check_launch,
    check_together,
    check_trainer_options,
    trainer_error,
)
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.run_context import RunContext, take_over
from lm_profiler.cli.trainer_options import INSTRUMENTS, OptionsCLI
from lm_profiler.measure.boundary import say
from lm_profiler.models import attention
from lm_profiler.models.config import other_meanings
from lm_profiler.record.calls import command_line
from lm_profiler.record.secrets import masked, masked_line, masked_option
from lm_profiler.training import LanguageModel
from lm_profiler.usage_error import UsageError, expect

# the packages whose classes run no code of a user
_KNOWN = {"lm_profiler", "lightning", "lightning_fabric", "pytorch_lightning", "torch"}

_PASSED_ON = ("ckpt_path", "weights_only")  # options of the Trainer's methods rather than of its constructor

# what Lightning, torch and our own classes raise for options that are wrong
OPTION_ERRORS = (ValueError, TypeError, OverflowError, MisconfigurationException)


class EventsLogger(TensorBoardLogger):
    """Lightning's logger, which leaves no empty ``hparams.yaml`` here."""

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
        name = config["name"] or (Path(self.call.file).stem if self.call.file else "lm_profiler")
        for option, text in (("name", name), ("log_dir", config["log_dir"])):
            if not isinstance(text, str) or not text.isprintable():
                raise UsageError(f"{option}: expected text that can be printed, given {str(text)[:100]!r}")
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
            raise UsageError(f"name: expected the name of a folder below {config['log_dir']}, given {name!r}")
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
        """Build the Trainer, and claim the folder of the run.

        Raises:
            UsageError: the options do not go together, or do not fit this machine.
        """
        given = vars(self._get(self.config, "trainer"))
        check_trainer_options(given, self.verb)
        try:
            self.config_init = self._instantiate(vars(self.config[self.verb]).keys() - {"model", "data"})
            trainer = self.instantiate_trainer()
            check_launch(trainer)
        except OPTION_ERRORS as error:
            raise trainer_error(_cause(error), given) from error
        except RuntimeError as error:
            if "SLURM" not in str(error):  # Lightning raises RuntimeError for SLURM variables that do not fit
                raise
            raise trainer_error(error, given) from error
        self.trainer = trainer
        skip_teardown(trainer)
        self._claim_folder(trainer)

    @property
    def checks_memory(self) -> bool:
        """Whether to refuse a run that cannot fit: as asked, else where the rehearsal runs no user's code."""
        asked = self._get(self.config, "check_memory")
        return self.is_ours if asked is None else bool(asked)

    @property
    def is_ours(self) -> bool:
        """Whether module and data are ours, and all other named classes are ours, Lightning's or torch's."""
        config = self.config[self.verb]
        parts = {path.partition(".")[0] for key in ("model", "data") for path in _classes(config.get(key))}
        return parts <= {"lm_profiler"} and {path.partition(".")[0] for path in _classes(config)} <= _KNOWN

    def run_verb(self) -> None:
        """Build everything else and run the verb.

        Raises:
            UsageError: the options do not go together.
        """
        self.datamodule = self.build("data")
        self.model = self.build("model")
        if type(self.model) is LanguageModel and self._get(self.config, "trainer")["callbacks"] is None:
            self.model.stays = True
        self.offer()
        check_together(self.model, self.datamodule, self.trainer, self.verb)
        check_attention_of(self.model, self.trainer, self.verb)
        attention.nvtx_parts = self._get(self.config_init, "trace").nvtx
        if isinstance(self.model, LanguageModel) and self.trainer.is_global_zero:
            for line in other_meanings([self.model.size]):
                say(line)
        given = vars(self.config_init[self.verb])
        arguments = {key: given[key] for key in _PASSED_ON if key in given}
        arguments |= {"model": self.model, "datamodule": self.datamodule}
        if self.verb == "predict":
            arguments["return_predictions"] = False  # kept, they would fill the memory
        getattr(self.trainer, self.verb)(**arguments)

    def offer(self) -> None:
        """Apply the options ``torch`` and ``loader``, which work for any module and data."""
        source = self.datamodule if self.datamodule is not None else self.model
        self._get(self.config_init, "torch").apply(self.model)
        self._get(self.config_init, "loader").apply(source, LOADERS[self.verb])

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
            # Beside a default metric TensorBoard would show no other HPARAMS.
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

    With AdamW in float32 they are 12 of 16 bytes a parameter. For xl that is 24 GB, more than many hosts have free, and
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


def _classes(said: Any) -> Iterator[str]:
    """Yield the paths of all classes, and of an attention function, that a config names."""
    if isinstance(said, (Namespace, Mapping)):
        for key, value in vars(said).items() if isinstance(said, Namespace) else said.items():
            is_path = key == "class_path" or (key == "attention" and ":" in str(value))
            yield from [str(value)] if is_path else _classes(value)
    elif isinstance(said, (list, tuple)):
        for value in said:
            yield from _classes(value)


def _read(arguments: Sequence[str]) -> ProfilerCLI:
    with quiet():
        return ProfilerCLI(Call(arguments))


def _cause(error: Exception) -> Exception:
    """Return the exception of the class itself; the parser wraps it in a list of all types that the option may have."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error

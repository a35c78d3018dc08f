"""The command line of the Trainer's verbs: LightningCLI with the instruments always in place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    NumericsOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
    WhatIfOptions,
)
from lm_profiler.callbacks.instruments.numerics import KeptLosses
from lm_profiler.callbacks.launch import Launch
from lm_profiler.callbacks.outcome.logger import EventsLogger
from lm_profiler.cli.attempt import Attempt, local_rank
from lm_profiler.cli.call import OURS, Call
from lm_profiler.cli.checks import (
    LOADERS,
    check_launch,
    check_together,
    check_trainer_options,
    trainer_error,
)
from lm_profiler.cli.classes import class_at
from lm_profiler.cli.parser import Parser
from lm_profiler.cli.spawned import take_over
from lm_profiler.measure.boundary import say
from lm_profiler.record.command import command_line
from lm_profiler.record.run import Verb
from lm_profiler.training.offered import LoaderOptions, TorchOptions
from lm_profiler.usage_error import UsageError, expect

OPTION_ERRORS = (ValueError, TypeError, OverflowError, MisconfigurationException)
_INSTRUMENTS = {
    "stages": StageOptions,
    "actions": ActionsOptions,
    "memory": MemoryOptions,
    "trace": TraceOptions,
    "numerics": NumericsOptions,
    "whatif": WhatIfOptions,
}
_OFFERED = {"torch": TorchOptions, "loader": LoaderOptions}
_TITLES = {
    "trainer": "Lightning's Trainer",
    "model": "The model: any LightningModule; the options of ours are at the end",
    "data": "The data: any LightningDataModule, or null; the options of ours are at the end",
}


@dataclass
class _RunOptions:
    """What is asked of a run beside its parts.

    Args:
        name: Name of the run; the config file's if not given.
        log_dir: Folder of all runs.
        check_memory: Rehearse the run before it is built, on tensors without data, and refuse one that cannot fit.
        peak_tflops: Dense peak of one device in TFLOP/s, where the built-in table does not know it.
    """

    name: str | None = None
    log_dir: str = "logs"
    check_memory: bool = True
    peak_tflops: float | None = None


class ProfilerCLI(LightningCLI):
    """LightningCLI whose Trainer always carries the instruments; everything in it can be overridden.

    Constructing it reads the arguments. ``begin`` makes the Trainer, ``run_verb`` the data and the model, and runs: so
    no option of the Trainer is refused after a model was built.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._find_classes()
        super().__init__(
            save_config_callback=None,  # a Callback costs microseconds a step; the recorder saves the config
            trainer_defaults={
                "devices": 1,
                "max_epochs": -1,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            },
            seed_everything_default=0,
            parser_kwargs={verb: {"usage": f"lm_profiler {verb} [options]"} for verb in call.arguments[:1]},
            parser_class=Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # the record keeps the config, and nothing is saved to load it from
            args=call.for_parser(self._classes, self._leave_data),
        )
        self.verb = cast(Verb, self.subcommand)
        self.attempt = Attempt(self.verb, self._launch(), self._get(self.config, "log_dir"))

    def __reduce__(self) -> tuple[Callable[[Sequence[str]], ProfilerCLI], tuple[Sequence[str]]]:
        return _read, (self.call.arguments,)  # in another process: anew

    # -- reading ------------------------------------------------------------------------------------------------

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # which here depends on the call
        """The verb of the call, and which of its arguments are no options here: a parser of each takes 0.05 s."""
        verb = self.call.arguments[0]
        return {verb: LightningCLI.subcommands()[verb] | {"return_predictions"}}  # see run_verb

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Ours come first in the help; the Trainer's many follow."""
        parser.add_class_arguments(_RunOptions, as_group=False)
        for key, kind in (_INSTRUMENTS | _OFFERED).items():
            parser.add_class_arguments(kind, key)
        super().add_core_arguments_to_parser(parser)
        for key, title in _TITLES.items():
            (parser.groups or {})[key].title = title
        for key, ours in OURS.items():
            parser.set_defaults({key: {"class_path": self.call.class_of(key) if key in self._classes else ours}})
        if self._leave_data:
            parser.set_defaults({"data": None})

    def _find_classes(self) -> None:
        """Import what the call names, and see whether the module brings its own data."""
        self._classes = {key: made for key in OURS if (made := class_at(self.call.class_of(key), key)) is not None}
        model, loader = self._classes.get("model"), LOADERS[cast(Verb, self.call.arguments[0])]
        own_data = isinstance(model, type) and getattr(model, loader, None) is not getattr(LightningModule, loader)
        self._leave_data = own_data and self.call.leaves_data_out()
        for key, file, options in self.call.passed_over(self._leave_data) if local_rank() == 0 else ():
            if self._leave_data and key == "data":
                say(f"{key}: {self.call.class_of('model')} brings its own; what {file} says is ignored")
            elif key in self._classes and (shared := {*options} & {*signature(self._classes[key]).parameters}):
                options_said = ", ".join(sorted(shared))
                say(f"{key}: {self.call.class_of(key)} ignores {options_said} of {file}, which are for another class")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read ``args``, whatever ``sys.argv`` holds."""
        assert isinstance(parser, Parser)
        parser.verbs = self._subcommand_parsers.values()
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Not while reading."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Not while reading."""

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError:
            given = self._get(self.config, "seed_everything")
            raise UsageError(f"seed_everything: expected a seed from 0 to {2**32 - 1}, given {given}") from None

    def _launch(self) -> Launch:
        text = self.parser.dump(self.config, format="json", skip_unset=False, skip_validation=True)
        config = json.loads(text)[self.verb]
        name = config["name"] or (Path(self.call.file).stem if self.call.file else "lm_profiler")
        for option, text in (("name", name), ("log_dir", config["log_dir"])):
            if not isinstance(text, str) or not text.isprintable():
                raise UsageError(f"{option}: expected text that can be printed, given {str(text)[:100]!r}")
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
            raise UsageError(f"name: expected the name of a folder below {config['log_dir']}, given {name!r}")
        return Launch(
            name=name,
            command=command_line(self.call.arguments),
            overrides=self.call.overrides,
            config=config,
            config_yaml=yaml.safe_dump(config, sort_keys=False),
            kept=True,
        )

    # -- building and running -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the Trainer, and the folder of the run.

        Raises:
            UsageError: the options do not go together, or do not fit this machine.
        """
        self.trainer = self._build_trainer()

    @property
    def checks_memory(self) -> bool:
        """Whether a run that cannot fit is to be refused."""
        return bool(self._get(self.config, "check_memory"))

    def run_verb(self) -> None:
        """Build everything else and run the verb.

        Raises:
            UsageError: the options do not go together.
        """
        self.datamodule = self.build("data")
        self.model = self.build("model")
        self.offer()
        check_together(self.model, self.datamodule, self.trainer, self.verb)
        arguments = self._prepare_subcommand_kwargs(self.verb)
        if self.verb == "predict":
            arguments["return_predictions"] = False  # kept, they would fill the memory
        getattr(self.trainer, self.verb)(**arguments)

    def offer(self) -> None:
        """Have torch and the loader do for any module and data what was asked of them."""
        source = self.datamodule if self.datamodule is not None else self.model
        self._get(self.config_init, "torch").apply(self.model)
        self._get(self.config_init, "loader").apply(source, LOADERS[self.verb])

    def _build_trainer(self) -> Trainer:
        given = vars(self._get(self.config, "trainer"))
        check_trainer_options(given, self.verb)
        try:
            self.config_init = self._instantiate(vars(self.config[self.verb]).keys() - {"model", "data"})
            trainer = self.instantiate_trainer()
            check_launch(trainer)
        except OPTION_ERRORS as error:
            raise trainer_error(_cause(error), given) from error
        except RuntimeError as error:
            if "SLURM" not in str(error):  # Lightning's own, on variables that it cannot use
                raise
            raise trainer_error(error, given) from error
        self._begin(trainer)
        return trainer

    def _begin(self, trainer: Trainer) -> None:
        """Claim the folder of the run: the Trainer knows which process of all this is, however they were started."""
        attempt, config = self.attempt, self._get(self.config, "trainer")
        take_over(trainer, attempt)
        attempt.begin(trainer.global_rank)
        if attempt.folder is not None and attempt.profiler is not None:
            attempt.profiler.launched(folder=attempt.folder)
        if self._logs_by_default(config):
            log_dir = self._get(self.config, "log_dir")
            version = None if attempt.folder is None else int(attempt.folder.name.rpartition("_")[2])
            # Beside a default metric TensorBoard would show no other HPARAMS.
            trainer.logger = EventsLogger(log_dir, attempt.launch.name, version, default_hp_metric=False)

    @staticmethod
    def _logs_by_default(config: Any) -> bool:
        return config["logger"] in (None, True) and not config["fast_dev_run"]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with the instruments and, unless the user chose, a TensorBoard logger."""
        config, attempt = self._get(self.config_init, "trainer"), self.attempt
        log_dir = self._get(self.config, "log_dir")
        if self._logs_by_default(config):
            kwargs["logger"] = False  # until _begin
        if config["default_root_dir"] is None:
            kwargs["default_root_dir"] = log_dir
        if self.verb == "fit" and config["limit_val_batches"] is None:
            kwargs["limit_val_batches"] = 0
        peak = self._get(self.config, "peak_tflops")
        expect(peak is None or 0 < peak < math.inf, "peak_tflops", "a positive number of TFLOP/s", peak)
        attempt.profiler = TrainingProfiler(
            launch=attempt.launch,
            peak_flops_per_s=None if peak is None else peak * 1e12,
            verb=self.verb,
            log_dir=log_dir,
            **{key: self._get(self.config_init, key) for key in _INSTRUMENTS},
        )
        losses = self._get(self.config_init, "numerics").losses
        return self._instantiate_trainer(
            {**config, **kwargs}, [attempt.profiler, *([KeptLosses(losses)] if losses else [])]
        )

    def build(self, key: str) -> Any:
        """The ``model`` or the ``data``. What a user's own code raises stays that exception."""
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


def _read(arguments: Sequence[str]) -> ProfilerCLI:
    return ProfilerCLI(Call(arguments))


def _cause(error: Exception) -> Exception:
    """What a class raised; around it may stand the parser's account of everything else that the option could be."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error

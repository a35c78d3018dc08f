"""Read the options of the Trainer's verbs with LightningCLI, without building anything."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, cast, get_type_hints

from jsonargparse import ActionYesNo
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lm_profiler.callbacks import (
    ActionsOptions,
    ExportOptions,
    MemoryOptions,
    NumericsOptions,
    StageOptions,
    TraceOptions,
    WatchOptions,
    WhatIfOptions,
)
from lm_profiler.cli.call import OURS, Call
from lm_profiler.cli.checks import LOADERS
from lm_profiler.cli.parser import Parser
from lm_profiler.cli.run_context import local_rank
from lm_profiler.lightning_names import LIGHTNINGS, RUN_VERB
from lm_profiler.measure.boundary import said, say
from lm_profiler.record.run import Verb
from lm_profiler.training.offered import LoaderOptions, TorchOptions
from lm_profiler.usage_error import UsageError

INSTRUMENTS = {
    "stages": StageOptions,
    "actions": ActionsOptions,
    "memory": MemoryOptions,
    "trace": TraceOptions,
    "numerics": NumericsOptions,
    "whatif": WhatIfOptions,
    "export": ExportOptions,
}
_BASES = {"model": LightningModule, "data": LightningDataModule}
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
        check_memory: Rehearse the run before it is built, on tensors without data, and refuse one that cannot fit. If
            not given, runs of our own module and data alone are: a rehearsal runs the code of a module once more.
        peak_tflops: Dense peak of one device in TFLOP/s, where the built-in table does not know it.
    """

    name: str | None = None
    log_dir: str = "logs"
    check_memory: bool | None = None
    peak_tflops: float | None = None


class OptionsCLI(LightningCLI):
    """A LightningCLI whose constructor parses the arguments of ``call`` and builds nothing."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._verbs: list[LightningArgumentParser] = []
        if RUN_VERB.of_or(LightningCLI) is None:
            raise UsageError(f"Lightning: expected one of {LIGHTNINGS}; {RUN_VERB.missing()}")
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

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # which here depends on the call
        """Return the call's verb, whose parser takes 0.05 s, and the arguments of it that are no options."""
        verb = self.call.arguments[0]
        return {verb: LightningCLI.subcommands()[verb] | {"return_predictions", "verbose"}}  # see run_verb; ours

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our options before the Trainer's many, so that the help shows them first."""
        self._verbs.append(parser)
        parser.add_class_arguments(_RunOptions, as_group=False)
        text = "Print all that is known at the end, as lm_profiler report of the run does."
        parser.add_argument("--verbose", action=ActionYesNo, nargs="?", help=text)
        for key, kind in (INSTRUMENTS | _OFFERED).items():
            parser.add_class_arguments(kind, key)
        text = (
            "Keep the marks until training ends, and tell when and why it gets slower; --watch.signal=true and so on."
        )
        parser.add_argument("--watch", type=bool | WatchOptions, default=False, help=text)
        super().add_core_arguments_to_parser(parser)
        for key, title in _TITLES.items():
            (parser.groups or {})[key].title = title
        for key, ours in OURS.items():
            parser.set_defaults({key: {"class_path": self.call.class_of(key) if key in self._classes else ours}})
        if self._leave_data:
            parser.set_defaults({"data": None})

    def _find_classes(self) -> None:
        """Import the classes that the call names, and find out whether the module has its own data."""
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
        parser.verbs = self._verbs
        self.config = parser.parse_args(args)

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """Return the value of the verb's option ``key``. This overrides Lightning's method of the same name."""
        return config.get(str(self.subcommand), config).get(key, default)

    def instantiate_classes(self) -> None:
        """Build nothing; LightningCLI's constructor calls this."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing; LightningCLI's constructor calls this."""

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError:
            given = self._get(self.config, "seed_everything")
            raise UsageError(f"seed_everything: expected a seed from 0 to {2**32 - 1}, given {given}") from None


# -- the classes that a call names -------------------------------------------------------------------------------------


def class_at(path: str, key: str) -> Any:
    """Return the class or function at the import path ``path``; None for anything else, which the parser reports.

    Raises:
        UsageError: the module exists and fails while it is imported; the message names error, file and line.
    """
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        return None
    try:
        named = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return None
        raise _broken(path, key, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(path, key, error) from error
    made = named if isinstance(named, type) else _returns(named)
    return named if isinstance(made, type) and issubclass(made, _BASES[key]) else None


def _returns(function: Any) -> Any:
    """Return the annotated return type of a function."""
    try:
        return get_type_hints(function).get("return")
    except (NameError, TypeError):
        return None


def _broken(path: str, key: str, error: BaseException) -> UsageError:
    return UsageError(
        f"{key}: expected a class that can be imported, given {path!r}, whose module does not import\n"
        f"{_place(error)}: {said(error)}"
    )


def _place(error: BaseException) -> str:
    """Return the file and line at which the user's own code failed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    at = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in at if not frame.filename.startswith(("<frozen", __file__))]
    # The fault is in the last file of the user, not in the installed packages that it calls.
    own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix))]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else "unknown place"

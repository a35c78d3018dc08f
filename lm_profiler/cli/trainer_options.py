"""Parses the options of the Trainer's verbs with LightningCLI, without building anything; makes help and messages."""

from __future__ import annotations

import inspect
import sys
import traceback
from argparse import SUPPRESS, Action
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn, cast

from jsonargparse import ActionYesNo, ArgumentParser, Namespace
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
)
from lm_profiler.cli.call import DEFAULT_CLASSES, Call
from lm_profiler.cli.option_errors import explain
from lm_profiler.cli.run_context import local_rank
from lm_profiler.cli.trainer_help import FIRST_OPTIONS
from lm_profiler.lightning_names import LIGHTNINGS, RUN_VERB
from lm_profiler.measure.boundary import error_text, print_message
from lm_profiler.record.calls import shipped_configs
from lm_profiler.record.run_record import Verb
from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.training.offered import LoaderOptions, TorchOptions
from lm_profiler.usage_error import UsageError

# verb → Lightning's name of its data; ``LOADERS`` has the hook that returns the data's loader
LOOPS: dict[Verb, str] = {
    "fit": "train",
    "validate": "val",
    "test": "test",
    "predict": "predict",
}
LOADERS = {verb: f"{data}_dataloader" for verb, data in LOOPS.items()}

INSTRUMENTS = {
    "stages": StageOptions,
    "actions": ActionsOptions,
    "memory": MemoryOptions,
    "trace": TraceOptions,
    "numerics": NumericsOptions,
    "export": ExportOptions,
}
_BASES = {"model": LightningModule, "data": LightningDataModule}
# values of ``ckpt_path`` that Lightning resolves itself
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")
_OFFERED = {"torch": TorchOptions, "loader": LoaderOptions}


class Parser(LightningArgumentParser):
    """A parser that reports errors in one or two lines, without the usage text."""

    def __init__(self, **options: Any) -> None:
        # If abbreviations were allowed, a misspelt option could become another option.
        super().__init__(**{"allow_abbrev": False, "add_help": False, **options})
        self.add_argument("-h", "--help", action=_Help, nargs="?", choices=["all"])

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UsageError with the parser's ``message`` in our words, and similar names of options."""
        # For an option in a config file, jsonargparse calls the method of the outer parser, which does not have the
        # options of the verb.
        parsers: list[Any] = [self]
        if self._subcommands_action is not None:
            parsers += self._subcommands_action.choices.values()
        names: list[str] = []
        for parser in parsers:
            options = parser.get_defaults(skip_validation=True)
            names += [
                key.replace(".init_args", "") for key in options.keys(branches=True)
            ]
        raise explain(message, names)


class _Help(Action):
    """The action of ``--help``: print the most used options, or all of them, and exit."""

    def __init__(self, **options: Any) -> None:
        text = "Print the most used options, or all of them, and exit."
        super().__init__(**{**options, "default": SUPPRESS, "help": text})

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Print the most used options, or all of them for ``--help all``, and exit."""
        if values is None:
            print(FIRST_OPTIONS.format(verb=parser.usage.split()[1]), end="")
        else:
            # jsonargparse would show the options of model and data only for `--model.help CLASS`.
            class_parser = ArgumentParser(add_help=False, usage=SUPPRESS)
            class_parser.add_class_arguments(LanguageModel, "model")
            class_parser.add_class_arguments(FakeTokens, "data")
            print(parser.format_help() + class_parser.format_help())
        parser.exit()


@dataclass
class _RunOptions:
    """The options of a run as a whole.

    Args:
        name: Name of the run; if not given, that of the config file.
        log_dir: Folder of all runs.
        check_memory: Before the run is built, rehearse it on tensors without data, and refuse it if it cannot fit into
            memory; this runs the module's code once more. If not given, refuse only a run of the built-in model whose
            weights, gradients and optimizer states alone are too large. If false, refuse no run.
        peak_tflops: Dense peak of one device in TFLOP/s, if the built-in table does not have the device.
    """

    name: str | None = None
    log_dir: str = "logs"
    check_memory: bool | None = None
    peak_tflops: float | None = None


class OptionsCLI(LightningCLI):
    """A LightningCLI whose constructor parses the arguments of ``call`` and builds nothing."""

    def __init__(self, call: Call) -> None:
        self.call = call
        if RUN_VERB.get_or(LightningCLI) is None:
            raise UsageError(
                f"Lightning: expected one of {LIGHTNINGS}; {RUN_VERB.missing()}"
            )
        verb = cast(Verb, call.arguments[0])
        classes: dict[str, type] = {}
        for key in DEFAULT_CLASSES:
            found_class = _import_class(call.class_path(key), key)
            if found_class is not None:
                classes[key] = found_class
        self._class_paths = {key: call.class_path(key) for key in classes}
        uses_own_loaders = (
            _brings_data(classes.get("model"), LOADERS[verb])
            and call.should_leave_out_data()
        )
        super().__init__(
            save_config_callback=None,  # A Callback costs microseconds per step, and the config is saved elsewhere.
            trainer_defaults={
                "devices": 1,
                "max_epochs": -1,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            },
            seed_everything_default=0,
            parser_kwargs={str(verb): {"usage": f"lm_profiler {verb} [options]"}},
            parser_class=Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # The record has the config, so checkpoints do not need it.
            args=call.parser_arguments(self._class_paths, uses_own_loaders),
        )
        self.verb = verb
        self._check_required(classes)
        if local_rank() == 0:
            for line in call.replacement_notes(uses_own_loaders):
                print_message(line)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # depends on the call here
        """Return only the verb of the call, with the arguments of its method that are not options.

        The parser of each further verb would take 0.05 s.
        """
        verb = self.call.arguments[0]
        # ``run_verb`` sets the first, and the second is an option of ours.
        further_arguments = {"return_predictions", "verbose"}
        return {verb: LightningCLI.subcommands()[verb] | further_arguments}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our options before the many options of the Trainer, so that the help shows them first."""
        for action in parser._actions:
            if action.dest == "config":
                configs = ", ".join(shipped_configs())
                action.help = f"A YAML file of options, or one that comes with the package: {configs}."
        parser.add_class_arguments(_RunOptions, as_group=False)
        text = "Print all figures at the end, as `lm_profiler report` does."
        parser.add_argument("--verbose", action=ActionYesNo, nargs="?", help=text)
        for key, options_class in (INSTRUMENTS | _OFFERED).items():
            parser.add_class_arguments(options_class, key)
        text = (
            "Keep watching until training ends, and report when and why it gets slower; "
            "--watch.traces=false takes no traces."
        )
        parser.add_argument(
            "--watch", type=bool | WatchOptions, default=False, help=text
        )
        super().add_core_arguments_to_parser(parser)
        groups = parser.groups or {}
        for key, our_class in DEFAULT_CLASSES.items():
            # The class is set before its options. If it were set later, jsonargparse would keep the values of options
            # that both classes have.
            parser.set_defaults(
                {key: {"class_path": self._class_paths.get(key, our_class)}}
            )
            groups[
                key
            ].title = f"The {key}. The options of {our_class} are listed at the end"

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read ``args`` instead of ``sys.argv``."""
        self.config = parser.parse_args(args)
        options = self.config[self.config["subcommand"]]
        for key in (*INSTRUMENTS, *_OFFERED, "trainer"):
            # In a file, jsonargparse accepts any value for a whole section.
            section = options.get(key)
            if not isinstance(section, Namespace):
                raise UsageError(
                    f"{key}: expected a section of options, given {section!r}; leave {key} out"
                )

    def _check_required(self, classes: Mapping[str, type]) -> None:
        """Raise UsageError if a parameter of model or data without a default gets no value from the call.

        jsonargparse would pass None for it, because the class is the default of its option.
        """
        options = self.config[self.config["subcommand"]]
        for key, cls in classes.items():
            section = options.get(key) or {}
            init_args = dict(section.get("init_args") or {})
            names_in_call = self.call.option_names(key)
            for name in required_parameters(cls):
                is_missing = (
                    name in init_args
                    and init_args[name] is None
                    and name not in names_in_call
                )
                if is_missing:
                    reason = f"because {cls.__name__}.__init__ has no default for it"
                    raise UsageError(
                        f"{key}.{name}: expected a value, {reason}, given none; add --{key}.{name}"
                    )

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """Return the value of the verb's option ``key``. This overrides Lightning's method of the same name."""
        return config.get(str(self.subcommand), config).get(key, default)

    def instantiate_classes(self) -> None:
        """Do nothing: LightningCLI's constructor calls this, but classes are built later."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: LightningCLI's constructor calls this, but the verb is run later."""

    def _parse_ckpt_path(self) -> None:
        """Read the checkpoint that ``ckpt_path`` names; raise UsageError if it is not a checkpoint."""
        options = self.config[self.config["subcommand"]]
        path = str(options.get("ckpt_path") or "best")
        is_local_file = path not in _CHECKPOINT_WORDS and ":" not in path
        if is_local_file and not Path(path).exists():
            raise UsageError(
                f"ckpt_path: {path[:200]} does not exist; name the file of a checkpoint"
            )
        try:
            super()._parse_ckpt_path()
        except (UnpicklingError, RuntimeError, EOFError):
            raise UsageError(
                f"ckpt_path: {path} is not a checkpoint: torch.save did not write it"
            ) from None


def required_parameters(cls: type) -> list[str]:
    """Return the parameters without a default of a class's constructor.

    Those of its bases are included as far as the constructors accept any keyword arguments.
    """
    required: dict[str, bool] = {}
    for base in cls.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None or base is object:
            continue
        _, *parameters = inspect.signature(constructor).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                required.setdefault(
                    parameter.name, parameter.default is parameter.empty
                )
        has_keywords_for_base = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
        )
        if not has_keywords_for_base:
            break
    return [name for name, is_required in required.items() if is_required]


def _brings_data(module_class: type | None, loader: str) -> bool:
    """Return whether a LightningModule defines the hook ``loader`` itself."""
    hook = getattr(module_class, loader, None)
    return hook is not None and hook is not getattr(LightningModule, loader)


def _import_class(path: str, key: str) -> type | None:
    """Return the class at the import path ``path``; None if there is none, which the parser will report."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        return None
    try:
        module = import_module(module_name)
        named_class = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        # A package on the path is missing, or the module itself; not a module that the user's code imports.
        is_no_module = isinstance(
            error, ModuleNotFoundError
        ) and f"{module_name}.".startswith(f"{error.name}.")
        if is_no_module:
            return None
        raise UsageError(
            f"{key}: the module of {path!r} cannot be imported\n{_place_of_failure(error)}: {error_text(error)}"
        ) from error
    is_right_class = isinstance(named_class, type) and issubclass(
        named_class, _BASES[key]
    )
    return named_class if is_right_class else None


def _place_of_failure(error: BaseException) -> str:
    """Return the file and line at which the user's own code failed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    # The error is attributed to the innermost file of the user, not to the installed packages that it calls.
    not_of_user = ("<frozen", __file__, sys.prefix, sys.base_prefix)
    user_frames = []
    for frame in frames:
        if not frame.filename.startswith(not_of_user):
            user_frames.append(frame)
    innermost = user_frames[-1] if user_frames else frames[-1]
    return f"{innermost.filename}:{innermost.lineno}"

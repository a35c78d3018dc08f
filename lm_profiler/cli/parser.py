"""The parser of the Trainer's verbs, with its help texts and its error messages."""

from __future__ import annotations

import shutil
import textwrap
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from lm_profiler.cli.errors import either, explain
from lm_profiler.record.calls import by_name
from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

# The options that ``--help`` lists, by group. None takes the first clause of the option's own help.
FIRST: dict[str, dict[str, str | None]] = {
    "the run": {
        "config": "file of options, or a name such as demo",
        "name": "name of the run",
        "log_dir": None,
        "seed_everything": "seed of all random numbers",
        "verbose": "print all that is known at the end",
        "check_memory": "refuse a run that cannot fit",
        "print_config": "print all settings, and run nothing",
    },
    "stages": {
        "stages.warmup_steps": None,
        "stages.measure_steps": None,
        "stages.until_ci": "or until the interval is this narrow",
        "trace.steps": "steps that torch's profiler traces",
        "memory.steps": "steps in which memory is read",
        "actions.steps": "steps in which each action is timed",
        "numerics.audit": "what precision does to the numbers",
    },
    "model": {
        "model": "class path of any LightningModule",
        "model.size": "small, medium, large, xl, 2.7B; by its source: cs336-2026/xl, llama-2/7B, …",
        "model.num_layers": "blocks, if not as size says",
        "model.attention": "sdpa (fused), math (written out) or package.module:function",
        "model.activation_checkpointing": "keep each block's input only",
        "model.checkpoint_every": "the same for so many blocks together",
        "model.compile": "with torch.compile",
        "model.float32_matmul_precision": "or high (TF32), medium (bf16)",
        "model.optimizer": "adamw, sgd or none",
        "torch.compile": "the same for any module",
    },
    "data": {
        "data": "class path of any LightningDataModule",
        "data.batch_size": None,
        "data.context_length": None,
        "data.num_workers": "processes that make batches",
        "loader.num_workers": "the same for any data",
    },
    "trainer": {
        "trainer.precision": "32-true, bf16-mixed, bf16-true, …",
        "trainer.accelerator": "cpu, gpu, …",
        "trainer.devices": "how many, or which",
        "trainer.num_nodes": "how many machines",
        "trainer.strategy": "ddp, fsdp, …",
        "trainer.accumulate_grad_batches": "batches to an optimizer step",
        "trainer.gradient_clip_val": "largest norm of the gradients",
        "trainer.callbacks": "callbacks to add",
        "trainer.logger": "where the module's own logs go",
    },
}

_COLUMN = 36


class Parser(LightningArgumentParser):
    """A parser that reports errors in a line or two, without the usage text.

    ``verbs`` holds the parsers of its verbs, whose options it needs for errors in a config file.
    """

    verbs: Iterable[LightningArgumentParser] = ()

    def __init__(self, **options: Any) -> None:
        # An abbreviation would turn a misspelt option into another one.
        super().__init__(**{"allow_abbrev": False, "add_help": False, **options})
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="GROUP")

    def help_about(self, what: str | None) -> str:
        """Return help on the most used options (None), on one group of options, or on ``all``.

        Raises:
            UsageError: there is no such group.
        """
        own = ArgumentParser(add_help=False)  # jsonargparse shows these only for `--model.help CLASS`
        own.add_class_arguments(LanguageModel, "model")
        own.add_class_arguments(FakeTokens, "data")
        if what is None:
            return "\n".join(self._first(own))
        for action in self._actions:
            if action.dest == "config":
                action.help = f"A YAML file of options, or one that comes with the package: {', '.join(by_name())}."
        names = [*(self.groups or ())]
        if what not in (*names, "all"):
            raise UsageError(f"help: expected {either([*names, 'all'])}, given {what!r}")
        formatter = self._get_formatter()
        if what == "all":
            formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for parser in (self, own):
            wanted = (parser.groups or {}).get(what)
            for group in parser._action_groups if what == "all" else [wanted] if wanted else []:
                formatter.start_section(group.title)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return formatter.format_help()

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        return self.help_about("all") if "model" in (self.groups or ()) else super().format_help(formatter)

    def _first(self, own: ArgumentParser) -> Iterator[str]:
        """Yield the lines of the most used options; ``own`` holds those of our model and data."""
        known = {option: action for of in (own, self) for action in of._actions for option in action.option_strings}
        width = max(60, shutil.get_terminal_size().columns - 2)
        yield f"usage: {self.usage}"
        groups = ", ".join(self.groups or ())
        text = f"The options that people use first. All: --help all. Of one group: --help with {groups}."
        yield f"\n{textwrap.fill(text, width)}"
        for title, options in FIRST.items():
            yield f"\n{title}:"
            for name, words in options.items():
                if (action := known.get(f"--{name}")) is not None:
                    said = words or _clause(action.help or "")
                    line = f"  {f'--{name}':<{_COLUMN - 3}} {said}{_default(action)}"
                    yield textwrap.fill(line, width, subsequent_indent=" " * _COLUMN)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # For an option in a config file jsonargparse calls the outer parser's error(), which lacks the verb's options.
        defaults = [parser.get_defaults(skip_validation=True) for parser in (self, *self.verbs)]
        known = [key for options in defaults for key in options.keys(branches=True)]
        raise explain(message, [key.replace(".init_args", "") for key in known])


class _Help(Action):
    """The action of ``--help``: print help on a group and end the call."""

    def __init__(self, **options: Any) -> None:
        text = "Print the options that people use first, those of one group, such as trainer, or all, and exit."
        super().__init__(**{**options, "default": SUPPRESS, "help": text})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.help_about(values))
        parser.exit()


def _clause(text: str) -> str:
    """Return ``text`` up to the first semicolon or full stop."""
    clause = text.replace("; ", ". ").partition(". ")[0].rstrip(".")
    return clause[:1].lower() + clause[1:]


def _default(action: Action) -> str:
    """Return the action's default in parentheses; an empty text where it says nothing to a reader."""
    default = action.default
    known = isinstance(default, (bool, int, float, str)) and default != SUPPRESS
    return f" ({str(default).lower() if isinstance(default, bool) else default})" * known

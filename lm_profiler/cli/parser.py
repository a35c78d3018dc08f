"""The parser of the command line: what it says when asked for help, and when it cannot read a call."""

from __future__ import annotations

from argparse import SUPPRESS, HelpFormatter
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from lm_profiler.cli.prose import explain
from lm_profiler.record.shipped_configs import by_name
from lm_profiler.training import FakeTokens, LanguageModel


class Parser(LightningArgumentParser):
    """Says what is wrong in a line or two, without the page of usage around it.

    ``verbs`` are the parsers of its verbs: it speaks for them about what stands in a file.
    """

    verbs: Iterable[LightningArgumentParser] = ()

    def __init__(self, **options: Any) -> None:
        # An abbreviation would turn a misspelt option into another one.
        super().__init__(**{"allow_abbrev": False, **options})

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """What our own model and data take, which the parser keeps to ``--model.help CLASS``, comes last."""
        for action in self._actions:
            if action.dest == "config":
                action.help = f"A YAML file of options, or one that comes with the package: {', '.join(by_name())}."
        text: str = super().format_help(formatter)
        if "model" not in (self.groups or ()):  # a verb's parser has it
            return text
        own = ArgumentParser(usage=SUPPRESS, add_help=False)
        own.add_class_arguments(LanguageModel, "model")
        own.add_class_arguments(FakeTokens, "data")
        return f"{text}\n{own.format_help().lstrip()}"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        defaults = [parser.get_defaults(skip_validation=True) for parser in (self, *self.verbs)]
        known = [key for options in defaults for key in options.keys(branches=True)]
        raise explain(message, [key.replace(".init_args", "") for key in known])

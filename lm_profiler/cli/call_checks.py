"""Checks of the options of a call before their values are parsed. This module does not import torch."""

from __future__ import annotations

from lm_profiler.cli.options import Option
from lm_profiler.usage_error import UsageError

_CLASS_OPTIONS = ("model", "data", "model.class_path", "data.class_path")


def check_option(option: Option) -> None:
    """Raise UsageError if an option has no value, or if a Python file is given instead of a class."""
    is_help = option.name.rpartition(".")[2] == "help"
    # jsonargparse would report only the part of the name before its first dot.
    if "." in option.name and not option.values and not is_help:
        raise UsageError(f"{option.name}: expected a value, given none")
    if option.name in _CLASS_OPTIONS:
        check_class_path(option.name, option.value)


def check_class_path(name: str, path: str) -> None:
    """Raise UsageError if ``path`` is a Python file.

    A class is named by a dotted path, such as package.module.Class.
    """
    if not path.endswith(".py"):
        return
    raise UsageError(
        f"{name}: expected the path of a class, such as package.module.Class, given the file {path!r}"
    )

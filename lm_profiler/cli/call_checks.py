"""Checks of a call's words, before anything reads their values. This module imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from lm_profiler.cli.options import Option
from lm_profiler.record.text import read_text
from lm_profiler.usage_error import UsageError

_CLASS_OPTIONS = ("model", "data", "model.class_path", "data.class_path")


def check_option(option: Option) -> None:
    """Raise UsageError for an option without a value, and for a file in place of a class."""
    is_help = option.name.rpartition(".")[2] == "help"
    # jsonargparse would report only the part of the name before its first dot.
    if "." in option.name and not option.values and not is_help:
        raise UsageError(f"{option.name}: expected a value, given none")
    if option.name in _CLASS_OPTIONS:
        check_class_path(option.name, option.value)


def check_class_path(name: str, path: str) -> None:
    """Raise UsageError for a Python file: a class has a path with dots, such as ``package.module.Class``."""
    if not path.endswith(".py"):
        return
    file = Path(path)
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    parts = [
        part for part in file.with_suffix("").parts if part not in (".", "..", "/")
    ]
    class_path = ".".join([*parts, _class_in(Path(path))])
    remedy = f"write --{name}={class_path}"
    for part in parts:
        if not part.isidentifier():
            remedy = (
                f"rename {part!r}: the name of a module has only letters, digits and _"
            )
    raise UsageError(
        f"{name}: expected the path of a class, given the file {path!r}; {remedy}"
    )


def _class_in(file: Path) -> str:
    """Return the name of the first class of a Python file that is derived from a Module, or else of its first class."""
    try:
        text = read_text(file)
    except (OSError, ValueError):
        return "Class"
    classes: list[tuple[str, str]] = re.findall(
        r"^class (\w+)(?:\(([^)]*)\))?", text, re.MULTILINE
    )
    modules = [name for name, bases in classes if "Module" in bases]
    if modules:
        return modules[0]
    return classes[0][0] if classes else "Class"

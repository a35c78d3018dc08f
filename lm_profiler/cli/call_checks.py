"""Checks of a call's words, before anything reads their values. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from lm_profiler.cli.options import Option
from lm_profiler.record.text import YamlTextError, check_size, read_text
from lm_profiler.usage_error import UsageError

_CLASSES = ("model", "data")
_CLASS_OPTIONS = ("model", "data", "model.class_path", "data.class_path")
_STARTS_COLLECTION = re.compile(r"[\[{*&]|\n")  # text without any of these is one value


def check_option(option: Option) -> None:
    """Raise UsageError for an option without a value, for a file in place of a class, and for YAML without end."""
    is_help = option.name.rpartition(".")[2] == "help"
    # jsonargparse would report only the part of the name before its first dot.
    if "." in option.name and not option.values and not is_help:
        raise UsageError(f"{option.name}: expected a value, given none")
    if option.name in _CLASS_OPTIONS:
        _check_class_path(option.name, option.value)
    _check_value(option.name, option.value)


def check_config(config: yaml.Node, classes: Mapping[str, str | None]) -> None:
    """Raise UsageError for the same in a config; ``classes`` are the class paths that it names, by their option."""
    for name, path in classes.items():
        if path is not None:
            _check_class_path(name, path)
    for name, text in _texts_in(config):
        _check_value(name, text)


def _check_class_path(name: str, path: str) -> None:
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


def _texts_in(node: yaml.Node, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name of the option, text) for each scalar below ``node``."""
    if isinstance(node, yaml.ScalarNode):
        yield name, str(node.value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _texts_in(item, name)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _texts_in(value, f"{name}.{key.value}".lstrip("."))


def _check_value(name: str, value: str) -> None:
    """Raise UsageError for YAML that is too large to be read, in the ``value`` or in a file that it names.

    Text that is not YAML passes, since an option may take any text.
    """
    try:
        _check_yaml(value)
        if _is_file_to_read(name, value):
            _check_yaml(read_text(Path(value)))
    except YamlTextError as error:
        raise UsageError(
            f"{name}: expected a value, given {value[:100]!r}, which {error}"
        ) from None


def _check_yaml(text: str) -> None:
    if _STARTS_COLLECTION.search(text):
        with suppress(yaml.YAMLError):
            check_size(text)


def _is_file_to_read(name: str, value: str) -> bool:
    """Whether ``value`` is a file that jsonargparse may read: it does so if an option takes a class."""
    takes_class = name in _CLASSES or name.startswith("trainer.")
    if not takes_class and not value.endswith((".yaml", ".yml", ".json")):
        return False
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero in it
        return False

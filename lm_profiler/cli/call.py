"""Read a call of a Trainer's verb: its config files, each only once, and the classes that it names.

If the command line names another class than a config file, jsonargparse would keep those options of the file whose
names both classes have. So the file's section of the class is left out here. This module does not import torch, so that
a wrong file is reported immediately.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from lm_profiler.cli.call_checks import check_class_path, check_option
from lm_profiler.cli.option_errors import check_dashes
from lm_profiler.cli.options import Option, is_text, options_in, read_config
from lm_profiler.record.calls import config_file, shipped_configs
from lm_profiler.record.text import text_without_keys
from lm_profiler.usage_error import UsageError

# the classes that are used if the call names none
DEFAULT_CLASSES = {
    "model": "lm_profiler.training.LanguageModel",
    "data": "lm_profiler.training.FakeTokens",
}
_SWEEP_KEYS = {"grid", "list"}  # options that only the file of a sweep has
_RUN_FOLDER_OPTIONS = ("name", "log_dir")


@dataclass(frozen=True)
class _Config:
    # the YAML nodes, whose scalars are still text, because parsed scalars might be written back differently
    node: yaml.MappingNode
    content: Mapping[str, Any]
    word: str  # the path if it can be read again, or the text if the config came through a pipe

    def class_path(self, key: str) -> str | None:
        """Return the class that the file names for ``key``: the value of the key, or ``class_path`` in its section."""
        section = self.content.get(key)
        if isinstance(section, Mapping):
            section = section.get("class_path")
        return section if isinstance(section, str) else None


class Call:
    """The ``arguments`` of a call, the verb first.

    Attributes:
        arguments: The words as they were written. The text of a pipe, which can be read only once, replaces its path.
        line: The options on the line except config files.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments[:1])
        self.line: list[Option] = []
        self._configs: list[_Config] = []
        for option in options_in(arguments[1:]):
            self._add(option)
        for config in self._configs:
            for key in DEFAULT_CLASSES:
                path = config.class_path(key)
                if path is not None:
                    check_class_path(key, path)

    def _add(self, option: Option) -> None:
        """Add an option of the command line, or read the config that it names; raise UsageError if it is wrong."""
        if not option.name:
            check_dashes(option.value)
            remedy = f"to read options from a file, use --config {option.value}"
            raise UsageError(f"expected options, given {option.value!r}; {remedy}")
        if option.name == "config":
            config = _read(option.value)
            self._configs.append(config)
            self.arguments.append(f"--config={config.word}")
            return
        check_option(option)
        self.line.append(option)
        self.arguments += option.words

    @property
    def file(self) -> str | None:
        """The path of the last config that is a file; None if there is none, for example if the config was a pipe."""
        for config in reversed(self._configs):
            if not is_text(config.word):
                return config.word
        return None

    @property
    def overrides(self) -> dict[str, str]:
        """The options on the command line except config files, name and folder; of repeated options the last value.

        >>> Call(["fit", "--model.size=large", "--data.batch_size", "8"]).overrides
        {'model.size': 'large', 'data.batch_size': '8'}
        """
        return {
            option.name: option.value
            for option in self.line
            if option.name not in _RUN_FOLDER_OPTIONS
        }

    @property
    def content(self) -> dict[str, Any]:
        """All options of the call, nested as in a file, without name, folder and the options of replaced classes."""
        ignored = {
            *self._replaced_sections(self.should_leave_out_data()),
            *_RUN_FOLDER_OPTIONS,
        }
        content: dict[str, Any] = {}
        for config in self._configs:
            content.update(config.content)
        for key in ignored & content.keys():
            del content[key]

        overrides = self.overrides
        for name in sorted(overrides, key=_sorts_after_classes):
            value = _value_of(overrides[name])
            _set_nested(content, name.split("."), value)
        return content

    def class_path(self, key: str) -> str:
        """Return the class of ``model`` or ``data``: from the command line, a file, or the default."""
        return self._class_on_line(key) or self._class_in_files(key)

    def option_names(self, key: str) -> set[str]:
        """Return the names of the options that the call gives to the class of ``model`` or ``data``.

        >>> sorted(Call(["fit", "--model.size=large", "--model.init_args.lr", "1e-3"]).option_names("model"))
        ['lr', 'size']
        """
        section = self.content.get(key)
        if not isinstance(section, Mapping):
            return set()
        names = {*section, *(section.get("init_args") or {})}
        return names - {"class_path", "init_args"}

    def should_leave_out_data(self) -> bool:
        """Return whether the default data should be left out for a module with its own data.

        That is so if neither the command line nor the file of the module mentions data.
        """
        line_mentions_data = any(
            option.name.partition(".")[0] == "data" for option in self.line
        )
        module_is_from_file = self._class_on_line("model") is None
        if line_mentions_data or (module_is_from_file and self._is_in_files("data")):
            return False
        return self.class_path("data") == DEFAULT_CLASSES["data"]

    def parser_arguments(
        self, default_keys: Container[str] = (), uses_own_loaders: bool = False
    ) -> list[str]:
        """Return the arguments for a parser, without options of replaced classes.

        Files come first, then classes, then their options, so that the command line overrides files in any order.
        ``default_keys`` are those of ``model`` and ``data`` whose class is already the parser's default.
        """
        arguments = self.arguments[:1]
        replaced = set(self._replaced_sections(uses_own_loaders))
        for config in self._configs:
            text = config.word
            if replaced & config.content.keys():
                text = text_without_keys(config.node, replaced)
            if text.strip() != "{}":
                arguments.append(f"--config={text}")

        for option in sorted(
            self.line, key=lambda option: _sorts_after_classes(option.name)
        ):
            is_default = option.name in default_keys and _is_class_path(option.value)
            if not is_default:
                arguments += option.words
        if uses_own_loaders:
            arguments.append("--data=null")
        return arguments

    def replacement_notes(self, uses_own_loaders: bool = False) -> list[str]:
        """Return notes for the user, one for each section of the config files that this call replaces.

        A note names the class of the call, and states that the options of the section are ignored.
        """
        lines = []
        file = self.file or "the config"
        for key in self._replaced_sections(uses_own_loaders):
            replacement = self.class_path(key)
            if key == "data" and uses_own_loaders:
                replacement = f"{self.class_path('model')}'s own"
            lines.append(
                f"{key}: {replacement} replaces the class of {file}, whose options are ignored"
            )
        return lines

    def _replaced_sections(self, uses_own_loaders: bool) -> list[str]:
        """Return the sections of the files that are ignored, because the command line names another class.

        ``data`` is ignored too if the module ``uses_own_loaders``.
        """
        sections = []
        for key in DEFAULT_CLASSES:
            if not self._is_in_files(key):
                continue
            is_unused_data = key == "data" and uses_own_loaders
            if is_unused_data or self._line_replaces_class(key):
                sections.append(key)
        return sections

    def _line_replaces_class(self, key: str) -> bool:
        """Return whether the command line names another class for the section ``key`` than the files do."""
        path = self._class_on_line(key)
        if path is None:
            return False
        # Only the last names are compared: our classes can be named with their package, their module, or neither.
        return _last_name(path) != _last_name(self._class_in_files(key))

    def _is_in_files(self, key: str) -> bool:
        return any(key in config.content for config in self._configs)

    def _class_in_files(self, key: str) -> str:
        """Return the class that the files name, where the last file counts; the default class if none names one."""
        for config in reversed(self._configs):
            path = config.class_path(key)
            if path:
                return path
        return DEFAULT_CLASSES[key]

    def _class_on_line(self, key: str) -> str | None:
        """Return the last class that the command line names; None if it names none."""
        for option in reversed(self.line):
            may_name_class = option.name in (key, f"{key}.class_path")
            if may_name_class and _is_class_path(option.value):
                return option.value
        return None


def _sorts_after_classes(name: str) -> bool:
    """Return a sort key that places the names of classes before the options of these classes."""
    return name not in DEFAULT_CLASSES


def _is_class_path(value: str) -> bool:
    return value != "null" and value.replace(".", "").isidentifier()


def _last_name(class_path: str) -> str:
    return class_path.rpartition(".")[2]


def _value_of(text: str) -> Any:
    """Return ``text`` parsed as YAML; if it is not YAML, return the text itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read(name: str) -> _Config:
    """Read the config ``name``: a file, the name of a config of the package, or the text itself.

    Raises:
        UsageError: the config does not exist, cannot be read, or is the file of a sweep.
    """
    path = config_file(name)
    is_sweep_name = (
        path == name and name in shipped_configs("sweeps") and not Path(name).exists()
    )
    if is_sweep_name:
        raise UsageError(f"config: {name} is a sweep; run `lm_profiler sweep {name}`")
    node, text = read_config(path)
    content = yaml.safe_load(text)
    short_path = path[:200]
    if _SWEEP_KEYS & content.keys():
        raise UsageError(
            f"config: {short_path} is the file of a sweep; run `lm_profiler sweep {quote(short_path)}`"
        )
    if content.get("config"):
        raise UsageError(
            f"config: a config file cannot name another config, but {short_path} does; leave it out"
        )
    can_be_read_again = not is_text(path) and Path(path).is_file()
    if can_be_read_again:
        return _Config(node, content, path)
    if not is_text(text):
        text = f"{text}\n"
    return _Config(node, content, text)


def _set_nested(content: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the option at ``path`` in the nested ``content``; if the section has a class, as an option of that class.

    A section is a mapping, or the name of a class alone.
    """
    name, *inner_path = path
    if not inner_path:
        content[name] = value
        return
    section = content.get(name)
    if isinstance(section, str):
        section = {"class_path": section}
    inner_content = dict(section or {})
    content[name] = inner_content
    is_option_of_class = "class_path" in inner_content and inner_path[0] != "init_args"
    if is_option_of_class:
        inner_path = ["init_args", *inner_path]
    _set_nested(inner_content, inner_path, value)

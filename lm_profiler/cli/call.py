"""Read a call of a Trainer's verb as it was written: its config files, once, and the classes that it names.

Where a line names another class than a file, jsonargparse keeps the file's options whose names both classes have.
So the file's section for it is left out. This module imports no torch, so that a wrong file is reported at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from lm_profiler.cli.call_checks import check_config, check_option
from lm_profiler.cli.options import Option, check_dashes, is_text, options_in, read_config
from lm_profiler.record.calls import by_name, config_file
from lm_profiler.record.text import without
from lm_profiler.usage_error import UsageError

# the classes that are used where the call names none
OURS = {"model": "lm_profiler.training.LanguageModel", "data": "lm_profiler.training.FakeTokens"}
_SWEEP_KEYS = {"grid", "list"}  # options that only the file of a sweep has


@dataclass(frozen=True)
class _Config:
    node: yaml.MappingNode  # its scalars are still text: parsed ones would be written back differently
    content: Mapping[str, Any]
    word: str  # a path that can be read again, or the text if it came through a pipe

    def class_of(self, key: str) -> str | None:
        said = self.content.get(key)
        said = said.get("class_path") if isinstance(said, Mapping) else said
        return said if isinstance(said, str) else None


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
            if not option.name:
                check_dashes(option.value)
                remedy = f"a file of options is --config {option.value}"
                raise UsageError(f"expected options, given {option.value!r}; {remedy}")
            if option.name == "config":
                config = _config(option.value)
                self._configs.append(config)
                self.arguments.append(f"--config={config.word}")
            else:
                check_option(option)
                self.line.append(option)
                self.arguments += option.words
        for config in self._configs:
            check_config(config.node, {key: config.class_of(key) for key in OURS})

    @property
    def file(self) -> str | None:
        """The path of the last config; None without a config, or where it was a pipe."""
        return next((each.word for each in reversed(self._configs) if not is_text(each.word)), None)

    @property
    def overrides(self) -> dict[str, str]:
        """The options on the line except config files, name and folder; the last value where one is given twice.

        >>> Call(["fit", "--model.size=large", "--data.batch_size", "8"]).overrides
        {'model.size': 'large', 'data.batch_size': '8'}
        """
        return {option.name: option.value for option in self.line if option.name not in ("name", "log_dir")}

    @property
    def content(self) -> dict[str, Any]:
        """All options of the call, nested as in a file, without those of other classes and of the run's folder."""
        left_out = {*self._left_out(self.leaves_data_out()), "name", "log_dir"}
        content = {key: value for each in self._configs for key, value in each.content.items() if key not in left_out}
        for name, text in sorted(self.overrides.items(), key=lambda option: option[0] not in OURS):
            with suppress(yaml.YAMLError):  # text that is not YAML stays text
                text = yaml.safe_load(text)
            _put(content, name.split("."), text)
        return content

    def class_of(self, key: str) -> str:
        """Return the class of ``model`` or ``data``: the last on the line, else the last in a file, else ours."""
        in_files = [each.class_of(key) for each in self._configs]
        return next(filter(None, (self._named(key), *reversed(in_files))), OURS[key])

    def options_of(self, key: str) -> set[str]:
        """Return the names of the options that the call gives to the class of ``model`` or ``data``.

        >>> sorted(Call(["fit", "--model.size=large", "--model.init_args.lr", "1e-3"]).options_of("model"))
        ['lr', 'size']
        """
        section = self.content.get(key)
        if not isinstance(section, Mapping):
            return set()
        init_args = section.get("init_args") or {}
        return ({*section} | {*init_args}) - {"class_path", "init_args"}

    def leaves_data_out(self) -> bool:
        """Whether a module that brings its own data gets no other: neither the line nor its file mentions data."""
        on_line = any(option.name.partition(".")[0] == "data" for option in self.line)
        theirs = self._named("model") is None and any("data" in each.content for each in self._configs)
        return not on_line and not theirs and self.class_of("data") == OURS["data"]

    def for_parser(self, known: Container[str] = (), leave_data: bool = False) -> list[str]:
        """Return the arguments without options of other classes, and without the class names of ``known`` keys.

        Files go first, then classes, then their options: the line overrides files, whatever its order.
        """
        left_out = {*self._left_out(leave_data)}
        texts = [without(each.node, left_out) if left_out & {*each.content} else each.word for each in self._configs]
        options = [option for option in self.line if option.name not in known or not _is_path(option.value)]
        options.sort(key=lambda option: option.name not in OURS)
        return [
            *self.arguments[:1],
            *(f"--config={text}" for text in texts if text.strip() != "{}"),
            *(word for option in options for word in option.words),
            *["--data=null"] * leave_data,
        ]

    def said_of_files(self, leave_data: bool = False) -> Iterator[str]:
        """Yield a line for each section of the files that ``for_parser`` leaves out."""
        for key in self._left_out(leave_data):
            own = f"{self.class_of('model')}'s own" if key == "data" and leave_data else self.class_of(key)
            yield f"{key}: {own} takes the place of {self.file or 'the config'}'s, whose options are left out"

    def _left_out(self, leave_data: bool) -> Iterator[str]:
        """Yield the sections whose class on the line is another than in the files."""
        for key in (key for key in OURS if any(key in each.content for each in self._configs)):
            line, files = self._named(key), [each.class_of(key) for each in self._configs]
            theirs = next(filter(None, reversed(files)), OURS[key])
            # compared by last name: our classes can be named by package, by module, or by class name alone
            other = line is not None and line.rpartition(".")[2] != theirs.rpartition(".")[2]
            if other or (key == "data" and leave_data):
                yield key

    def _named(self, key: str) -> str | None:
        """Return the class that the line names; None where it names none."""
        said = [option.value for option in self.line if option.name in (key, f"{key}.class_path")]
        return next((value for value in reversed(said) if _is_path(value)), None)


def _is_path(value: str) -> bool:
    return value != "null" and value.replace(".", "").isidentifier()


def _config(given: str) -> _Config:
    path = config_file(given)
    if path == given and given in by_name("sweeps") and not Path(given).exists():
        raise UsageError(f"config: {given} is a sweep; run `lm_profiler sweep {given}`")
    node, text = read_config(path)
    content = yaml.safe_load(text)
    if _SWEEP_KEYS & content.keys():
        raise UsageError(f"config: {path[:200]} is the file of a sweep; run `lm_profiler sweep {quote(path[:200])}`")
    if content.get("config"):
        raise UsageError(f"config: expected no further config, given one in {path[:200]}; leave it out")
    if not is_text(path) and Path(path).is_file():
        return _Config(node, content, path)
    if not is_text(text):
        text = f"{text}\n"
    return _Config(node, content, text)


def _put(content: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set an option of ``content``; where a class is named beside it, it is an option of that class."""
    name, *below = path
    if not below:
        content[name] = value
        return
    inner = content.get(name)
    inner = {"class_path": inner} if isinstance(inner, str) else dict(inner or {})
    content[name] = inner
    _put(inner, ["init_args", *below] if "class_path" in inner and below[0] != "init_args" else below, value)

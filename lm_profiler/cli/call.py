"""A call of a Trainer's verb as it was written: its config files, read once, and the classes that it names.

The parser keeps what it knows of one class when another is named, wherever a parameter has the same name. So it is
told the last class from the beginning, and nothing of what was written for another. Imports no torch: a wrong file is
told at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lm_profiler.cli.configs import is_text, read_config
from lm_profiler.cli.line import options_in
from lm_profiler.cli.usage import UsageError
from lm_profiler.record.shipped import config_file
from lm_profiler.record.yaml_text import read_text, too_large, without

OURS = {"model": "lm_profiler.training.LanguageModel", "data": "lm_profiler.training.FakeTokens"}
"""What is taken where no class is named."""

NO_DATA = "null"
_SECTIONS = ("model", "trainer", "stages", "memory", "trace", "numerics")


@dataclass(frozen=True)
class _Item:
    """One option of the line as it stands there, or one config with its nodes.

    ``file`` is where that can be read again; ``says`` is what it says of model and data, and
    ``content`` all that it says, by the paths of options or nested as in the file.
    """

    words: Sequence[str]
    says: Mapping[str, Any] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)
    option: str = ""
    value: str = ""
    file: str | None = None
    node: yaml.Node | None = None

    def names(self, key: str) -> str | None:
        """The class that this names for ``key``; ``null`` for no data."""
        said = self.says.get(key, "")
        if isinstance(said, Mapping):
            said = said.get("class_path", "")
        return NO_DATA if said is None and key == "data" else said if isinstance(said, str) and said else None


class Call:
    """The ``arguments`` of a call, the verb first.

    Attributes:
        arguments: As they were written; in the place of a pipe, which can be read but once, stands what was in it.
        file: Where the last config was read; None without any, or where that was a pipe.

    Raises:
        UsageError: a config file is missing, unreadable, not YAML, no mapping of options, or larger than people write.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._verb, self._items = list(arguments[:1]), list(_items(arguments[1:]))
        self.arguments = [*self._verb, *(word for item in self._items for word in item.words)]
        configs = [item.file for item in self._items if item.node is not None]
        self.file = configs[-1] if configs else None

    def says(self, option: str) -> Any:
        """The last value that is given to an option such as ``trainer.accelerator``; None for none."""
        last = None
        for item in self._items:
            value = item.content.get(option) if item.node is None else _below(item.content, option.split("."))
            last = value if value is not None else last
        return last

    @property
    def overrides(self) -> dict[str, str]:
        """What the line gives beside config files, name and folder; of an option given twice, the last.

        >>> Call(["fit", "--model.size=large", "--data.batch_size", "8"]).overrides
        {'model.size': 'large', 'data.batch_size': '8'}
        """
        left_out = ("", "config", "name", "log_dir")
        return {item.option: item.value for item in self._items if item.node is None and item.option not in left_out}

    def class_of(self, key: str) -> str:
        """The class of ``model`` or ``data``: the last that is named, by the line rather than by a file; or ours."""
        return self._named(key)[1]

    def leaves_data_out(self) -> bool:
        """Whether nothing is said of the data of a module that is not ours.

        What a file before it says of the data without a class was written for another module.
        """
        at, ours = self._named("model")[0], self._named("data")[0] < 0
        later = [item for n, item in enumerate(self._order) if n >= at or item.node is None]
        return ours and at >= 0 and not any("data" in item.says for item in later)

    def for_parser(self, known: Container[str] = (), leave_data: bool = False) -> list[str]:
        """The arguments without what was written for other classes, and without the classes of ``known`` keys."""
        words = list(self._verb)
        for item in self._items:
            passed = self._passed(item, leave_data)
            if item.node is not None and passed:
                rest = without(item.node, passed)
                words += [f"--config={rest}"] * (rest.strip() != "{}")
            elif item.file is not None:
                words.append(f"--config={item.file}")
            elif not any(key in known and isinstance(said, str) for key, said in item.says.items() if not item.node):
                words += item.words
        return words

    def passed_over(self, leave_data: bool = False) -> Iterator[tuple[str, str, Sequence[str]]]:
        """What ``for_parser`` leaves out: the key, the file, and the names of its options there."""
        for item in self._items:
            for key in sorted(self._passed(item, leave_data)):
                said = item.says[key]
                options = said.get("init_args", said) if isinstance(said, Mapping) else {}
                yield key, item.file or "the config", [*options] if isinstance(options, Mapping) else []

    @property
    def _order(self) -> list[_Item]:
        """Files before options: a class on the line is the last word, wherever it stands there."""
        return sorted(self._items, key=lambda item: item.node is None)

    def _named(self, key: str, before: _Item | None = None) -> tuple[int, str]:
        """The place in the order and the name of the class last named ``before`` an item; -1 and ours for none."""
        last = (-1, OURS[key])
        for at, item in enumerate(self._order):
            if item is before:
                break
            if (name := item.names(key)) is not None:
                last = (at, name)
        return last

    def _passed(self, item: _Item, leave_data: bool) -> set[str]:
        """The keys of a file that were written for another class than the last."""
        if item.node is None:
            return set()
        last = {key: self.class_of(key) for key in item.says}
        own = {key: item.names(key) or self._named(key, item)[1] for key in item.says}
        return {key for key in item.says if not _same(own[key], last[key]) or (leave_data and key == "data")}


def _below(content: Any, path: Sequence[str]) -> Any:
    for part in path:
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def _same(one: str, other: str) -> bool:
    """Whether two paths name one class: ours can be had from the package and from its module, or by its name alone."""
    (above, _, name), (other_above, _, other_name) = one.rpartition("."), other.rpartition(".")
    ours = all(path == "" or path.startswith("lm_profiler.training") for path in (above, other_above))
    return one == other or (name == other_name and ours)


# -- reading -----------------------------------------------------------------------------------------------------------


def _items(arguments: Sequence[str]) -> Iterator[_Item]:
    for name, values, words in options_in(arguments):
        value = values[-1] if values else ""
        if name == "config" and "://" not in value:
            yield _config(value, words)
            continue
        if (reason := too_large(value)) is not None:
            raise UsageError(f"{name}: expected a value that can be read, given one that {reason}")
        yield _Item(words, _of_option(name, value), {name: _plain(value)}, option=name, value=value)


def _of_option(name: str, value: str) -> dict[str, Any]:
    key, dot, rest = name.partition(".")
    if key not in OURS:
        return {}
    if rest == "class_path":
        return {key: value}
    said = {} if dot else _loaded(key, value)
    return {key: said}


def _plain(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        return value


def _loaded(key: str, value: str) -> Any:
    """What ``--model=…`` says: a class, options, or a file of them."""
    try:
        if value.endswith((".yaml", ".yml", ".json")):
            value = read_text(Path(value))
        said = yaml.safe_load(value)
    except (OSError, ValueError, yaml.YAMLError):  # the parser tells what is wrong with it
        return {}
    if said == {}:
        raise UsageError(f"{key}: expected a class path or options, given {{}}; leave it out")
    return said


def _config(path: str, words: Sequence[str]) -> _Item:
    path = config_file(path)
    node, text = read_config(path)
    content = yaml.safe_load(text)
    said = {key: content[key] for key in OURS if key in content}
    for key in _SECTIONS:
        section = content.get(key, {})
        named = isinstance(section, str) and (key in OURS or section.endswith((".yaml", ".yml", ".json")))
        if not (isinstance(section, dict) or named):
            given = "null" if content[key] is None else repr(content[key])[:100]
            raise UsageError(f"{key}: expected options, given {given} in {path[:200]}; leave it out")
    if not isinstance(content.get("config"), (list, type(None))):
        raise UsageError(f"config: expected no further config, given one in {path[:200]}; leave it out")
    for key, section in said.items():
        if section == {}:
            raise UsageError(f"{key}: expected a class path or options, given {{}} in {path[:200]}; leave it out")
    if not is_text(path) and Path(path).is_file():
        return _Item(words, said, content, file=path, node=node)
    return _Item([f"--config={text}" if is_text(text) else f"--config={text}\n"], said, content, node=node)

"""Read a call of a Trainer's verb as it was written: its config files, once, and the classes that it names.

Where a call names a second class, jsonargparse keeps each option of the first whose name both classes have. So the
parser gets the last class from the beginning, and no option that was written for another class. This module imports
no torch, so that a wrong file is reported at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lm_profiler.cli.arguments import Option, is_text, options_in, read_config
from lm_profiler.record.calls import config_file
from lm_profiler.record.text import YamlTextError, check_size, read_text, without
from lm_profiler.usage_error import UsageError

# the classes that are used where the call names none
OURS = {"model": "lm_profiler.training.LanguageModel", "data": "lm_profiler.training.FakeTokens"}

_SECTIONS = (*OURS, "trainer", "stages", "actions", "memory", "trace", "numerics", "torch", "loader")
_FILES = (".yaml", ".yml", ".json")


@dataclass(eq=False)
class _Item:
    """One option of the line, or one config with its nodes.

    ``own`` holds the classes of the model and the data to which its options belong.
    """

    option: Option  # the option as it was written
    content: Mapping[str, Any]  # its values, nested as in a file
    node: yaml.Node | None = None  # the YAML nodes of a config, whose scalars are still text; None for an option
    file: str | None = None  # the path from which a config can be read again; None for a pipe
    own: dict[str, str] = field(default_factory=dict)

    def names(self, key: str) -> str | None:
        """Return the class that this item names for ``key``; ``null`` for no data."""
        said = self.content.get(key, "")
        if isinstance(said, Mapping):
            said = said.get("class_path", "")
        return "null" if said is None and key == "data" else said if isinstance(said, str) and said else None

    def only_names(self, key: str) -> bool:
        """Whether this item is an option that names the class for ``key`` and sets nothing else."""
        said = self.content.get(key)
        alone = isinstance(said, str) or (isinstance(said, Mapping) and [*said] == ["class_path"])
        return self.node is None and alone and self.names(key) is not None


class Call:
    """The ``arguments`` of a call, the verb first.

    Attributes:
        arguments: The words as they were written. The text of a pipe, which can be read only once, replaces its path.
        file: The path of the last config; None without a config, or where it was a pipe.

    Raises:
        UsageError: a config file is missing, unreadable, not YAML, no mapping of options, or larger than people write.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._verb, self._items = list(arguments[:1]), list(_items(arguments[1:]))
        self._named = dict.fromkeys(OURS, -1)
        self._classes = dict(OURS)
        # Files before options: a class on the line is the last word, wherever it stands there.
        self._order = sorted(self._items, key=lambda item: item.node is None)
        for at, item in enumerate(self._order):
            for key in OURS:
                if (name := item.names(key)) is not None:
                    self._named[key], self._classes[key] = at, name
            item.own = dict(self._classes)
        self.arguments = [*self._verb, *(word for item in self._items for word in item.option.words)]
        self.file = next((item.file for item in reversed(self._items) if item.node is not None), None)

    def says(self, option: str) -> Any:
        """Return the last value of an option such as ``ckpt_path``; None where it is not given."""
        said = (item.content.get(option) for item in reversed(self._items))
        return next((value for value in said if value is not None), None)

    @property
    def overrides(self) -> dict[str, str]:
        """The options on the line except config files, name and folder; the last value where one is given twice.

        >>> Call(["fit", "--model.size=large", "--data.batch_size", "8"]).overrides
        {'model.size': 'large', 'data.batch_size': '8'}
        """
        left_out = ("", "config", "name", "log_dir")
        options = [item.option for item in self._items if item.node is None]
        return {option.name: option.value for option in options if option.name not in left_out}

    @property
    def content(self) -> dict[str, Any]:
        """All options of the call, nested as in a file, without those of other classes and of the run's folder."""
        content: dict[str, Any] = {}
        for item in self._items:
            passed = {*self._passed(item, self.leaves_data_out()), "config", "name", "log_dir"}
            content = _merged(content, {key: value for key, value in item.content.items() if key not in passed})
        return content

    def class_of(self, key: str) -> str:
        """Return the class of ``model`` or ``data``: the last on the line, else the last in a file, else ours."""
        return self._classes[key]

    def leaves_data_out(self) -> bool:
        """Whether a module that is not ours comes without options for its data.

        Data options in a file before the one that names the module belong to another module, unless they name a class.
        """
        at, ours = self._named["model"], self._named["data"] < 0
        later = [item for n, item in enumerate(self._order) if n >= at or item.node is None]
        return ours and at >= 0 and not any("data" in item.content for item in later)

    def for_parser(self, known: Container[str] = (), leave_data: bool = False) -> list[str]:
        """Return the arguments without options of other classes, and without the class names of ``known`` keys."""
        words = list(self._verb)
        for item in self._items:
            passed = self._passed(item, leave_data)
            if item.node is not None and passed:  # pass text on: parsed scalars would be written back in another way
                rest = without(item.node, passed)
                words += [f"--config={rest}"] * (rest.strip() != "{}")
            elif item.file is not None:
                words.append(f"--config={item.file}")
            elif not any(key in known and item.only_names(key) for key in OURS):
                words += item.option.words
        return words

    def passed_over(self, leave_data: bool = False) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yield what ``for_parser`` leaves out: the key, its file, and the names of its options there."""
        for item in self._items:
            for key in sorted(self._passed(item, leave_data)):
                said = item.content[key]
                options = said.get("init_args", said) if isinstance(said, Mapping) else {}
                yield key, item.file or "the config", [*options] if isinstance(options, Mapping) else []

    def _passed(self, item: _Item, leave_data: bool) -> set[str]:
        """Return the keys of a file whose options belong to another class than the last one named."""
        keys = OURS.keys() & item.content.keys() if item.node is not None else set[str]()
        return {key for key in keys if not _same(item.own[key], self.class_of(key)) or (leave_data and key == "data")}


def _merged(into: Any, said: Any, key: str = "") -> Any:
    """Return ``into`` overridden by ``said``; values beside a class name are options of that class."""
    if key in OURS and isinstance(said, str):
        said = {"class_path": said}
    if not isinstance(into, Mapping) or not isinstance(said, Mapping):
        return said
    if "class_path" in into and "class_path" not in said and "init_args" not in said:
        said = {"init_args": said}
    elif "class_path" not in into and into and ("class_path" in said or "init_args" in said):
        into = {"init_args": into}
    return {**into, **{name: _merged(into.get(name), value, name) for name, value in said.items()}}


def _same(one: str, other: str) -> bool:
    """Whether two paths name one class: ours can be named by package, by module, or by class name alone."""
    (above, _, name), (other_above, _, other_name) = one.rpartition("."), other.rpartition(".")
    ours = all(path == "" or path.startswith("lm_profiler.training") for path in (above, other_above))
    return one == other or (name == other_name and ours)


# -- reading -----------------------------------------------------------------------------------------------------------


def _items(arguments: Sequence[str]) -> Iterator[_Item]:
    for option in options_in(arguments):
        if option.name == "config" and "://" not in option.value:
            yield _config(option)
            continue
        content = _loaded(option)
        # Nest the value as a file would, so that options and configs merge in the same way.
        for part in reversed(option.name.split(".")):
            content = {part: content}
        _check_sections(content)
        yield _Item(option, content)


def _loaded(option: Option) -> Any:
    """Return the option's value; the value of ``--model`` and ``--data`` may be a file."""
    value = option.value
    try:
        if option.name in OURS and value.endswith(_FILES):
            value = read_text(Path(value))
        check_size(value)
        return yaml.safe_load(value)
    except YamlTextError as error:
        raise UsageError(f"{option.name}: expected a value that can be read, given one that {error}") from None
    except (OSError, ValueError, yaml.YAMLError):  # the parser reports the error with the option's type
        return value


def _config(option: Option) -> _Item:
    path = config_file(option.value)
    node, text = read_config(path)
    # The nodes keep scalars as text for the parser; the content is needed to find the classes.
    content = yaml.safe_load(text)
    _check_sections(content, f" in {path[:200]}")
    if not isinstance(content.get("config"), (list, type(None))):
        raise UsageError(f"config: expected no further config, given one in {path[:200]}; leave it out")
    if not is_text(path) and Path(path).is_file():
        return _Item(option, content, node, file=path)
    return _Item(option._replace(words=[f"--config={text}" + "\n" * (not is_text(text))]), content, node)


def _check_sections(content: Mapping[str, Any], where: str = "") -> None:
    """Raise UsageError for a section that holds no options and names neither a class nor a file of options."""
    for key in [key for key in _SECTIONS if key in content]:
        said, has_class = content[key], key in OURS
        named = isinstance(said, str) and (has_class or said.endswith(_FILES))
        left_out = said is None and key == "data"
        if not (named or left_out or (isinstance(said, Mapping) and (said or not has_class))):
            given = "null" if said is None else repr(said)[:100]
            expected = "a class path or options" if has_class else "options"
            raise UsageError(f"{key}: expected {expected}, given {given}{where}; leave it out")

"""Read the options of a verb without a Trainer: jsonargparse builds a parser and the help from a dataclass.

Each field of the dataclass is an option, and its line in the docstring is the help. Three fields are not options:
``options`` gets the words that are not options of the verb, ``program`` the words after ``--``, and ``command`` the
whole call.

The words of each option are joined into one word before the parser reads them. A sequence may be written with commas
between its values, or with spaces if they are numbers or paths. A mapping is written as ``--field.KEY VALUE``. Values
stay text until they are converted to the type of their field, so that a sweep can pass ``010`` unchanged to its cells.
"""

from __future__ import annotations

import json
import sys
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Generic,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_loader

from lm_profiler.cli.option_errors import check_dashes, explain, nearest, unknown_option
from lm_profiler.record.calls import command_line, config_file, shipped_configs
from lm_profiler.record.secrets import mask_line
from lm_profiler.record.text import (
    YamlTextError,
    compose,
    read_text,
    text_of,
    text_without_keys,
)
from lm_profiler.usage_error import UsageError, expect

# the number of values of an option that takes any number of them
UNLIMITED = sys.maxsize
_MAX_VALUES = 1000  # the most values of one option in a sweep or a search

# the fields that are not options
_FIT_OPTIONS, _PROGRAM, _COMMAND = "options", "program", "command"
_EXPECTED = "config: expected a YAML file of options"
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_SHORT_OPTIONS = {"-c": "--config", "-h": "--help"}

T = TypeVar("T")


class Option(NamedTuple):
    """An option as it was written: its name, its values, and all of its words.

    A positional word is represented as the value of an option with an empty ``name``.
    """

    name: str
    values: Sequence[str]
    words: Sequence[str]

    @property
    def value(self) -> str:
        """The first value, or an empty text if there is none."""
        return self.values[0] if self.values else ""


def options_in(
    arguments: Sequence[str], max_values: Callable[[str], int] = lambda name: 1
) -> Iterator[Option]:
    """Yield the options in ``arguments``; ``max_values`` returns how many values the option of a name may have.

    >>> [option[:2] for option in options_in(["fit", "--config", "a.yaml", "--model.size=large"])]
    [('', ['fit']), ('config', ['a.yaml']), ('model.size', ['large'])]
    """
    words_left = list(arguments)
    while words_left:
        word = words_left.pop(0)
        option, has_value, value = word.partition("=")
        option = _SHORT_OPTIONS.get(option, option)
        name = option[2:]
        if not option.startswith("--") or not name:
            yield Option(name="", values=[word], words=[word])
        elif has_value:
            yield Option(name, values=[value], words=[word])
        else:
            values = _take_values(words_left, max_values(name))
            yield Option(name, values, [word, *values])


def _take_values(words_left: list[str], max_values: int) -> list[str]:
    """Remove the values of an option from the words after it, and return them."""
    if max_values == 0:
        # A flag takes a boolean that follows it: no positional argument is called "true".
        boolean_follows = bool(words_left) and words_left[0].lower() in (
            "true",
            "false",
        )
        return [words_left.pop(0)] if boolean_follows else []
    values: list[str] = []
    while (
        words_left and len(values) < max_values and not words_left[0].startswith("--")
    ):
        values.append(words_left.pop(0))
    return values


def read_config(path: str, shipped: str = "") -> tuple[yaml.MappingNode, str]:
    """Return the YAML nodes and the text of a config.

    ``path`` is a file, the name of a config that comes with the package, or the text itself. Such names are searched in
    the package's folder ``shipped``, for example sweeps. A file is opened only once, because it may be a pipe.
    """
    if not path:
        raise UsageError(f"{_EXPECTED}, given none")
    short_path = path[:200]
    try:
        text = path if is_text(path) else read_text(Path(config_file(path, shipped)))
        node = compose(text)
    except OSError as error:
        remedy = _similar_config(path, shipped)
        raise UsageError(
            f"{_EXPECTED}, given {short_path} ({error.strerror}){remedy}"
        ) from None
    except YamlTextError as error:
        raise UsageError(f"{_EXPECTED}, given {short_path}, which {error}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(
            f"{_EXPECTED}, given {short_path}; write for example `model: {{size: small}}`"
        )
    return node, text


def _similar_config(path: str, shipped: str) -> str:
    """Return a proposal for a config that does not exist: shipped configs; empty if ``path`` is clearly a file."""
    if "/" in path or path.endswith(_CONFIG_SUFFIXES):
        return ""
    names = shipped_configs(shipped)
    proposal = nearest(path, names) or f"one of {', '.join(names)}"
    return f"; did you mean {proposal}?"


def is_text(path: str) -> bool:
    """Return whether ``path`` is the text of a config: ranks get the text if the config came through a pipe."""
    return "\n" in path or path.startswith("{")


@dataclass
class _ClassifiedWords:
    """The words of a command line, classified by their use."""

    file: str | None = None  # the file of options
    # one word per option of the verb, for the parser
    parser_words: list[str] = field(default_factory=list)
    # option → key → value, for options that are mappings
    mappings: dict[str, dict[str, Any]] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    fit_options: list[str] = field(default_factory=list)  # options of ``fit``


class OptionsReader(Generic[T]):
    """Reads the options of one ``verb``, the fields of the dataclass ``options_class``, which all have defaults.

    The class may have ``WORDS``, the field that takes positional arguments; ``FILE``, the field that names a file of
    options (``config`` if not given); ``SHIPPED``, the folder of such files in the package; and ``PROGRAM_EXAMPLE``,
    an example of the words after --.
    """

    def __init__(self, verb: str, options_class: Callable[..., T]) -> None:
        self._verb = verb
        self._options_class = options_class
        self._positional_option = _class_constant(options_class, "WORDS", "")
        self._file_option = _class_constant(options_class, "FILE", "config")
        self._shipped = _class_constant(options_class, "SHIPPED", "")
        self._program_example = _class_constant(
            options_class, "PROGRAM_EXAMPLE", "python train.py"
        )
        # the fields that hold other words of the call than options of the verb
        self._special_fields: set[str] = set()
        self._field_names: dict[str, str] = {}  # option → field
        self._types: dict[str, Any] = {}  # option → type, without None
        hints = get_type_hints(options_class)
        for field_ in fields(cast(Any, options_class)):
            if field_.name in (_FIT_OPTIONS, _PROGRAM, _COMMAND):
                self._special_fields.add(field_.name)
                continue
            option = field_.name.removesuffix("_")  # `try` is a keyword
            self._field_names[option] = field_.name
            self._types[option] = _strip_none(hints[field_.name])

    def read(self, arguments: Sequence[str]) -> T:
        """Return the options of ``arguments`` and of the file that they name; ``arguments`` override the file."""
        arguments_of_verb, program = self._split_at_program(arguments)
        line = self._classify_words(arguments_of_verb)
        parsed = vars(self._parser().parse_args(self._all_parser_words(line)))
        values: dict[str, Any] = {}
        for field_name in self._field_names.values():
            value = line.file if field_name == self._file_option else parsed[field_name]
            if value is not None:  # A file may contain a key without a value.
                values[field_name] = value
        special_values = {
            _FIT_OPTIONS: line.fit_options,
            _PROGRAM: program,
            _COMMAND: command_line(mask_line((self._verb, *arguments))),
        }
        for field_name in self._special_fields:
            values[field_name] = special_values[field_name]
        return self._options_class(**values)

    def help(self, examples: str) -> str:
        """Return the text that ``--help`` prints."""
        usage = [f"lm_profiler {self._verb}"]
        if self._positional_option:
            usage.append(f"[{self._positional_option.upper()}]")
        usage.append("[options]")
        if _FIT_OPTIONS in self._special_fields:
            usage.append("[options of fit]")
        if _PROGRAM in self._special_fields:
            usage.append(f"-- {self._program_example}")
        docstring = cleandoc(self._options_class.__doc__ or "")
        parser = self._parser()
        parser.usage = " ".join(usage)
        parser.description = docstring.partition("\n\nArgs:")[0].partition(
            "\n\nRaises:"
        )[0]
        parser.epilog = examples
        return str(parser.format_help())

    def _parser(self) -> _OptionsParser:
        """Return jsonargparse's parser of the options class, without the fields that are not options."""
        set_loader("texts", _parse_texts, exceptions=(YamlTextError,))
        parser = _OptionsParser(
            parser_mode="texts",
            allow_abbrev=False,
            print_config=None,
            formatter_class=_HelpFormatter,
        )
        if self._file_option in self._types:
            parser.add_argument(
                f"--{self._file_option}",
                action="config",
                help="A YAML file of these options.",
            )
        skipped = {*self._special_fields, self._file_option}
        parser.add_class_arguments(self._options_class, as_group=False, skip=skipped)
        for action in parser._actions:
            self._rename(action, parser)
        return parser

    def _rename(self, action: Action, parser: _OptionsParser) -> None:
        """Make the help show an option as a user writes it.

        jsonargparse would describe its own syntax, and call the option ``--try`` by the name of its field, ``try_``.
        """
        option = action.dest.removesuffix("_")
        type_hint = self._types.get(option)
        if type_hint is None:
            return
        action.option_strings = [f"--{option}"]
        if _is_container(type_hint, Mapping):
            action.option_strings = [f"--{option}.KEY"]
            action.metavar = "VALUE"
        elif _is_container(type_hint, Sequence):
            action.metavar = "VALUE ..."
        parser._option_string_actions[f"--{option}"] = action

    def _type_hint(self, name: str) -> Any:
        """Return the type of the option ``name``'s value; None if there is no such option."""
        # ``grid.model.size`` is a key of the option ``grid``, which is a mapping
        option, dot, key = name.partition(".")
        type_hint = self._types.get(option)
        if not dot:
            return type_hint
        if _is_container(type_hint, Mapping) and key:
            _, value_type = get_args(type_hint)
            return value_type
        return None

    def _max_values(self, name: str) -> int:
        """Return how many words the option ``name`` may have as values; 0 for a flag."""
        type_hint = self._type_hint(name)
        if type_hint is bool:
            return 0
        if _is_container(type_hint, tuple):
            return len(get_args(type_hint))
        if not _is_container(type_hint, Sequence):
            return 1
        # A further text may be a positional argument, if the verb has any.
        is_never_positional = (
            get_args(type_hint)[0] in (int, Path) or not self._positional_option
        )
        return UNLIMITED if is_never_positional else 1

    def _split_at_program(
        self, arguments: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Return the arguments of the verb, and the words after ``--`` if the verb takes a program."""
        if _PROGRAM not in self._special_fields:
            return arguments, []
        index = [*arguments, "--"].index("--")
        program = list(arguments[index + 1 :])
        if not program:
            example = f"`lm_profiler {self._verb} -- {self._program_example}`"
            raise UsageError(
                f"{self._verb}: expected -- and a command, such as {example}, given none"
            )
        return arguments[:index], program

    def _classify_words(self, arguments: Sequence[str]) -> _ClassifiedWords:
        """Classify the words of ``arguments`` by their use, and check positional words."""
        line = _ClassifiedWords()
        for option in options_in(arguments, self._max_values):
            self._add_option(option, line)
        self._check_positional(line.positional)
        if line.positional and self._positional_option == self._file_option:
            line.file = line.positional[0]
        elif line.positional:
            type_hint = self._types[self._positional_option]
            word = _parser_word(self._positional_option, type_hint, line.positional)
            line.parser_words.append(f"--{self._positional_option}={word}")
        return line

    def _add_option(self, option: Option, line: _ClassifiedWords) -> None:
        """Add an option to the field of ``line`` for its kind; raise UsageError if it does not exist.

        The kinds are positional words, the file, mappings, options of fit, and words for the parser.
        """
        name = option.name
        if not name:
            line.positional.append(option.value)
            return
        type_hint = self._type_hint(name)
        if type_hint is None:
            # A name with a dot is an option of fit. A name without a dot may be a misspelt option of the verb.
            may_be_of_fit = "." in name or nearest(name, self._types) is None
            if _FIT_OPTIONS not in self._special_fields or not may_be_of_fit:
                raise unknown_option(name, self._types)
            line.fit_options.append("=".join(option.words))
        elif name == self._file_option:
            line.file = option.value
        elif "." in name:
            mapping_option, _, key = name.partition(".")
            values = line.mappings.setdefault(mapping_option, {})
            values[key] = _mapping_value(name, type_hint, option.values)
        else:
            line.parser_words.append(
                f"--{name}={_parser_word(name, type_hint, option.values)}"
            )

    def _check_positional(self, words: Sequence[str]) -> None:
        """Raise UsageError if the verb does not accept these positional ``words``, or not so many of them."""
        for word in words:
            check_dashes(word)
        if not words:
            return
        takes_any = bool(self._positional_option)
        takes_several = takes_any and _is_container(
            self._types[self._positional_option], Sequence
        )
        if not takes_any or (len(words) > 1 and not takes_several):
            raise UsageError(
                f"{self._verb}: expected options, given {words[-1]!r}; see {self._verb} --help"
            )

    def _all_parser_words(self, line: _ClassifiedWords) -> list[str]:
        """Return the words for the parser: the text of the file, each option, and each mapping."""
        words = []
        if line.file is not None:
            words += self._file_words(line.file, line.mappings)
        words += line.parser_words
        for option, values in line.mappings.items():
            words.append(f"--{option}={json.dumps(values, ensure_ascii=False)}")
        return words

    def _file_words(self, path: str, mappings: dict[str, dict[str, Any]]) -> list[str]:
        """Return the text of the file as a word for the parser.

        Its mappings are removed from the text and merged into ``mappings``, whose values override them, because
        jsonargparse would not merge them.
        """
        node, _ = read_config(path, self._shipped)
        for key_node, value_node in node.value:
            option = key_node.value
            is_mapping_option = _is_container(self._types.get(option), Mapping)
            if not is_mapping_option or not isinstance(value_node, yaml.MappingNode):
                continue
            values = _texts_in(value_node)
            values.update(mappings.get(option, {}))
            for key, value in values.items():
                if not value:
                    raise UsageError(f"{option}.{key}: expected a value, given none")
            mappings[option] = values
        text = text_without_keys(node, {*mappings})
        if text.strip() == "{}":
            return []
        return [f"--{self._file_option}={text}"]


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """A formatter that keeps the line breaks of the examples."""


class _OptionsParser(ArgumentParser):
    """A parser that reports errors in a line or two, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise explain(
            message, [action.dest.removesuffix("_") for action in self._actions]
        )


def _class_constant(options_class: Any, name: str, default: str) -> str:
    return str(getattr(options_class, name, default))


def _strip_none(type_hint: Any) -> Any:
    """Return the type of an optional value without its None; any other type is returned unchanged."""
    is_union = get_origin(type_hint) in (Union, UnionType)
    return get_args(type_hint)[0] if is_union else type_hint


def _is_container(type_hint: Any, container: type) -> bool:
    """Return whether ``type_hint`` is a ``container``: ``Sequence[str]`` is a Sequence."""
    origin = get_origin(type_hint)
    return isinstance(origin, type) and issubclass(origin, container)


def _parser_word(name: str, type_hint: Any, values: Sequence[str]) -> str:
    """Return the values of an option as one word that jsonargparse can parse."""
    if type_hint is bool and not values:
        return "true"
    if not any(values):
        raise UsageError(f"{name}: expected a value, given none")
    if not _is_container(type_hint, Sequence):
        return values[0]
    item_type = get_args(type_hint)[0]
    if _is_container(item_type, Mapping):
        # a list of mappings is written as one word of YAML
        return values[0]
    may_contain_commas = _is_container(type_hint, tuple) or item_type is Path
    if may_contain_commas:
        return json.dumps(values, ensure_ascii=False)
    return f"[{','.join(values)}]"


def _mapping_value(name: str, type_hint: Any, values: Sequence[str]) -> Any:
    """Return the value of an option that is a key of a mapping: a text, or a list of texts."""
    word = _parser_word(name, type_hint, values)
    if type_hint is str:
        return word
    try:
        value = _parse_texts(word)
    except YamlTextError as error:
        raise UsageError(
            f"{name[:100]}: expected YAML, given {word[:100]!r}, which {error}"
        ) from None
    except RecursionError:
        raise UsageError(
            f"{name[:100]}: expected YAML, given {word[:100]!r}, which contains itself or is nested too deeply"
        ) from None
    if isinstance(value, list):
        # The parser copies the list for each value, so that 20,000 values would take minutes.
        expect(
            len(value) <= _MAX_VALUES,
            name,
            f"at most {_MAX_VALUES:,} values",
            len(value),
        )
    return value


def _parse_texts(text: str) -> Any:
    """Return parsed YAML in which all scalars are texts as they were written; jsonargparse uses this as its loader."""
    node = compose(text)
    return None if node is None else _texts_in(node)


def _texts_in(node: yaml.Node) -> Any:
    """Return the texts in ``node``: a mapping, a list, or one text; None for ``null``. A nested list is one text."""
    if isinstance(node, yaml.MappingNode):
        return {
            key_node.value: _texts_in(value_node) for key_node, value_node in node.value
        }
    if isinstance(node, yaml.SequenceNode):
        return [_item_in(item_node) for item_node in node.value]
    text = text_of(node)
    return None if text == "null" else text


def _item_in(node: yaml.Node) -> Any:
    """Return an item of a list: the entries of a mapping as texts, or else its text."""
    if isinstance(node, yaml.MappingNode):
        return {
            key_node.value: text_of(value_node) for key_node, value_node in node.value
        }
    return text_of(node)

"""Read the options of one of our verbs: jsonargparse makes a parser and the help from a dataclass.

Each field is an option; its line in the docstring is the help. Three fields are not options: ``options`` gets the words
that are not options of the verb, ``program`` those after ``--``, ``command`` the whole call. Before the parser reads a
line, each option becomes one word: a sequence may be written as values with commas, or with spaces for numbers and
paths; a mapping as ``--field.KEY VALUE``. All values stay text until a field's type reads them: a sweep passes ``010``
unchanged to its cells.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_loader

from lm_profiler.record.calls import by_name, command_line, config_file
from lm_profiler.record.secrets import masked_line
from lm_profiler.record.text import YamlTextError, compose, read_text, text_of, without
from lm_profiler.usage_error import UsageError, expect

MANY = sys.maxsize  # the number of values of an option that takes any number of them
_MOST_VALUES = 1000  # most values of one option of a sweep or a search

_REST, _PROGRAM, _COMMAND = "options", "program", "command"
_EXPECTED = "config: expected a YAML file of options"
_FILES = (".yaml", ".yml", ".json")

T = TypeVar("T")


class Option(NamedTuple):
    """An option as it was written; a word that belongs to no option is the value of one with an empty ``name``."""

    name: str
    values: Sequence[str]
    words: Sequence[str]

    @property
    def value(self) -> str:
        """The first value, or an empty text where there is none."""
        return self.values[0] if self.values else ""


def options_in(arguments: Sequence[str], takes: Callable[[str], int] = lambda name: 1) -> Iterator[Option]:
    """Yield the options in ``arguments``; ``takes`` returns how many values an option may have.

    >>> [option[:2] for option in options_in(["fit", "--config", "a.yaml", "--model.size=large"])]
    [('', ['fit']), ('config', ['a.yaml']), ('model.size', ['large'])]
    """
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        name = {"-c": "--config", "-h": "--help"}.get(name, name)
        if not name.startswith("--") or name == "--":
            yield Option("", [word], [word])
            continue
        values = [value] if equals else []
        most = takes(name[2:])
        while not equals and left and len(values) < most and not left[0].startswith("--"):
            values.append(left.pop(0))
        # A flag takes a boolean that follows it: no positional argument is called "true".
        if not most and not equals and left and left[0].lower() in ("true", "false"):
            values.append(left.pop(0))
        yield Option(name[2:], values, [word] if equals else [word, *values])


def read_config(path: str, shipped: str = "") -> tuple[yaml.MappingNode, str]:
    """Return the nodes and the text of the config ``path``: a file, the name of a shipped one, or the text itself.

    The file is opened once: it may be a pipe. Names are looked up in the package's folder ``shipped``, such as sweeps.
    """
    if not path:
        raise UsageError(f"{_EXPECTED}, given none")
    try:
        text = path if is_text(path) else read_text(Path(config_file(path, shipped)))
        node = compose(text)
    except OSError as error:
        close = nearest(path, known := by_name(shipped)) or f"one of {', '.join(known)}"
        remedy = "" if "/" in path or path.endswith(_FILES) else f"; did you mean {close}?"
        raise UsageError(f"{_EXPECTED}, given {path[:200]} ({error.strerror}){remedy}") from None
    except YamlTextError as error:
        raise UsageError(f"{_EXPECTED}, given {path[:200]}, which {error}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{_EXPECTED}, given {path[:200]}; write for example `model: {{size: small}}`")
    return node, text


def is_text(path: str) -> bool:
    """Whether a config is given as its text, as it is for the other ranks of a run whose config came through a pipe."""
    return "\n" in path or path.startswith("{")


class OptionsReader(Generic[T]):
    """Reads the options of one ``verb``, the fields of the dataclass ``kind``, which all have defaults.

    The class may have ``WORDS``, the field that takes positional arguments; ``FILE``, the field that names a file of
    options (``config`` if not given); ``SHIPPED``, the folder of such files in the package; and ``AFTER``, an example
    of the words after --.
    """

    def __init__(self, verb: str, kind: Callable[..., T]) -> None:
        self._verb, self._kind = verb, kind
        self._words, self._shipped = (str(getattr(kind, name, "")) for name in ("WORDS", "SHIPPED"))
        self._file = str(getattr(kind, "FILE", "config"))
        self._after = str(getattr(kind, "AFTER", "python train.py"))
        hints = get_type_hints(kind)
        names = [field.name for field in fields(cast(Any, kind))]
        self._has = {name for name in (_REST, _PROGRAM, _COMMAND) if name in names}
        self._named = {name.removesuffix("_"): name for name in names if name not in self._has}  # `try` is a keyword
        kinds = {option: hints[name] for option, name in self._named.items()}  # an optional type loses its None
        self._fields = {of: get_args(k)[0] if get_origin(k) in (Union, UnionType) else k for of, k in kinds.items()}

    def read(self, arguments: Sequence[str]) -> T:
        """Return the options of ``arguments`` and of the file that they name; the line overrides the file."""
        line, program = list(arguments), list[str]()
        if _PROGRAM in self._has:
            at = [*arguments, "--"].index("--")
            line, program = line[:at], line[at + 1 :]
            if not program:
                example = f"`lm_profiler {self._verb} -- {self._after}`"
                raise UsageError(f"{self._verb}: expected -- and what to run, such as {example}, given none")
        words, file, rest = self._prepared(line)
        given = vars(self._parser().parse_args(words))
        given = {name: file if name == self._file else given[name] for name in self._named.values()}
        given = {name: value for name, value in given.items() if value is not None}  # a key without a value in a file
        aside = {_REST: rest, _PROGRAM: program, _COMMAND: command_line(masked_line((self._verb, *arguments)))}
        return self._kind(**given, **{name: aside[name] for name in self._has})

    def help(self, examples: str) -> str:
        """Return the text that ``--help`` prints."""
        parser = self._parser()
        parser.usage = (
            f"lm_profiler {self._verb}{f' [{self._words.upper()}]' * bool(self._words)} [options]"
            f"{' [options of fit]' * (_REST in self._has)}{f' -- {self._after}' * (_PROGRAM in self._has)}"
        )
        parser.description = cleandoc(self._kind.__doc__ or "").partition("\n\nArgs:")[0].partition("\n\nRaises:")[0]
        parser.epilog = examples
        return str(parser.format_help())

    def _parser(self) -> _OptionsParser:
        set_loader("texts", _texts, exceptions=(YamlTextError,))
        keeps_lines = type("Formatter", (DefaultHelpFormatter, RawDescriptionHelpFormatter), {})  # of the examples
        parser = _OptionsParser(parser_mode="texts", allow_abbrev=False, print_config=None, formatter_class=keeps_lines)
        if self._file in self._fields:
            parser.add_argument(f"--{self._file}", action="config", help="A YAML file of these options.")
        parser.add_class_arguments(self._kind, as_group=False, skip={*self._has, self._file})
        # jsonargparse describes its own syntax, and calls `--try` by its field's name, `try_`.
        for action in parser._actions:
            option = action.dest.removesuffix("_")
            if (kind := self._fields.get(option)) is not None:
                action.option_strings = [f"--{option}" + ".KEY" * _is(kind, Mapping)]
                if _is(kind, Sequence) or _is(kind, Mapping):
                    action.metavar = "VALUE" + " ..." * _is(kind, Sequence)
                parser._option_string_actions[f"--{option}"] = action
        return parser

    def _kind_of(self, name: str) -> Any:
        """Return the type of the option ``name``'s value; None where there is no such option."""
        head, dot, key = name.partition(".")
        kind = self._fields.get(head)
        if _is(kind, Mapping) and key:
            return get_args(kind)[1]
        return None if dot else kind

    def _takes(self, name: str) -> int:
        kind = self._kind_of(name)
        if _is(kind, tuple):
            return len(get_args(kind))
        # A text could be a positional argument of the verb, if it takes any.
        several = _is(kind, Sequence) and (get_args(kind)[0] in (int, Path) or not self._words)
        return 0 if kind is bool else MANY if several else 1

    def _prepared(self, arguments: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
        """Return a word for the parser for each option, the path of the file, and the words that are options of fit."""
        own, words, rest, file = list[str](), list[str](), list[str](), None
        mappings: dict[str, dict[str, Any]] = {}
        for option in options_in(arguments, self._takes):
            name, kind = option.name, self._kind_of(option.name)
            if not name:
                words.append(option.value)
            elif name == self._file and kind is not None:
                file = option.value
            elif kind is not None and "." in name:
                head, _, key = name.partition(".")
                mappings.setdefault(head, {})[key] = _value(name, kind, option.values)
            elif kind is not None:
                own.append(f"--{name}={_word(name, kind, option.values)}")
            # A dotted name is an option of fit. A name without a dot may be a misspelt one of ours.
            elif _REST in self._has and ("." in name or nearest(name, [*self._fields]) is None):
                rest.append("=".join(option.words))
            else:
                raise unknown_option(name, self._fields)
        for word in words:
            check_dashes(word)
        if words and (not self._words or (len(words) > 1 and not _is(self._fields[self._words], Sequence))):
            raise UsageError(f"{self._verb}: expected options, given {words[-1]!r}; see {self._verb} --help")
        if words and self._words == self._file:
            file = words[0]
        elif words:
            own.append(f"--{self._words}={_word(self._words, self._fields[self._words], words)}")
        config = [] if file is None else self._file_words(file, mappings)
        merged = [f"--{head}={json.dumps(values, ensure_ascii=False)}" for head, values in mappings.items()]
        return [*config, *own, *merged], file, rest

    def _file_words(self, path: str, mappings: dict[str, dict[str, Any]]) -> list[str]:
        """Return the file's text as a word, and put its mappings below those of the line: jsonargparse has no merge."""
        node, _ = read_config(path, self._shipped)
        for key, value in node.value:
            if _is(self._fields.get(key.value), Mapping) and isinstance(value, yaml.MappingNode):
                mappings[key.value] = {**_built(value), **mappings.get(key.value, {})}
                if empty := [name for name, values in mappings[key.value].items() if not values]:
                    raise UsageError(f"{key.value}.{empty[0]}: expected a value, given none")
        rest = without(node, {*mappings})
        return [f"--{self._file}={rest}"] * (rest.strip() != "{}")


class _OptionsParser(ArgumentParser):
    """A parser that reports errors in a line or two, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise explain(message, [action.dest.removesuffix("_") for action in self._actions])


def _is(kind: Any, origin: type) -> bool:
    container = get_origin(kind)
    return isinstance(container, type) and issubclass(container, origin)


def _word(name: str, kind: Any, values: Sequence[str]) -> str:
    """Return the values written for an option as one word that jsonargparse reads."""
    if kind is bool and not values:
        return "true"
    if not any(values):
        raise UsageError(f"{name}: expected a value, given none")
    if not _is(kind, Sequence) or _is(get_args(kind)[0], Mapping):
        return values[0]
    as_written = _is(kind, tuple) or get_args(kind)[0] is Path
    return json.dumps(values, ensure_ascii=False) if as_written else f"[{','.join(values)}]"


def _value(name: str, kind: Any, values: Sequence[str]) -> Any:
    """Return the values written for an option of a mapping: a text, or a list of texts."""
    word = _word(name, kind, values)
    try:
        value = word if kind is str else _texts(word)
    except YamlTextError as error:
        raise UsageError(f"{name[:100]}: expected YAML, given {word[:100]!r}, which {error}") from None
    if isinstance(value, list):  # the parser copies the list for each value: 20,000 values take minutes
        expect(len(value) <= _MOST_VALUES, name, f"at most {_MOST_VALUES:,} values", len(value))
    return value


def _texts(text: str) -> Any:
    """Return parsed YAML with all scalars as they were written: the loader for jsonargparse."""
    node = compose(text)
    return None if node is None else _built(node)


def _built(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {key.value: _built(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [
            {key.value: text_of(value) for key, value in each.value}
            if isinstance(each, yaml.MappingNode)
            else text_of(each)
            for each in node.value
        ]
    return None if (text := text_of(node)) == "null" else text


# -- what is wrong with a call, in a line or two: subject, expected, given, remedy -------------------------------------

UNKNOWN = "unknown option --"  # the beginning of the message about an option that does not exist


def unknown_option(option: str, known: Iterable[str]) -> UsageError:
    """Return the error about an option that does not exist; a close one of those ``known`` is the remedy."""
    close = nearest(option, known)
    remedy = f"did you mean --{close}?" if close else "see --help"
    return UsageError(f"{UNKNOWN}{option}; {remedy}")


def check_dashes(word: str) -> None:
    """Raise UsageError if a ``word`` that belongs to no option looks like one: it has a single dash."""
    if word.startswith("-") and word != "-":
        raise UsageError(f"{word[:100]}: expected two dashes before an option; write -{word[:100]}")


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known option closest to ``given`` as a whole, else in its last part, else in its first; or None."""
    # Reversed, so that of several options with the same last part the first in the alphabet stays.
    names = sorted({*known} - {""}, reverse=True)
    (head, dot, _), end = given.partition("."), given.rpartition(".")[2]
    heads = {name.partition(".")[0]: name.partition(".")[0] for name in names if dot}
    ends = {name.rpartition(".")[2]: name for name in names}
    alike = ((given, {name: name for name in names}), (end, ends), (head, heads if head not in heads else {}))
    for word, words in alike:
        for close in difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.7):
            return words[close]
    return None


def told_in(output: str) -> str:
    """Return the message of a wrong call from the ``output`` of its process."""
    return output.rpartition("lm_profiler: ")[2].strip()


# -- jsonargparse's sentences ------------------------------------------------------------------------------------------

_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN = re.compile(r"unknown option --([^\s;]+);|(?:arguments: --|[Oo]ption ')([^\s=']+)")
_NO_VALUE = re.compile(r"argument (?:-\w/)?--([\w.]+): expected (?:one|at least one) argument")
_GIVEN = re.compile(r"(?:Given value|Got value): (.*)", re.DOTALL)
_TYPE = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>|typing\.Literal\[(.*)\]")
_SUBCLASS = re.compile(r"Not a valid subclass of (\w+)")
# lines of a message that do not help the user: for a union of types, only what each expected helps
_NOISE = (
    "Parser key", "Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a path", "Expected a dot",
    "Subclass types expect", "a class path (str)", "a dict with", "a dict without",
)  # fmt: skip
_MOST_GIVEN = 200  # the most characters of a value, and of a message in the words of others, that are shown
_MOST_WORDS = 300


def wrong_call(error: Exception, prefix: str = "") -> UsageError:
    """Return ``error`` as UsageError; the message of the parser is explained."""
    if isinstance(error, UsageError):
        return error
    return explain(str(error) or repr(error), prefix=prefix)


def explain(message: str, known: Iterable[str] = (), prefix: str = "") -> UsageError:
    """Return jsonargparse's ``message``, often a tree of many lines, as subject, expected and given.

    ``known`` are the options that exist; ``prefix`` is the subject where the message names none.
    """
    message = re.sub(r'^Parser key "\w+": ', "", message)  # names the option of the file, before its error
    key = _subject(message, prefix)
    without_value = _NO_VALUE.search(message)
    if without_value is not None:
        return UsageError(f"{without_value[1]}: expected a value, given none")
    unknown = _UNKNOWN.search(message)
    if unknown is not None:
        within, option = unknown[1], unknown[1] or unknown[2]
        if within and key:
            option = f"{key}.{option}"
        return unknown_option(option, known)

    lines = _telling_lines(message)
    others = [line for line in lines if not line.startswith("Expected a")]
    ours = [line for line in others if re.match(r"[\w.]+: expected ", line)]
    if ours:
        is_complete = not key or ours[0].startswith(f"{key}.")
        return UsageError(ours[0] if is_complete else f"{key}.{ours[0]}")
    if others or not lines:
        words = " ".join(others)[:_MOST_WORDS]
        return UsageError(f"{key}: {words}" if key else words)
    return UsageError(f"{key}: {_expected_and_given(lines, message)}")


def _subject(message: str, prefix: str) -> str:
    """Return the option that a message of jsonargparse is about, as a user writes it."""
    match = _KEY.search(message)
    if match is None:
        return prefix
    return match[1].replace("init_args.", "").removesuffix("_")


def _telling_lines(message: str) -> list[str]:
    """Return the lines of a message that say what is wrong, with short names of types."""
    lines = []
    for line in message.splitlines():
        line = line.partition(". Got value")[0].strip().removeprefix("- ")
        line = _SUBCLASS.sub(r"Expected a class path of \1", _TYPE.sub(r"\1\2", line))
        if line and not line.startswith(_NOISE):
            lines.append(line)
    return lines


def _expected_and_given(lines: Sequence[str], message: str) -> str:
    """Return the types that ``lines`` expect, and the value that the ``message`` names."""
    types = dict.fromkeys(re.sub(r"^Expected an? ", "", line).replace("NoneType", "null") for line in lines)
    match = _GIVEN.search(message)
    given = match[1].strip()[:_MOST_GIVEN] if match else ""
    takes_class_alone = any(name.startswith("class path") for name in types) and not any(
        name in types for name in ("list", "Iterable", "Sequence")
    )
    remedy = "; leave out the list around it" if takes_class_alone and given.startswith("[{") else ""
    return f"expected {' or '.join(types)}, given {given!r}{remedy}"

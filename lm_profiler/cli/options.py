"""Read the options of one of our verbs: a dataclass defines its parser, its help and its checks.

Each field is an option; its line in the docstring is the help. A sequence takes values separated by commas, or by
spaces for numbers and paths; a mapping takes ``--field.KEY VALUE``. Three fields are no options: ``options`` gets the
words that are no options of the verb, ``program`` those after ``--``, ``command`` the whole call. A YAML file uses the
same names. Values stay text until a field's type reads them: a sweep passes ``010`` unchanged to its cells.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Any, Generic, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lm_profiler.cli.arguments import MANY, options_in, read_config
from lm_profiler.cli.errors import UnknownOption, explain, nearest
from lm_profiler.record.calls import command_line
from lm_profiler.record.secrets import masked_line
from lm_profiler.record.text import YamlTextError, compose, text_of
from lm_profiler.usage_error import UsageError

_REST, _PROGRAM, _COMMAND = "options", "program", "command"

T = TypeVar("T")


class OptionsReader(Generic[T]):
    """Reads the options of one ``verb``.

    Args:
        verb: The verb's name.
        kind: A dataclass whose fields have defaults. It raises UsageError for values that do not go together. It may
            have ``WORDS``, the field that takes positional arguments; ``FILE``, the field that names a file of options
            (``config`` if not given); and ``SHIPPED``, the folder of such files in the package.
    """

    def __init__(self, verb: str, kind: Callable[..., T]) -> None:
        self._verb, self._kind = verb, kind
        self._words, self._shipped = (str(getattr(kind, name, "")) for name in ("WORDS", "SHIPPED"))
        self._file = str(getattr(kind, "FILE", "config"))
        hints = get_type_hints(kind)
        names = [field.name for field in fields(cast(Any, kind))]
        self._has = {name for name in (_REST, _PROGRAM, _COMMAND) if name in names}
        self._named = {name.removesuffix("_"): name for name in names if name not in self._has}  # `try` is a keyword
        self._fields = {option: _bare(hints[name]) for option, name in self._named.items()}

    def read(self, arguments: Sequence[str]) -> T:
        """Return the options of ``arguments`` and of the file that they name; the line overrides the file.

        Raises:
            UsageError: a wrong call.
        """
        line, program = self._split(arguments)
        given, rest = self._on_line(line)
        file = given.get(self._file)
        settings = {**(self._in_file(file) if file is not None else {}), **given}
        aside = {_REST: rest, _PROGRAM: program, _COMMAND: command_line(masked_line((self._verb, *arguments)))}
        typed = {self._named[option]: value for option, value in self._typed(settings).items()}
        return self._kind(**typed, **{name: aside[name] for name in self._has})

    def _split(self, arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the verb's own words, and those after ``--`` where the verb takes a program."""
        if _PROGRAM not in self._has:
            return arguments, ()
        at = [*arguments, "--"].index("--")
        own, program = arguments[:at], arguments[at + 1 :]
        if not program:
            example = f"`lm_profiler {self._verb} -- python train.py`"
            raise UsageError(f"{self._verb}: expected -- and then a program, such as {example}, given none")
        return own, program

    def help(self, examples: str) -> str:
        """Return the text that ``--help`` prints."""
        words = f" [{self._words.upper()}]" * bool(self._words)
        parser = ArgumentParser(
            usage=f"lm_profiler {self._verb}{words} [options]{' [options of fit]' * (_REST in self._has)}"
            f"{' -- PROGRAM ...' * (_PROGRAM in self._has)}",
            description=cleandoc(self._kind.__doc__ or "").partition("\n\nArgs:")[0],
            epilog=examples,
            formatter_class=_Formatter,
        )
        parser.add_class_arguments(self._kind, as_group=False, skip=self._has)
        # jsonargparse describes its own syntax (`--runs+`); the help has to show the one that is read here.
        for action in parser._actions:
            if (kind := self._fields.get(action.dest.removesuffix("_"))) is not None:
                action.option_strings = [action.option_strings[0].removesuffix("_") + ".KEY" * _is(kind, Mapping)]
                action.nargs = 0 if kind is bool else None
                many = _is(kind, Sequence) or _is(kind, Mapping)
                action.metavar = "VALUE" + " ..." * _is(kind, Sequence) if many else action.metavar
        return str(parser.format_help())

    def _value_kind(self, name: str) -> Any:
        """Return the type of the option ``name``'s value; None where there is no such option."""
        head, dot, key = name.partition(".")
        kind = self._fields.get(head)
        if _is(kind, Mapping):
            return get_args(kind)[1] if key else None
        return None if dot else kind

    def _takes(self, name: str) -> int:
        kind = self._value_kind(name)
        if _is(kind, tuple):
            return len(get_args(kind))
        many = _is(kind, Sequence) and get_args(kind)[0] in (int, Path)
        return 0 if kind is bool else MANY if many else 1

    def _on_line(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the options by name, those of a mapping by their path, and the words that are options of `fit`."""
        given: dict[str, Any] = {}
        words, rest = list[str](), list[str]()
        for option in options_in(arguments, self._takes):
            name, kind = option.name, self._value_kind(option.name)
            if not name:
                words.append(option.value)
            elif kind is not None and name in given:
                raise UsageError(f"{name}: expected once, given twice")
            elif kind is not None:
                given[name] = self._value_of(name, kind, option.values)
            elif name in self._fields:
                raise UsageError(f"{name}: expected a key with it, as in --{name}.KEY VALUE, given none")
            # A dotted name is an option of fit. Without a dot it may be one of ours that was misspelt.
            elif _REST in self._has and ("." in name or nearest(name, [*self._fields]) is None):
                rest.append("=".join(option.words))
            else:
                raise UnknownOption(name, self._fields)
        if words:
            many = _is(self._fields.get(self._words), Sequence)
            if not self._words or self._words in given or (len(words) > 1 and not many):
                raise UsageError(f"{self._verb}: expected options, given {words[-1]!r}; see {self._verb} --help")
            given[self._words] = words if many else words[0]
        return given, rest

    def _value_of(self, name: str, kind: Any, words: Sequence[str]) -> Any:
        """Return the value that ``words`` give to the option ``name``: a text, or a list of texts for a sequence."""
        if not _is(kind, Sequence):
            return words[0] if words else "true" if kind is bool else ""
        if _is(kind, tuple) or get_args(kind)[0] is Path:
            return list(words)
        text = ",".join(words) if _is(get_args(kind)[0], Mapping) else f"[{','.join(words)}]"
        try:
            node = compose(text)
        except YamlTextError as error:
            raise UsageError(f"{name[:100]}: expected YAML, given {text[:100]!r}, which {error}") from None
        return _texts_in(name, kind, node or yaml.ScalarNode("", ""))

    def _in_file(self, path: str) -> dict[str, Any]:
        given = {}
        for key, node in read_config(path, self._shipped)[0].value:
            name = str(key.value)
            if _is(self._fields.get(name), Mapping):
                if not isinstance(node, yaml.MappingNode):
                    example = f"{name}: {{model.size: [small, medium]}}"
                    raise UsageError(f"{name}: expected keys with values, such as `{example}`, given {text_of(node)}")
                for sub, value in node.value:
                    option = f"{name}.{sub.value}"
                    given[option] = _texts_in(option, self._value_kind(option), value)
            elif (kind := self._value_kind(name)) is not None and name != self._file:
                given[name] = _texts_in(name, kind, node)
            else:
                raise UnknownOption(name, self._fields, path)
        return given

    def _typed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, with each text converted to the field's type."""
        nested: dict[str, Any] = {}
        for name, value in settings.items():
            if value in ("", "null", []):
                raise UsageError(f"{name}: expected a value, given none")
            head, dot, key = name.partition(".")
            if dot:
                nested.setdefault(head, {})[key] = value
            else:
                nested[name] = value
        # Texts in mappings go past jsonargparse, which would copy all of them for each (see _holds_texts).
        texts = {name: value for name, value in nested.items() if _holds_texts(self._fields[name])}
        parser, others = _OptionsParser(), {name: nested[name] for name in nested if name not in texts}
        for name in others:
            parser.add_argument(f"--{name}", type=self._fields[name])
        try:
            return {**texts, **vars(parser.parse_object(others))}
        except UsageError as error:
            takes_many = self._words and self._takes(str(error).partition(":")[0]) == MANY
            raise UsageError(f"{error}{f'; put {self._words.upper()} before it' * bool(takes_many)}") from None


class _OptionsParser(ArgumentParser):
    """A parser that reports errors in a line or two, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise explain(message)


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of the examples."""


def _bare(kind: Any) -> Any:
    """Return an optional type without its None."""
    return get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind


def _holds_texts(kind: Any) -> bool:
    """Whether the type holds texts in a mapping. jsonargparse would copy the whole mapping for each of them."""
    return _is(kind, Mapping) or (_is(kind, Sequence) and _is(get_args(kind)[0], Mapping))


def _is(kind: Any, origin: type) -> bool:
    container = get_origin(kind)
    return isinstance(container, type) and issubclass(container, origin)


def _texts_in(name: str, kind: Any, node: yaml.Node) -> Any:
    """Return the text of each value in ``node``, as a command line would give it."""
    if not _is(kind, Sequence):
        return text_of(node)
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not _is(get_args(kind)[0], Mapping):
        if isinstance(node, yaml.MappingNode):
            raise UsageError(f"{name}: expected values, given keys; write the whole path, such as model.size")
        return [text_of(child) for child in nodes]
    if not all(isinstance(child, yaml.MappingNode) and child.value for child in nodes):
        raise UsageError(f"{name}: expected sets of options, such as `{{model.size: small}}`, given {text_of(node)}")
    return [{key.value: text_of(value) for key, value in child.value} for child in nodes]

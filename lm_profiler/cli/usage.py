"""What is wrong with a call, in a line or two: subject, expected, given, remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence


class UsageError(Exception):
    """A wrong call; the message is one or two lines for the terminal."""


NO_SUCH_OPTION = "expected an option that exists"
"""In every message about a name that nothing has."""

_KEY = re.compile(r'Parser key "([^"]+)":')
_UNKNOWN = re.compile(r"(?:unrecognized arguments: (\S+)|[Oo]ption '([^']+)' is not accepted)")
_UNKNOWN_IN_FILE = re.compile(r"does not accept option '([^']+)'")
_MISSING = re.compile(r"argument (?:-\w/)?--(\S+): (expected .+)")
_OWN = re.compile(r"[\w.]+: expected .+")
_TYPE = re.compile(r"Expected an? (?P<type><class .+?>|typing\.Literal\[.+?\]|[\w.]+)(?:\. Got value: (?P<given>.*))?$")
_GIVEN = re.compile(r"Given value: (.*)", re.DOTALL)
_CLASS_PATH = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<why>.*)")
_NESTED = re.compile(r"NestedArg\(key='(?P<key>[^']+)', val='?(?P<value>.*?)'?\)$", re.DOTALL)


def says_what_was_expected(message: str) -> bool:
    """Whether ``message`` already has the form of this program's own: ``subject: expected …``."""
    return _OWN.match(message) is not None


def explain(message: str, known: Iterable[str] = (), prefix: str = "") -> str:
    """The parser's ``message``, often a tree of many lines, as subject, expected, given and remedy.

    Args:
        message: What jsonargparse says.
        known: The options that exist.
        prefix: The key that the message is about, where it does not say.
    """
    if unknown := _UNKNOWN_IN_FILE.search(message) or _UNKNOWN.search(message):
        return _unknown(next(filter(None, unknown.groups())), set(known))
    if missing := _MISSING.match(message):
        return f"{missing[1]}: {missing[2]}, given none"
    found = _KEY.search(message)
    key = found[1].replace("init_args.", "") if found else prefix
    lines = [line.strip(" -") for line in message.splitlines()]
    own = next((line for line in lines if _OWN.match(line)), None)
    if own is not None and (not key or own.startswith(f"{key}.")):
        return own
    if own is not None:
        return f"{key}.{own}".replace("did you mean ", f"did you mean {key}.")
    told = _class_path(message) or _types(lines, message)
    return f"{key}: {told}" if told else _first_lines(lines, key)


def _unknown(given: str, known: set[str]) -> str:
    if given.endswith((".yaml", ".yml")):
        return f"{given}: expected options, given a file; did you mean --config {given}?"
    name = given.lstrip("-").partition("=")[0]
    close = _nearest(name, known)
    remedy = f"did you mean {close}?" if close else "see --help"
    return f"{name}: {NO_SUCH_OPTION}, given none of that name; {remedy}"


def _nearest(given: str, names: set[str]) -> str | None:
    """The known option that was probably meant: alike as a whole, in its last part, or in its first."""
    ends = {name.rpartition(".")[2]: name for name in sorted(names, reverse=True)}
    for word, words in ((given, names), (given.rpartition(".")[2], set(ends))):
        for close in difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.7):
            return close if words is names else ends[close]
    head, dot, rest = given.partition(".")
    heads = sorted({name.partition(".")[0] for name in names})
    alike = difflib.get_close_matches(head, heads, n=1, cutoff=0.7) if dot and head not in heads else []
    return f"{alike[0]}.{rest}" if alike else None


def _class_path(message: str) -> str | None:
    if problem := _CLASS_PATH.search(message):
        return f"expected a class that can be imported, given {problem['path']!r} ({problem['why'].strip()})"
    if base := re.search(r"does not correspond to a subclass of (\w+)", message):
        return f"expected a {base[1]}, given {_given(message)}"
    if path := re.search(r"Expected a dot import path string: (\S+)", message):
        return f"expected a class path such as package.module.Class, given {path[1]!r}"
    if base := re.search(r"Not a valid subclass of (\w+)", message):
        return f"expected the class path of a {base[1]}, or its options, given {_given(message)}"
    return None


def _types(lines: Sequence[str], message: str) -> str | None:
    types = [match for match in map(_TYPE.match, lines) if match]
    if not types:
        return None
    names = dict.fromkeys(name for match in types for name in _names(match["type"]))
    given = types[0]["given"]
    return f"expected {_either(list(names))}, given {_given(message) if given is None else repr(given.strip())}"


def _names(text: str) -> Iterator[str]:
    if text.startswith("typing.Literal["):
        yield from (name.strip(" '") for name in text[len("typing.Literal[") : -1].split(","))
    else:
        name = text.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
        yield "null" if name == "NoneType" else name


def _either(names: Sequence[str]) -> str:
    start = "one of " if len(names) > 3 else ""
    return start + (", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0])


def _given(message: str) -> str:
    given = _GIVEN.search(message)
    if given is None:
        return "something else"
    if nested := _NESTED.search(given[1]):
        return f"{nested['key']}={nested['value']}"
    return repr(given[1].strip())[:200]


def _first_lines(lines: Sequence[str], key: str) -> str:
    kept = [line[:300] for line in lines if line and not _KEY.match(line)][:2]
    return f"{key}: " * bool(key) + "\n".join(kept)


_NO_OVERRIDES = frozenset({"config", "name", "log_dir"})
"""Options that say where a run comes from and goes to, not what it does."""


def overrides(arguments: Sequence[str]) -> dict[str, str]:
    """The options that a call gives beside its config file, by name; of one given twice, the last.

    >>> overrides(["fit", "--config", "a.yaml", "--model.size=large", "--data.batch_size", "8"])
    {'model.size': 'large', 'data.batch_size': '8'}
    """
    given: dict[str, str] = {}
    left = list(arguments)
    while left:
        option = left.pop(0)
        if not option.startswith("--"):
            continue
        name, equals, value = option[2:].partition("=")
        if not equals and left and not left[0].startswith("--"):
            value = left.pop(0)
        if name not in _NO_OVERRIDES:
            given[name] = value
    return given

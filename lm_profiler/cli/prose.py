"""jsonargparse's account of a wrong call, in a line or two.

jsonargparse and argparse say what is wrong with a call in text alone: ``ArgumentParser.error`` gets a message, and an
exception whose type tells a bad value from nothing else. So their prose is read, here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from lm_profiler.cli.usage import UnknownOption, either
from lm_profiler.usage_error import UsageError

_KEY = re.compile(r'Parser key "([^"]+)":')
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (\S+)")
_UNKNOWN = re.compile(r"[Oo]ption '([^']+)' is not accepted|does not accept option '([^']+)'")
_UNKNOWN_WITHIN = re.compile(r"unknown option --(\S+);")
_MISSING = re.compile(r"argument (?:-\w/)?--(\S+): (expected .+)")
_OWN = re.compile(r"[\w.]+: expected .+")
_TYPE = re.compile(
    r"Expected an? (?:tuple with )?(?P<type><class .+?>|typing\.Literal\[.+?\]|\d+ elements|[\w.]+)"
    r"(?:\. Got value: (?P<given>.*))?$"
)
_GIVEN = re.compile(r"Given value: (.*)", re.DOTALL)
_CLASS_PATH = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<why>.*)")
_NESTED = re.compile(r"NestedArg\(key='(?P<key>[^']+)', val='?(?P<value>.*?)'?\)$", re.DOTALL)


def wrong_call(error: Exception, prefix: str = "") -> UsageError:
    """What is wrong with the call that ``error`` ends: one of ours says it itself, else it is the parser's."""
    message = str(error) or f"expected options, given some that end in {error!r}"
    return error if isinstance(error, UsageError) else explain(message, prefix=prefix)


def explain(message: str, known: Iterable[str] = (), prefix: str = "") -> UsageError:
    """The parser's ``message``, often a tree of many lines, as subject, expected, given and remedy.

    Args:
        message: What jsonargparse says.
        known: The options that exist.
        prefix: The key that the message is about, where it does not say.
    """
    match = _KEY.search(message)
    key = match[1].replace("init_args.", "") if match else prefix
    if within := _UNKNOWN_WITHIN.search(message):
        return UnknownOption(f"{key}.{within[1]}" if key else within[1], known)
    if unknown := _UNKNOWN.search(message):
        return UnknownOption(unknown[1] or unknown[2], known)
    if unrecognized := _UNRECOGNIZED.search(message):
        return _unrecognized(unrecognized[1], known)
    if missing := _MISSING.match(message):
        return UsageError(f"{missing[1]}: {missing[2]}, given none")
    lines = [line.strip(" -") for line in message.splitlines()]
    if own := next(filter(_OWN.match, lines), None):
        return UsageError(own if not key or own.startswith(f"{key}.") else f"{key}.{own}")
    if told := _class_path(message) or _types(lines, message):
        return UsageError(f"{key}: {told}")
    kept = [line[:300] for line in lines if line and not _KEY.match(line)][:2]
    return UsageError(f"{key}: " * bool(key) + "\n".join(kept))


def _unrecognized(given: str, known: Iterable[str]) -> UsageError:
    if given.startswith("--"):
        return UnknownOption(given[2:].partition("=")[0], known)
    remedy = f"did you mean --config {given}?" if given.endswith((".yaml", ".yml")) else "see --help"
    return UsageError(f"expected options, given {given!r}; {remedy}")


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
    return f"expected {either(list(names))}, given {_given(message) if given is None else repr(given.strip()[:200])}"


def _names(text: str) -> Iterator[str]:
    if text.startswith("typing.Literal["):
        yield from (name.strip(" '") for name in text[len("typing.Literal[") : -1].split(","))
    else:
        name = text.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
        yield "null" if name == "NoneType" else name


def _given(message: str) -> str:
    given = _GIVEN.search(message)
    if given is None:
        return "something else"
    if nested := _NESTED.search(given[1]):
        return f"{nested['key']}={nested['value']}"
    return repr(given[1].strip())[:200]

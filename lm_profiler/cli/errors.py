"""Report what is wrong with a call in a line or two: subject, expected, given, remedy.

jsonargparse and argparse report errors as text only: ``ArgumentParser.error`` gets a message, and the type of its
exception distinguishes nothing but bad values. So ``explain``, and no other function, reads their sentences.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lm_profiler.record.files import write_whole
from lm_profiler.usage_error import UsageError

# the variable that names the file into which a wrong call writes its ``message`` and ``unknown_option`` as JSON
TOLD_IN = "LM_PROFILER_WRONG_CALL"


class UnknownOption(UsageError):
    """An option that does not exist.

    Args:
        option: Its name as it was written, without dashes.
        known: The options that exist.
        file: The config that holds it; None for the command line.
    """

    def __init__(self, option: str, known: Iterable[str], file: str | None = None) -> None:
        self.option, self.close = option, nearest(option, known)
        where = f" in {file}" if file else ""
        remedy = f"did you mean --{self.close}?" if self.close else "see --help"
        super().__init__(f"unknown option --{option}{where}; {remedy}")


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known option closest to ``given`` as a whole, else in its last part, else in its first; or None."""
    names = {*known} - {""}
    # Reversed, so that of several options with the same last part the first in the alphabet stays.
    ends = {name.rpartition(".")[2]: name for name in sorted(names, reverse=True)}
    for word, words in ((given, names), (given.rpartition(".")[2], set(ends))):
        for close in difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.7):
            return close if words is names else ends[close]
    head, dot, rest = given.partition(".")
    heads = sorted({name.partition(".")[0] for name in names})
    alike = difflib.get_close_matches(head, heads, n=1, cutoff=0.7) if dot and head not in heads else []
    return f"{alike[0]}.{rest}" if alike else None


def either(names: Sequence[object]) -> str:
    """Return ``a``, ``a or b``, or ``one of a, b, c or d``."""
    start = "one of " if len(names) > 3 else ""
    return start + ", ".join(map(str, names[:-1])) + " or " * (len(names) > 1) + str(names[-1])


# -- for the process that started the call -----------------------------------------------------------------------------


def answer(error: Exception) -> None:
    """Write ``error`` to the file that the parent process named in ``TOLD_IN``, if it named one."""
    if path := os.environ.pop(TOLD_IN, ""):
        option = error.option if isinstance(error, UnknownOption) else None
        write_whole(Path(path), json.dumps({"message": str(error), "unknown_option": option}))


def answered(path: Path) -> dict[str, str | None] | None:
    """Return what a wrong call wrote to ``path``; None where the call was right."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# -- jsonargparse's sentences ------------------------------------------------------------------------------------------

_KEY = re.compile(r'Parser key "([^"]+)":')
_UNKNOWN = re.compile(
    r"unknown option --([^\s;]+);|unrecognized arguments: --([^\s=]+)"
    r"|[Oo]ption '([^']+)' is not accepted|does not accept option '([^']+)'"
)
_STRAY = re.compile(r"unrecognized arguments: (\S+)")
_MISSING = re.compile(r"argument (?:-\w/)?--(\S+): (expected .+)")
_OURS = re.compile(r"^[ -]*([\w.]+: expected .+)", re.MULTILINE)
_TYPE = re.compile(
    r"^[ -]*Expected an? (?:tuple with )?(?P<type><class .+?>|typing\.Literal\[.+?\]|\d+ elements|[\w.]+)"
    r"(?:\. Got value: (?P<given>.*))?$",
    re.MULTILINE,
)
_SWITCH = "Subtypes: [<class 'bool'>, <class 'lm_profiler."  # an option that is a switch, or a group of others
_GIVEN = re.compile(r"Given value: (.*)", re.DOTALL)
_NESTED = re.compile(r"NestedArg\(key='(?P<key>[^']+)', val='?(?P<value>.*?)'?\)$", re.DOTALL)
# jsonargparse's sentences about classes, each with our text for what was expected and given
_CLASSES = {
    r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<why>.*)": (
        "a class that can be imported, given {path!r} ({why})"
    ),
    r"does not correspond to a subclass of (?P<base>\w+)": "a {base}, given {given}",
    r"Expected a dot import path string: (?P<path>\S+)": "a class path such as package.module.Class, given {path!r}",
    r"Not a valid subclass of (?P<base>\w+)": "the class path of a {base}, or its options, given {given}",
}


def wrong_call(error: Exception, prefix: str = "") -> UsageError:
    """Return ``error`` as UsageError; the message of the parser is explained."""
    message = str(error) or f"expected options, given some that end in {error!r}"
    return error if isinstance(error, UsageError) else explain(message, prefix=prefix)


def explain(message: str, known: Iterable[str] = (), prefix: str = "") -> UsageError:
    """Return the parser's ``message``, often a tree of many lines, as subject, expected, given and remedy.

    Args:
        message: The text of jsonargparse.
        known: The options that exist.
        prefix: The key of the message, used where the message names none.
    """
    match = _KEY.search(message)
    key = match[1].replace("init_args.", "") if match else prefix
    if unknown := _UNKNOWN.search(message):
        within, option = unknown[1], next(filter(None, unknown.groups()))
        return UnknownOption(f"{key}.{option}" if within and key else option, known)
    if stray := _STRAY.search(message):
        remedy = f"did you mean --config {stray[1]}?" if stray[1].endswith((".yaml", ".yml")) else "see --help"
        return UsageError(f"expected options, given {stray[1]!r}; {remedy}")
    if missing := _MISSING.match(message):
        return UsageError(f"{missing[1]}: {missing[2]}, given none")
    if ours := _OURS.search(message):
        return UsageError(ours[1] if not key or ours[1].startswith(f"{key}.") else f"{key}.{ours[1]}")
    if _SWITCH in message:
        return UsageError(f"{key}: expected true or false, given {_given(message)}; its parts are --{key}.…")
    if expected := _class_expected(message) or _type_expected(message):
        return UsageError(f"{key}: expected {expected}")
    lines = [line.strip(" -")[:300] for line in message.splitlines() if line.strip(" -") and not _KEY.match(line)]
    return UsageError(f"{key}: " * bool(key) + "\n".join(lines[:2]))


def _class_expected(message: str) -> str | None:
    for sentence, expected in _CLASSES.items():
        if match := re.search(sentence, message):
            said = {name: text.strip() for name, text in match.groupdict().items()}
            return expected.format(**said, given=_given(message))
    return None


def _type_expected(message: str) -> str | None:
    types = [*_TYPE.finditer(message)]
    if not types:
        return None
    names = dict.fromkeys(name for match in types for name in _names(match["type"]))
    given = types[0]["given"]
    return f"{either(list(names))}, given {_given(message) if given is None else repr(given.strip()[:200])}"


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

"""What is wrong with a call, in a line or two."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UsageError(Exception):
    """A wrong call; the message is one or two lines for the terminal."""


_WRONG_TYPE = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<rest>.*)', re.DOTALL)
_EXPECTED = re.compile(r"Expected an? (?P<type>.+?)\. Got value: (?P<value>.*)", re.DOTALL)
_UNKNOWN = re.compile(
    r"(?:unrecognized arguments: (?P<argument>\S+)|Option '(?P<option>[^']+)' is not accepted)"
)


def explain(message: str, known: Iterable[str]) -> str:
    """The parser's ``message`` as subject, expected, given and remedy; ``known`` are the options that exist."""
    if unknown := _UNKNOWN.search(message):
        given = (unknown["argument"] or unknown["option"]).lstrip("-").partition("=")[0]
        return f"--{given}: expected an option that exists, given none of that name{_nearest(given, known)}"
    if wrong := _WRONG_TYPE.search(message):
        key = wrong["key"].replace("init_args.", "")
        if expected := _EXPECTED.search(wrong["rest"]):
            return f"{key}: expected {_type(expected['type'])}, given {expected['value'].strip()!r}"
        return f"{key}: {_lines(wrong['rest'], 1)}"
    return _lines(message, 2)


def _nearest(given: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if not close:  # an option of a nested class comes without its prefix
        ends = {name.rpartition(".")[2]: name for name in names}
        close = [ends[end] for end in difflib.get_close_matches(given, list(ends), n=1, cutoff=0.6)]
    return f"; did you mean --{close[0]}?" if close else "; see --help"


def _type(text: str) -> str:
    if text.startswith("typing.Literal["):
        return "one of " + text[len("typing.Literal[") : -1].replace("'", "")
    return text.replace("<class '", "").replace("'>", "")


def _lines(message: str, count: int) -> str:
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    return "\n".join(line[:300] for line in lines[:count])

"""Report what is wrong with a call in a line or two: subject, expected, given, remedy.

jsonargparse and argparse report errors as text only. ``explain``, and no other function, reads their sentences.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from lm_profiler.usage_error import UsageError

UNKNOWN = "unknown option --"  # the beginning of the message about an option that does not exist


def unknown_option(option: str, known: Iterable[str]) -> UsageError:
    """Return the error about an option that does not exist; a close one of those ``known`` is the remedy."""
    close = nearest(option, known)
    return UsageError(f"{UNKNOWN}{option}; {f'did you mean --{close}?' if close else 'see --help'}")


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
    """Return what a wrong call has printed, of the ``output`` of its process."""
    return output.rpartition("lm_profiler: ")[2].strip()


# -- jsonargparse's sentences ------------------------------------------------------------------------------------------

_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN = re.compile(r"unknown option --([^\s;]+);|(?:arguments: --|[Oo]ption ')([^\s=']+)")
_GIVEN = re.compile(r"(?:Given value|Got value): (.*)", re.DOTALL)
_TYPE = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>|typing\.Literal\[(.*)\]")
# lines of a message that say nothing to who wrote the call: of a union of types only what each of them expected does
_NOISE = ("Parser key", "Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a path")


def wrong_call(error: Exception, prefix: str = "") -> UsageError:
    """Return ``error`` as UsageError; the message of the parser is explained."""
    return error if isinstance(error, UsageError) else explain(str(error) or repr(error), prefix=prefix)


def explain(message: str, known: Iterable[str] = (), prefix: str = "") -> UsageError:
    """Return jsonargparse's ``message``, often a tree of many lines, as subject, expected and given.

    ``known`` are the options that exist; ``prefix`` is the subject where the message names none.
    """
    message = re.sub(r'^Parser key "\w+": ', "", message)  # of the option that named a file, before what is wrong there
    match = _KEY.search(message)
    key = match[1].replace("init_args.", "").removesuffix("_") if match else prefix
    if unknown := _UNKNOWN.search(message):
        within, option = unknown[1], unknown[1] or unknown[2]
        return unknown_option(f"{key}.{option}" if within and key else option, known)
    lines = [
        _TYPE.sub(r"\1\2", line.partition(". Got value")[0].strip().removeprefix("- ")) for line in message.splitlines()
    ]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    others = [line for line in lines if not line.startswith("Expected a")]
    if ours := next((line for line in others if re.match(r"[\w.]+: expected ", line)), None):
        return UsageError(ours if not key or ours.startswith(f"{key}.") else f"{key}.{ours}")
    if others or not lines:
        return UsageError(f"{key}: " * bool(key) + " ".join(others)[:300])
    expected = dict.fromkeys(re.sub(r"^Expected an? ", "", line).replace("NoneType", "null") for line in lines)
    given = _GIVEN.search(message)
    return UsageError(f"{key}: expected {' or '.join(expected)}, given {given[1].strip()[:200] if given else ''!r}")

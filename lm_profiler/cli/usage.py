"""What is wrong with a call, in a line or two: subject, expected, given, remedy."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from lm_profiler.record.files import write_whole
from lm_profiler.usage_error import UsageError

TOLD_IN = "LM_PROFILER_WRONG_CALL"
"""Names a file in which whoever starts a call finds what is wrong with it: ``message``, and ``unknown_option``."""


class UnknownOption(UsageError):
    """An option that nothing has.

    Args:
        option: As it was written, without dashes.
        known: The options that exist.
        file: Where it stands, if not on the command line.
    """

    def __init__(self, option: str, known: Iterable[str], file: str | None = None) -> None:
        self.option, self.close = option, nearest(option, known)
        where = f" in {file}" if file else ""
        remedy = f"did you mean --{self.close}?" if self.close else "see --help"
        super().__init__(f"unknown option --{option}{where}; {remedy}")


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known option that was probably meant: alike as a whole, in its last part, or in its first."""
    names = {*known} - {""}
    ends = {name.rpartition(".")[2]: name for name in sorted(names, reverse=True)}
    for word, words in ((given, names), (given.rpartition(".")[2], set(ends))):
        for close in difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.7):
            return close if words is names else ends[close]
    head, dot, rest = given.partition(".")
    heads = sorted({name.partition(".")[0] for name in names})
    alike = difflib.get_close_matches(head, heads, n=1, cutoff=0.7) if dot and head not in heads else []
    return f"{alike[0]}.{rest}" if alike else None


def either(names: Sequence[object]) -> str:
    """``a``, ``a or b``, or ``one of a, b, c or d``."""
    start = "one of " if len(names) > 3 else ""
    return start + ", ".join(map(str, names[:-1])) + " or " * (len(names) > 1) + str(names[-1])


def answer(error: Exception) -> None:
    """Tell whoever started this call in a file, if there is one who asked."""
    if path := os.environ.pop(TOLD_IN, ""):
        option = error.option if isinstance(error, UnknownOption) else None
        write_whole(Path(path), json.dumps({"message": str(error), "unknown_option": option}))


def answered(path: Path) -> dict[str, str | None] | None:
    """What a call wrote that was told ``path``; None where nothing was wrong with it."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

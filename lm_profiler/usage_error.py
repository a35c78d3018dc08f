"""The exception for a request that cannot be met."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# what the command line and the callbacks say elsewhere; the package itself imports anywhere, because a program with
# ``LM_PROFILER`` in its environment imports ``external_callbacks``
NEEDS_POSIX = "lm_profiler: expected a POSIX system such as Linux or macOS, given another; on Windows use WSL"

# At least so alike are a misspelt word and the right one, by ``difflib``'s ratio: `cvs` and `csv` have 0.67, whereas
# `normal` and `uniform`, which mean different things, have 0.62.
_LIKENESS = 0.65


class UsageError(ValueError):
    """A wrong option or call; one or two lines name the subject, what was expected and given, and a remedy."""


def expect(is_valid: bool, subject: str, expected: str, value: object) -> None:
    """Raise UsageError unless ``is_valid``, which means that the ``value`` of ``subject`` is as ``expected``."""
    if not is_valid:
        raise UsageError(f"{subject}: expected {expected}, given {_value_text(value)}")


def expect_one_of(choices: Collection[object], subject: str, value: object) -> None:
    """Raise UsageError unless the ``value`` of ``subject`` is among the ``choices``."""
    if value in choices:
        return
    choice_list = ", ".join(map(str, choices))
    remedy = did_you_mean(str(value), choices)
    raise UsageError(
        f"{subject}: expected one of {choice_list}, given {_value_text(value)}{remedy}"
    )


def did_you_mean(word: str, choices: Collection[object]) -> str:
    """Return the choice of which ``word`` may be a misspelling, as the end of a message; empty if it is none."""
    choice = closest(word, choices)
    return "" if choice is None else f"; did you mean {choice}?"


def closest(word: str, choices: Collection[object]) -> str | None:
    """Return the choice of which ``word`` may be a misspelling; None if it is none."""
    by_lower_case = {str(choice).lower(): str(choice) for choice in choices}
    matches = difflib.get_close_matches(
        word.lower(), by_lower_case, n=1, cutoff=_LIKENESS
    )
    return by_lower_case[matches[0]] if matches else None


def _value_text(value: object) -> str:
    return "none" if value is None else repr(value)

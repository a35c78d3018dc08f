"""The exception for a request that cannot be met."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# The message of the command line and the callbacks on other systems. The package itself can be imported anywhere,
# because a program with ``LM_PROFILER`` in its environment imports ``external_callbacks``.
NEEDS_POSIX = "lm_profiler: expected a POSIX system such as Linux or macOS, given another; on Windows use WSL"

# The least ratio of ``difflib`` at which a word is taken for a misspelling: `cvs` and `csv` have 0.67, whereas `normal`
# and `uniform`, which mean different things, have 0.62.
_LIKENESS = 0.65


class UsageError(ValueError):
    """Raised for a wrong option or call; one or two lines name the subject, the expected and given value, a remedy."""


def expect(is_valid: bool, subject: str, expected: str, value: object) -> None:
    """Raise UsageError unless ``is_valid``: whether the ``value`` of ``subject`` is as ``expected``."""
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
    """Return a question, as the end of a message, if ``word`` may be a misspelt choice; empty otherwise."""
    choice = closest(word, choices)
    return "" if choice is None else f"; did you mean {choice}?"


def closest(word: str, choices: Collection[object]) -> str | None:
    """Return the choice that ``word`` may be a misspelling of; None if there is none."""
    by_lower_case = {str(choice).lower(): str(choice) for choice in choices}
    matches = difflib.get_close_matches(
        word.lower(), by_lower_case, n=1, cutoff=_LIKENESS
    )
    return by_lower_case[matches[0]] if matches else None


def _value_text(value: object) -> str:
    return "none" if value is None else repr(value)

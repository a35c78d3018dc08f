"""The exception for a request that cannot be met."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# what the command line and the callbacks say elsewhere; the package itself imports anywhere, because Lightning imports
# ``external_callbacks`` in every program
NEEDS_POSIX = "lm_profiler: expected a POSIX system such as Linux or macOS, given another; on Windows use WSL"


class UsageError(ValueError):
    """A wrong option or call; one or two lines name the subject, what was expected and given, and a remedy."""


def expect(holds: bool, subject: str, expected: str, given: object) -> None:
    """Raise UsageError unless ``holds``, which means that the ``given`` value of ``subject`` is as ``expected``."""
    if not holds:
        raise UsageError(f"{subject}: expected {expected}, given {'none' if given is None else repr(given)}")


def expect_one_of(choices: Collection[object], subject: str, given: object) -> None:
    """Raise UsageError unless the ``given`` value of ``subject`` is among the ``choices``."""
    if given in choices:
        return
    expected = f"one of {', '.join(map(str, choices))}"
    remedy = did_you_mean(str(given), choices)
    raise UsageError(f"{subject}: expected {expected}, given {'none' if given is None else repr(given)}{remedy}")


def did_you_mean(given: str, choices: Collection[object], cutoff: float = 0.6) -> str:
    """Return the choice that resembles ``given`` most, as the end of a message; empty if none does."""
    by_lower_case = {str(choice).lower(): str(choice) for choice in choices}
    close = difflib.get_close_matches(given.lower(), by_lower_case, n=1, cutoff=cutoff)
    if not close:
        return ""
    return f"; did you mean {by_lower_case[close[0]]}?"

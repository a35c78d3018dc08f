"""The exception for a request that cannot be met."""

from __future__ import annotations

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


def expect_one_of(known: Collection[object], subject: str, given: object) -> None:
    """Raise UsageError unless the ``given`` value of ``subject`` is among those ``known``."""
    expect(given in known, subject, f"one of {', '.join(map(str, known))}", given)

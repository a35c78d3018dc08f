"""The one exception for what was asked for and cannot be had."""

from __future__ import annotations

from collections.abc import Collection

# what the command line and the callbacks say elsewhere; the package itself imports anywhere, because Lightning imports
# ``external_callbacks`` in every program
NEEDS_POSIX = "lm_profiler: expected a POSIX system such as Linux or macOS, given another; on Windows use WSL"


class UsageError(ValueError):
    """A wrong option or call: a line or two of subject, expected, given and remedy, for whoever wrote it."""


def expect(holds: bool, subject: str, expected: str, given: object) -> None:
    """Raise UsageError unless ``holds``, which says that what is ``given`` for ``subject`` is as ``expected``."""
    if not holds:
        raise UsageError(f"{subject}: expected {expected}, given {'none' if given is None else repr(given)}")


def expect_one_of(known: Collection[object], subject: str, given: object) -> None:
    """Raise UsageError unless what is ``given`` for ``subject`` is among those ``known``."""
    expect(given in known, subject, f"one of {', '.join(map(str, known))}", given)

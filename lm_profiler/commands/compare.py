"""``compare``."""

from __future__ import annotations

from collections.abc import Sequence

from lm_profiler.cli.usage import UsageError


def run(arguments: Sequence[str]) -> int:
    """Not written yet."""
    raise UsageError("compare: is not written yet")

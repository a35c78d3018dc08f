"""How a call of lm_profiler is written down, to be read and pasted into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def command_line(arguments: Iterable[str]) -> str:
    """``arguments`` after the name of the program, quoted for a shell."""
    return shlex.join(("python", "-m", "lm_profiler", *arguments))

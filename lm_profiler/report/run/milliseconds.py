"""Times of a step in milliseconds, to the digits that mean something."""

from __future__ import annotations

from lm_profiler.record.quantities import TIMES


def digits_of(step_s: float) -> int:
    """Behind the point, where a step of so many milliseconds is told to four places."""
    return len(TIMES["step"].rounded(step_s).partition(".")[2])


def ms_text(seconds: float, digits: int | None = None) -> str:
    """Without its unit; of a time that stands alone to a microsecond, or three figures."""
    if digits is None:
        ms = abs(seconds * TIMES["step"].scale)
        digits = 3 if ms < 1 else 2 if ms < 10 else 1
    return TIMES["step"].show(seconds, unit=False, digits=digits)

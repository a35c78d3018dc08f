"""How each rank ended that did not end well, and which of them was the cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from lm_profiler.record.run.findings import Failure
from lm_profiler.record.run.part import Newer, Part
from lm_profiler.record.run.record import Status


class RankEnd(Part):
    """``ended.rank<n>.json``: what a rank left when it ended, other than well.

    ``at`` is in seconds since 1970, on the clock of its host. ``followed``: another rank's end brought it about, since
    a collective failed, or nothing was left to wait for.
    """

    status: Annotated[Status, Newer]
    failure: Failure
    at: float
    followed: bool = False


def cause_of(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The earliest that followed from no other; None where every one did.

    Clocks of hosts differ by milliseconds, and what follows from an error comes later than that, or says what it is.
    """
    return min((end for end in ends if not end.followed), key=lambda end: end.at, default=None)


def end_file(rank: int) -> str:
    """The name of the rank's file in the run's folder."""
    return f"ended.rank{rank}.json"

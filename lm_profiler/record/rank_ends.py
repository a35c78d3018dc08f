"""How failed ranks of a run ended, and which of these ends caused the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from lm_profiler.record.files import Newer, Part, RecordError, read_as
from lm_profiler.record.findings import Failure
from lm_profiler.record.run_record import Status
from lm_profiler.record.text import ranks_text

RANK_LOST = "RankLost"  # type of the failure if a rank ended without leaving an end


class RankEnd(Part):
    """How a failed rank ended: ``ended.rank<n>.json``."""

    status: Annotated[Status, Newer]
    failure: Failure
    at: float  # seconds since 1970, on the clock of its host
    followed: bool = False  # whether another rank's end caused it: a collective failed, or no rank was left to wait for

    @property
    def is_signalled(self) -> bool:
        """Whether a signal ended it that launchers also send when another rank is lost; Ctrl-C is from the user."""
        return self.status == "interrupted" and self.failure.type != "KeyboardInterrupt"


def end_file(rank: int) -> str:
    """Return the name of the rank's file in the run's folder."""
    return f"ended.rank{rank}.json"


def read_ends(folder: Path) -> dict[int, RankEnd]:
    """Return the readable ends that ranks left in ``folder``."""
    ends: dict[int, RankEnd] = {}
    for path in sorted(folder.glob("ended.rank*.json")):
        with suppress(RecordError):
            if (rank := path.name.split(".")[1].removeprefix("rank")).isdecimal():
                ends[int(rank)] = read_as(path, RankEnd, "a rank's end")
    return ends


def first_end(ends: Mapping[int, RankEnd], ranks: Iterable[int], codes: Mapping[int, int | None]) -> RankEnd | None:
    """Return the end that caused the others: the first that no other end caused, or that of a rank that left none.

    Args:
        ends: the ends that ranks left.
        ranks: all ranks.
        codes: their exit codes, if known; None for a rank that runs.
    """
    # Hosts' clocks differ by milliseconds; an end that another caused comes later, or is marked.
    first = min((end for end in ends.values() if not end.followed), key=lambda end: end.at, default=None)
    if first is not None and not first.is_signalled:
        return first
    silent = [rank for rank in ranks if rank not in ends]
    # After a signal, a rank that is known to run, or to have succeeded, is not the cause.
    lost = [rank for rank in silent if codes.get(rank, -1)] or (silent if first is None else [])
    near = next(iter(ends.values()), None)
    if not lost or near is None:
        return first or near
    how = how_it_ended(codes[lost[0]]) if lost[0] in codes else "ended without a word"
    more = f"; so did {ranks_text(lost[1:])}" if len(lost) > 1 else ""
    host = near.failure.host if lost[0] in codes else None  # a known code means that this host started it
    changes = {"type": RANK_LOST, "message": f"{how}{more}", "rank": lost[0], "host": host, "out_of_memory": None}
    return RankEnd(status="failed", failure=near.failure.model_copy(update=changes), at=near.at)


def how_it_ended(code: int | None) -> str:
    """Return in words how a process ended, from its exit code; None: it runs."""
    if code is None:
        return "hangs, or was not reached by what ended the others"
    if code == 0:
        return "had no step left to do while the others had: do the ranks' loaders differ in length?"
    if code > 0:
        return f"ended with exit code {code}"
    known = -code in {*signal.Signals}
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"

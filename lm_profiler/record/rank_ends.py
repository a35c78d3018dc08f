"""How failed ranks of a run ended, and which of these ends caused the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from lm_profiler.record.files import Newer, Part, RecordError, read_part
from lm_profiler.record.findings import Failure
from lm_profiler.record.run_record import Status
from lm_profiler.record.text import ranks_text

RANK_LOST = "RankLost"  # type of the failure if a rank ended without leaving an end
LOOP_ENDED = "LoopEnded"  # type of the failure if a rank's loop ended well while the other ranks had more steps to do


class RankEnd(Part):
    """How a rank ended: ``ended.rank<n>.json``. The status is ``ok`` if its loop ended before the steps were done."""

    status: Annotated[Status, Newer]
    failure: Failure
    at: float  # seconds since 1970, on the clock of its host
    followed: bool = False  # whether another rank's end caused it: a collective failed, or no rank was left to wait for

    @property
    def is_signalled(self) -> bool:
        """Whether a signal ended it that launchers also send when another rank is lost; Ctrl-C is from the user."""
        return self.status == "interrupted" and self.failure.type != "KeyboardInterrupt"

    @property
    def is_own_failure(self) -> bool:
        """Whether the rank failed by itself: no other rank's end caused it."""
        return self.status != "ok" and not self.followed


def end_file(rank: int) -> str:
    """Return the name of the rank's file in the run's folder."""
    return f"ended.rank{rank}.json"


def read_ends(folder: Path) -> dict[int, RankEnd]:
    """Return the readable ends that ranks left in ``folder``."""
    ends: dict[int, RankEnd] = {}
    for path in sorted(folder.glob("ended.rank*.json")):
        rank_text = path.name.split(".")[1].removeprefix("rank")
        if not rank_text.isdecimal():
            continue
        with suppress(RecordError):
            ends[int(rank_text)] = read_part(path, RankEnd, "a rank's end")
    return ends


def end_of_loop(rank: int, host: str, steps: int, now_s: float) -> RankEnd:
    """Return the end of a ``rank`` whose loop ended after ``steps`` steps, before its stages were done.

    It is no failure unless the other ranks fail: then they waited for steps that this rank did not have.
    """
    message = (
        f"its loop ended after step {steps} while the other ranks had more steps to do: "
        "give each rank's loader the same number of batches"
    )
    failure = Failure(
        phase="data", step=steps, type=LOOP_ENDED, message=message, rank=rank, host=host
    )
    return RankEnd(status="ok", failure=failure, at=now_s)


def first_end(
    ends: Mapping[int, RankEnd], ranks: Iterable[int], codes: Mapping[int, int | None]
) -> RankEnd | None:
    """Return the end that caused the others.

    It is the first of these that there is: the earliest failure of a rank's own; the loop that ended first; a rank that
    left no end; any end. A signal may have been sent because of another rank, so it counts only if no rank is lost.

    Args:
        ends: the ends that ranks left.
        ranks: all ranks.
        codes: their exit codes, if known; None for a rank that runs.
    """
    # Hosts' clocks differ by milliseconds; an end that another caused comes later, or is marked.
    own_failures = sorted(
        (end for end in ends.values() if end.is_own_failure), key=_end_time
    )
    if own_failures and not own_failures[0].is_signalled:
        return own_failures[0]

    ended_loops = sorted(
        (end for end in ends.values() if end.status == "ok"), key=_end_time
    )
    some_failed = len(ended_loops) < len(ends)
    if ended_loops and some_failed and not own_failures:
        return ended_loops[0].model_copy(update={"status": "failed"})

    lost_ranks = _lost_ranks(ends, ranks, codes, was_signalled=bool(own_failures))
    any_end = next(iter(ends.values()), None)
    if any_end is not None and lost_ranks:
        return _end_of_lost(lost_ranks, codes, any_end)
    if own_failures:
        return own_failures[0]
    return any_end


def _end_time(end: RankEnd) -> float:
    return end.at


def _lost_ranks(
    ends: Mapping[int, RankEnd],
    ranks: Iterable[int],
    codes: Mapping[int, int | None],
    was_signalled: bool,
) -> list[int]:
    """Return the ranks that left no end and may have caused the others' ends.

    After a signal, a rank that is known to run, or to have succeeded, is not the cause.
    """
    silent_ranks = [rank for rank in ranks if rank not in ends]
    failed_ranks = [rank for rank in silent_ranks if rank not in codes or codes[rank]]
    if failed_ranks or was_signalled:
        return failed_ranks
    return silent_ranks


def _end_of_lost(
    lost_ranks: Sequence[int], codes: Mapping[int, int | None], near_end: RankEnd
) -> RankEnd:
    """Return the end of the first of ``lost_ranks``, which left none itself.

    Its phase and step are those of ``near_end``, the end of another rank: all ranks are in about the same step.
    """
    lost_rank = lost_ranks[0]
    has_code = lost_rank in codes
    message = how_it_ended(codes[lost_rank]) if has_code else "ended without a word"
    if len(lost_ranks) > 1:
        message += f"; so did {ranks_text(lost_ranks[1:])}"
    # A known code means that this process, or its parent, started the rank on this host. ``near_end`` is the end of
    # this process where it looks for itself, so its host is the same.
    host = near_end.failure.host if has_code else None
    changes = {
        "type": RANK_LOST,
        "message": message,
        "rank": lost_rank,
        "host": host,
        "out_of_memory": None,
    }
    return RankEnd(
        status="failed",
        failure=near_end.failure.model_copy(update=changes),
        at=near_end.at,
    )


def how_it_ended(code: int | None) -> str:
    """Return in words how a process ended, from its exit code; None: it runs."""
    if code is None:
        return "hangs, or did not receive the signal that ended the others"
    if code == 0:
        return "had no step left to do while the others had: do the ranks' loaders differ in length?"
    if code > 0:
        return f"ended with exit code {code}"
    is_known_signal = -code in {*signal.Signals}
    name = signal.Signals(-code).name if is_known_signal else f"signal {-code}"
    return f"killed by {name}"

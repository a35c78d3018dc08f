"""Records how the ranks of a run ended, and finds which of these ends caused the others."""

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

RANK_LOST = "RankLost"  # type of the failure if a rank ended without writing how
LOOP_ENDED = "LoopEnded"  # type of the failure if a rank's loop ended normally while the other ranks had more steps


class RankEnd(Part):
    """How a rank ended, from its file ``ended.rank<n>.json``."""

    # ``ok`` if its loop ended normally, but earlier than those of other ranks
    status: Annotated[Status, Newer]
    failure: Failure
    at: float  # seconds since 1970, on the clock of its host
    # whether the end of another rank caused it: a collective failed, or all other ranks had ended
    followed: bool = False

    @property
    def is_signalled(self) -> bool:
        """Whether a signal ended the rank that a launcher may have sent after another rank was lost (not Ctrl-C)."""
        return self.status == "interrupted" and self.failure.type != "KeyboardInterrupt"

    @property
    def is_own_failure(self) -> bool:
        """Whether the rank failed by itself, and not because of another rank."""
        return self.status != "ok" and not self.followed


def end_file(rank: int) -> str:
    """Return the name of the file in the run's folder in which ``rank`` writes how it ended."""
    return f"ended.rank{rank}.json"


def read_ends(folder: Path) -> dict[int, RankEnd]:
    """Return how ranks ended, by rank, from the readable files in ``folder``."""
    ends: dict[int, RankEnd] = {}
    for path in sorted(folder.glob("ended.rank*.json")):
        rank_text = path.name.split(".")[1].removeprefix("rank")
        if not rank_text.isdecimal():
            continue
        with suppress(RecordError):
            ends[int(rank_text)] = read_part(path, RankEnd, "a rank's end")
    return ends


def end_of_loop(rank: int, host: str, steps: int, now_s: float) -> RankEnd:
    """Return the end of a ``rank`` whose loop ended after ``steps`` steps, before all stages of the run were done.

    It counts as a failure only if other ranks fail, because they waited for steps that this rank did not have.
    """
    message = (
        f"the rank's loop ended after step {steps} while other ranks had more steps to do: "
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

    The candidates are, in this order: the earliest failure that no other rank caused; the loop that ended first; a rank
    that ended without writing how; any end. A signal may be the result of another rank's end, so it counts only if no
    rank is lost. None if ``ends`` is empty.

    Args:
        ends: how ranks ended, if they wrote it.
        ranks: all ranks.
        codes: their exit codes, if known; None for a rank that is still running.
    """
    # The clocks of hosts differ only by milliseconds, and an end that was caused by another one is later or marked.
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
    """Return the ranks that did not write how they ended, and may have caused the ends of others.

    If others were ended by a signal, a rank that is known to be running, or to have succeeded, is not the cause.
    """
    silent_ranks = [rank for rank in ranks if rank not in ends]
    failed_ranks = [rank for rank in silent_ranks if rank not in codes or codes[rank]]
    if failed_ranks or was_signalled:
        return failed_ranks
    return silent_ranks


def _end_of_lost(
    lost_ranks: Sequence[int], codes: Mapping[int, int | None], other_end: RankEnd
) -> RankEnd:
    """Return an end for the first of ``lost_ranks``, which did not write one itself.

    Phase and step are taken from ``other_end``, the end of another rank, because all ranks are in about the same step.
    """
    lost_rank = lost_ranks[0]
    has_code = lost_rank in codes
    message = (
        how_it_ended(codes[lost_rank]) if has_code else "ended without reporting why"
    )
    if len(lost_ranks) > 1:
        message += f"; the same holds for {ranks_text(lost_ranks[1:])}"
    # If the exit code is known, this process or its parent started the rank on this host, and ``other_end`` is from
    # this host too.
    host = other_end.failure.host if has_code else None
    changes = {
        "type": RANK_LOST,
        "message": message,
        "rank": lost_rank,
        "host": host,
        "out_of_memory": None,
    }
    return RankEnd(
        status="failed",
        failure=other_end.failure.model_copy(update=changes),
        at=other_end.at,
    )


def how_it_ended(code: int | None) -> str:
    """Return a description of how a process ended, from its exit code (None: it is still running)."""
    if code is None:
        return "hangs, or did not receive the signal that ended the other ranks"
    if code == 0:
        return "had no steps left while other ranks had some (perhaps the ranks' loaders differ in length)"
    if code > 0:
        return f"ended with exit code {code}"
    is_known_signal = -code in {*signal.Signals}
    name = signal.Signals(-code).name if is_known_signal else f"signal {-code}"
    return f"killed by {name}"

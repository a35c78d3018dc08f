"""The ranks' timelines with what was compared out about their clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lm_profiler.analysis.ranks.on_stream import with_waits
from lm_profiler.analysis.ranks.rank_timeline import ClockOffset, RankTimeline
from lm_profiler.measure.collectives.alignment import ClockComparison


def with_clocks(
    timelines: Sequence[RankTimeline], clocks: ClockComparison
) -> tuple[Sequence[RankTimeline], Sequence[str]]:
    """``timelines``, each with its clock and its waits, and a note on those left out because their clock is unknown.
    On rank 0."""
    known, unknown = [], []
    for timeline in timelines:
        compared = clocks.of(timeline.rank, int(timeline.host_ns[-1]))
        if compared is None:
            unknown.append(str(timeline.rank))
        else:
            at_ns, ahead_ns, uncertainty_ns = zip(*compared, strict=True)
            known.append(replace(timeline, clock=ClockOffset(at_ns, ahead_ns, uncertainty_ns)))
    known = with_waits(known)
    if not unknown:
        return known, []
    ranks = f"rank{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
    return known, [f"who waits for whom is not known of {ranks}, whose clock could not be compared with rank 0's"]

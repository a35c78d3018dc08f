"""What the time of traced steps went to: every nanosecond of their window is one piece's, or a gap's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lm_profiler.analysis.steps.statistics import student
from lm_profiler.analysis.trace.pieces import Piece, TracedWork, Use, rank_of
from lm_profiler.analysis.why.gaps import Gap, gaps_of
from lm_profiler.analysis.why.partition import gaps_between, shared_out

Weighed = tuple[Piece, float]
"""A piece, and how many nanoseconds of it count."""


@dataclass(frozen=True)
class Traced:
    """``own`` of all pieces and ``ns`` of all gaps add up to ``window_ns``, the length of ``steps`` steps together.

    ``scatter`` is half the 95 % interval of the mean step's time in products or memory, a share of it, as these differ
    from step to step; None of one step.
    """

    pieces: list[Weighed]
    gaps: list[Gap]
    steps: int
    window_ns: int
    on_device: bool
    scatter: float | None = None

    def of(self, use: Use) -> Iterator[Weighed]:
        """The pieces of one use."""
        return (weighed for weighed in self.pieces if weighed[0].use == use)

    def seconds(self, use: Use) -> float:
        """Of one step."""
        return sum(own for _, own in self.of(use)) * 1e-9 / self.steps


def traced_of(work: TracedWork) -> Traced:
    """What the traced steps went to."""
    begin, end, pieces = work.begin, work.end, work.pieces
    if work.on_device:
        end = max([end, *(piece.end for piece in pieces)])
    starts, ends = [piece.start for piece in pieces], [piece.end for piece in pieces]
    own = shared_out(starts, ends, [rank_of(piece) for piece in pieces], begin, end).tolist()
    weighed = [(piece, ns) for piece, ns in zip(pieces, own, strict=True) if ns]
    idle = gaps_between(starts, ends, begin, end)
    return Traced(
        pieces=[(piece, ns) for piece, ns in weighed if piece.use != "dispatch"],
        gaps=list(gaps_of(work, weighed, list(zip(*(side.tolist() for side in idle), strict=True)))),
        steps=len(work.steps),
        window_ns=end - begin,
        on_device=work.on_device,
        scatter=_scatter(weighed, [of.start for of in work.steps]),
    )


def _scatter(weighed: Sequence[Weighed], begins: Sequence[int]) -> float | None:
    """From the variance of a step's time over its mean, pooled over products and memory."""
    sums = {use: [0.0] * len(begins) for use in ("products", "memory")}
    for piece, own in weighed:
        if piece.use in sums:
            sums[piece.use][max(bisect_right(begins, piece.start) - 1, 0)] += own
    rates = [[own / (sum(of) / len(of)) - 1.0 for own in of] for of in sums.values() if any(of)]
    freedom = (len(begins) - 1) * len(rates)
    if freedom < 1:
        return None
    variance = sum(off * off for of in rates for off in of) / freedom
    return student(freedom, 0.95) * math.sqrt(variance / len(begins))

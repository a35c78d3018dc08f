"""What the time of traced steps went to: every nanosecond of their window is one piece's, or a gap's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lm_profiler.analysis.trace.pieces import Piece, TracedWork, Use, rank_of
from lm_profiler.analysis.why.gaps import Gap, gaps_of
from lm_profiler.analysis.why.partition import gaps_between, shared_out

Weighed = tuple[Piece, float]
"""A piece, and how many nanoseconds of it count."""


@dataclass(frozen=True)
class Traced:
    """``own`` of all pieces and ``ns`` of all gaps add up to ``window_ns``, the length of ``steps`` steps together."""

    pieces: list[Weighed]
    gaps: list[Gap]
    steps: int
    window_ns: int
    on_device: bool

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
    )

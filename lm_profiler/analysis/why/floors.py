"""What a piece should have taken at least: its FLOPs at the peak, its bytes at the bandwidth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from lm_profiler.analysis.trace.pieces import Piece
from lm_profiler.analysis.why.traced import Weighed

Floor = Callable[[Piece], float | None]
"""Nanoseconds of the whole call of an operator, from its name and inputs alone; None is unknown."""


def floored(pieces: Iterable[Weighed], floor: Floor) -> list[tuple[Piece, float, float | None]]:
    """Each piece, its own time and its share of its call's floor, which is never more than its own time.

    The floor of an operator's call is shared by all kernels that it launched, as their times are.
    """
    calls: defaultdict[tuple[int, int], list[Weighed]] = defaultdict(list)
    for number, (piece, own) in enumerate(pieces):
        calls[(0, piece.call) if piece.call >= 0 else (1, number)].append((piece, own))
    shared = []
    known: dict[tuple[str | None, int], float | None] = {}  # equal inputs of a trace are one object
    for call in calls.values():
        whole = sum(own for _, own in call)
        of = call[0][0]
        key = of.operator, id(of.inputs)
        least = known[key] if key in known else known.setdefault(key, floor(of))
        share = None if least is None else min(least / whole, 1.0)
        shared += [(piece, own, None if share is None else share * own) for piece, own in call]
    return shared

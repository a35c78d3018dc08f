"""The largest batch or context that would fit: a search among rehearsed steps."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

_MOST = 12
"""Sizes that are tried."""


def largest_that_fits(begin: int, needed: int, room: float) -> Generator[int, int, int]:
    """Asks what other sizes than ``begin``, which needs ``needed`` bytes, need; returns the largest within ``room``.

    What a step needs is a convex function of its batch, and of its context: the most of several sums, each of which
    grows in proportion, or as a square. So a line through two sizes that fit meets ``room`` too late, and one through a
    size that fits and one that does not, too early: from both sides the search closes in. 0 where not even 1 fits.
    """
    known = {begin: needed}
    for turn in range(_MOST):
        fitting = sorted(n for n, bytes_ in known.items() if bytes_ <= room)
        low = fitting[-1] if fitting else 0
        high = min((n for n, bytes_ in known.items() if bytes_ > room), default=None)
        if high is not None and high - low <= 1:
            return low
        n = _next(known, fitting, high, room, from_above=bool(turn % 2))
        known[n] = yield n
    return max((n for n, bytes_ in known.items() if bytes_ <= room), default=0)


def _next(known: Mapping[int, int], fitting: Sequence[int], high: int | None, room: float, from_above: bool) -> int:
    """The next size to try: above all of ``fitting``, and below ``high``."""
    if not fitting:
        assert high is not None
        above = sorted(known)[:2]
        near = _meets(known, above[0], above[1], room) if len(above) > 1 else int(high * room / known[high])
        return max(min(near if from_above else near * 3 // 4, high // 2), 1)
    low = fitting[-1]
    through_two = _meets(known, fitting[-2], low, room) if len(fitting) > 1 else 2 * low
    if high is None:
        return max(min(through_two, 64 * low), low + 1)
    n = through_two if from_above else _meets(known, low, high, room)
    return min(max(n, low + 1), high - 1)


def _meets(known: Mapping[int, int], a: int, b: int, room: float) -> int:
    """Where the line through sizes ``a`` and ``b`` meets ``room``, rounded down."""
    rise = known[b] - known[a]
    return int(a + (room - known[a]) * (b - a) / rise) if rise else 64 * b

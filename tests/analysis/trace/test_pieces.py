"""Time shared out, against a count of every nanosecond."""

import random
from collections import Counter

import pytest

from lm_profiler.analysis.trace.pieces import gaps_between, own_times_ns

BEGIN, END = 10, 190


def by_the_nanosecond(intervals: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Each nanosecond is given to the interval of the lowest rank, then to the one that began first."""
    own: Counter[int] = Counter()
    nobody = 0
    for now in range(BEGIN, END):
        there = [(rank, max(start, BEGIN), at) for at, (start, end, rank) in enumerate(intervals) if start <= now < end]
        if there:
            own[min(there)[2]] += 1
        else:
            nobody += 1
    return [own[at] for at in range(len(intervals))], nobody


@pytest.mark.parametrize("seed", range(40))
def test_each_nanosecond_is_one_intervals_or_a_gap(seed: int) -> None:
    rng = random.Random(seed)
    intervals = []
    for _ in range(rng.choice([0, 1, 3, 12, 40])):
        start = rng.randrange(0, 200)
        intervals.append((start, start + rng.choice([0, 1, 5, 20, 60]), rng.randrange(4)))
    starts, ends, ranks = ([interval[side] for interval in intervals] for side in range(3))
    expected, nobody = by_the_nanosecond(intervals)
    own = own_times_ns(starts, ends, ranks, BEGIN, END)
    first, last = gaps_between(starts, ends, BEGIN, END)
    assert own.tolist() == expected
    assert int((last - first).sum()) == nobody
    assert int(own.sum()) + nobody == END - BEGIN

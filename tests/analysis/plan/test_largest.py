"""The search for the largest size that fits, against trying every size."""

from __future__ import annotations

import random

import pytest

from lm_profiler.analysis.plan.largest import largest_that_fits


def search(needs, begin: int, room: float) -> tuple[int, list[int]]:
    steps, tried = largest_that_fits(begin, needs(begin), room), []
    try:
        n = next(steps)
        while True:
            tried.append(n)
            n = steps.send(needs(n))
    except StopIteration as found:
        return found.value, tried


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_is_found_whatever_the_phases_are(seed: int) -> None:
    """Peaks of phases are lines and parabolas; the step's is the highest of them."""
    draw = random.Random(seed)
    curves = [
        (draw.choice((0, 0, draw.uniform(0, 3))), draw.uniform(0.5, 400), draw.uniform(0, 10_000)) for _ in range(4)
    ]
    needs = lambda n: int(max((a * n + b) * n + c for a, b, c in curves))  # noqa: E731
    begin, room = draw.choice((1, 4, 64)), draw.uniform(1, 200_000)
    largest, tried = search(needs, begin, room)
    assert largest == max((n for n in range(1, 5000) if needs(n) <= room), default=0)
    assert len(tried) <= 12


def test_in_proportion_three_tries_do() -> None:
    largest, tried = search(lambda n: 1000 + 7 * n, 4, 5000)
    assert largest == 571
    assert len(tried) <= 4

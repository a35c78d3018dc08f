"""A part that grows while the machine's speed moves is reported once, with its size; nothing else is taken for it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lm_profiler.analysis.watch.part_growth import growing_parts
from lm_profiler.analysis.watch.step_blocks import BLOCK, cut_into_blocks
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import WatchEvent, latest_events

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])
OPTIMIZER = PARTS.index("optimizer")
STEP_S = 0.002
STEPS = 9_000
AT = np.arange(STEPS) / STEPS


def speed_of_machine(seed: int) -> NDArray[np.float64]:
    """Stretches of 300 to 900 steps at which the whole step takes up to 12 % longer."""
    rng = np.random.default_rng(seed)
    factors: list[float] = []
    while len(factors) < STEPS:
        factors += [1.0 + 0.12 * rng.random()] * int(rng.integers(300, 900))
    return np.array(factors[:STEPS])


def rows(
    speed: NDArray[np.float64] | float = 1.0, optimizer_s: NDArray[np.float64] | float = 0.0, seed: int = 0
) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    parts_s = np.outer(np.full(STEPS, STEP_S), SHARES)
    parts_s[:, OPTIMIZER] += optimizer_s
    parts_s *= np.exp(0.03 * rng.standard_normal(parts_s.shape)) * np.broadcast_to(speed, STEPS)[:, None]
    return np.column_stack([parts_s, parts_s.sum(axis=1)])


def growths(seconds: NDArray[np.float64]) -> list[str]:
    return [growth.part for growth in growing_parts(cut_into_blocks(np.arange(1, STEPS + 1), seconds))]


def events(seconds: NDArray[np.float64]) -> list[WatchEvent]:
    ends = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    ns = np.column_stack([np.concatenate([[0], ends[:-1]]), ends])
    run = WatchedRun(workers=0)
    written = []
    for first in range(0, STEPS, 500):
        written += run.add(ns[first : first + 500], seconds[first : first + 500])
    return [event for event in latest_events([*written, *run.finish()]) if event.kind == "level"]


@pytest.mark.parametrize("seed", range(2))
def test_a_growing_part_is_reported_with_its_size_whatever_the_machine_does(seed: int) -> None:
    speed = speed_of_machine(seed)
    grown = [event for event in events(rows(speed, 0.0008 * AT, seed)) if event.part == "optimizer"]
    assert len(grown) == 1
    (growth,) = grown
    assert growth.course == "drift"
    usual_speed = float(np.median(speed))
    assert growth.now - (growth.against or 0.0) == pytest.approx(0.0008 * usual_speed, rel=0.1)


def test_a_part_that_stops_growing_keeps_its_size() -> None:
    speed = speed_of_machine(5)
    grown = [
        event
        for event in events(rows(speed, 0.0008 * np.minimum(AT / 0.7, 1.0)))
        if event.part == "optimizer" and event.course == "drift"
    ]
    usual_speed = float(np.median(speed))
    assert sum(event.now - (event.against or 0.0) for event in grown) == pytest.approx(0.0008 * usual_speed, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_neither_the_machine_nor_a_jump_is_a_growing_part(seed: int) -> None:
    assert growths(rows(speed_of_machine(seed), seed=seed)) == []
    assert growths(rows(1.0 + 0.3 * AT, seed=seed)) == []  # all parts alike
    assert growths(rows(optimizer_s=np.where(AT > 0.5, 0.0008, 0.0), seed=seed)) == []
    assert growths(rows(optimizer_s=0.0004 * np.sin(20 * AT), seed=seed)) == []
    assert growths(rows(optimizer_s=0.0001 * AT, seed=seed)) == []  # 5 % of the step


def test_a_shrinking_part_is_one_too_and_few_blocks_show_nothing() -> None:
    seconds = rows(optimizer_s=0.0008 * (1.0 - AT))
    assert growths(seconds) == ["optimizer"]
    few_blocks = cut_into_blocks(np.arange(1, 50 * BLOCK + 1), seconds[: 50 * BLOCK])
    assert growing_parts(few_blocks) == []

"""Collections of garbage are timed; ``test_step_reader`` has what comes meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from lm_profiler.measure.counts.step_reader import GarbageLog

NOW = [0]


@pytest.fixture(autouse=True)
def _only_ours() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    NOW[0] = 0
    yield
    if enabled:
        gc.enable()


class Slow:
    """Garbage whose finalizer takes 3 ns on the clock of the test, and does more if it is asked to."""

    def __init__(self, do: Any = None) -> None:
        self.me, self.do = self, do

    def __del__(self) -> None:
        NOW[0] += 3
        if self.do is not None:
            self.do()


def started() -> GarbageLog:
    gc.collect()
    log = GarbageLog(lambda: NOW[0])
    log.start()
    return log


def test_each_collection_has_its_generation_and_its_time() -> None:
    log = started()
    try:
        Slow()
        gc.collect(0)
        NOW[0] = 100
        Slow()
        Slow()
        gc.collect(2)
    finally:
        log.stop()
    assert log.collections == [(0, 3, 0), (100, 106, 2)]


def test_after_stop_it_hears_nothing_and_leaves_nothing_behind() -> None:
    before = list(gc.callbacks)
    log = started()
    log.stop()
    log.stop()
    gc.collect()
    assert log.collections == []
    assert gc.callbacks == before


def test_a_second_start_begins_anew() -> None:
    log = started()
    gc.collect(1)
    log.start()
    gc.collect(0)
    log.stop()
    assert [one.generation for one in log.collections] == [0]

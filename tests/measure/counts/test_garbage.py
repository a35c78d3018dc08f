"""Collections of garbage are timed; ``test_step_reader`` has what comes meanwhile."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lm_profiler.measure.counts.step_reader import GarbageCollection, GarbageLog

NOW = [0]


@pytest.fixture(autouse=True)
def _only_ours() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    NOW[0] = 0
    yield
    if enabled:
        gc.enable()


class SlowGarbage:
    """Garbage whose finalizer takes 3 ns on the clock of the test, and does more if it is asked to."""

    def __init__(self, do: Any = None) -> None:
        self.me, self.do = self, do

    def __del__(self) -> None:
        NOW[0] += 3
        if self.do is not None:
            self.do()


def started_log() -> GarbageLog:
    gc.collect()
    log = GarbageLog(lambda: NOW[0])
    log.start()
    return log


def test_each_collection_has_its_generation_and_its_time() -> None:
    """The first frees one object, whose finalizer takes 3 ns, the second two."""
    log = started_log()
    try:
        SlowGarbage()
        gc.collect(0)
        NOW[0] = 100
        SlowGarbage()
        SlowGarbage()
        gc.collect(2)
    finally:
        log.stop()
    assert log.collections == [
        GarbageCollection(began_ns=0, ended_ns=3, generation=0),
        GarbageCollection(began_ns=100, ended_ns=106, generation=2),
    ]


def test_after_stop_no_collection_is_counted() -> None:
    before = list(gc.callbacks)
    log = started_log()
    log.stop()
    log.stop()
    gc.collect()
    assert log.collections == []
    assert gc.callbacks == before


def test_a_second_start_begins_anew() -> None:
    log = started_log()
    gc.collect(1)
    log.start()
    gc.collect(0)
    log.stop()
    assert [collection.generation for collection in log.collections] == [0]


def test_a_collection_is_charged_to_the_profiler_by_its_objects() -> None:
    """Python collects once 700 objects were made: 560 of them are the profiler's, so are four fifths of its time."""
    threshold = gc.get_threshold()[0]
    log = started_log()
    kept: list[set[int]] = []  # sets: Python keeps freed lists, and counts none that it uses again
    gc.enable()
    try:
        for _ in range(threshold):
            if log.collections:
                break
            count_before = gc.get_count()[0]
            for _ in range(4):
                kept.append(set())
            log.add_own_objects(count_before)
            kept.append(set())  # the program's
    finally:
        gc.disable()
        log.stop()
    assert len(kept) <= threshold + 10
    assert log.collections[0].own_share == pytest.approx(4 / 5, abs=0.05)


def test_a_collection_that_the_program_calls_for_is_the_programs() -> None:
    log = started_log()
    try:
        count_before = gc.get_count()[0]
        kept = [[] for _ in range(100)]
        log.add_own_objects(count_before)
        gc.collect()
    finally:
        log.stop()
    assert len(kept) == 100
    (collection,) = log.collections
    assert (collection.generation, collection.own_share) == (2, 0.0)


def test_pythons_hook_is_left_as_it_was() -> None:
    """As two runs do, the second of which begins before the first is over."""
    plain = sys.unraisablehook
    first, second = GarbageLog(lambda: 0), GarbageLog(lambda: 0)
    try:
        first.start()
        second.start()
        first.stop()
        second.stop()
        assert sys.unraisablehook is plain
    finally:
        sys.unraisablehook = plain

"""Figures of steps from readings that are known."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import GarbageCollection, TimedReading, step_counters
from lm_profiler.record.run_record import StepCounters

MS = 1_000_000


def reading(
    step: int, began_ms: float, ended_ms: float, thread: bytes = b"", allocator: Sequence[int] = (), **usage: float
) -> TimedReading:
    """A reading after a step; ``usage`` is what the process has used since it began, under the names of getrusage."""
    unused = dict.fromkeys(("ru_utime", "ru_stime", "ru_minflt", "ru_majflt", "ru_nvcsw", "ru_nivcsw"), 0)
    return TimedReading(step, began_ms * MS, ended_ms * MS, SimpleNamespace(**{**unused, **usage}), thread, allocator)


def test_each_step_has_what_happened_since_the_one_before() -> None:
    """Steps 6 and 7 last from 110 to 210 and from 212 to 312 ms.

    In the first, the thread runs for 60 ms and waits for a CPU for 5; of the 110 ms since the reading it sleeps the
    rest. The process runs for 60 ms, and 10 in the kernel.
    """
    # the thread's nanoseconds of running and of waiting for a CPU; the allocator's retries and segments
    before_thread, after_thread = b"6000000000 40000000 9\n", b"6060000000 45000000 12\n"
    before = {"ru_utime": 5.0, "ru_stime": 1.0, "ru_minflt": 1000, "ru_majflt": 3, "ru_nvcsw": 70, "ru_nivcsw": 20}
    after = {"ru_utime": 5.06, "ru_stime": 1.01, "ru_minflt": 1300, "ru_majflt": 5, "ru_nvcsw": 73, "ru_nivcsw": 24}
    raw = [
        reading(0, 100, 100, before_thread, allocator=(1, 8), **before),
        reading(6, 110, 210, after_thread, allocator=(1, 9), **after),
        reading(7, 212, 312, b"6160000000 45000000 12\n", allocator=(3, 9), **{**after, "ru_utime": 5.26}),
    ]
    first, second = step_counters(raw, rank=2)
    assert (first.step, first.rank, second.step) == (6, 2, 7)
    assert first.model_dump(exclude_none=True) == pytest.approx(
        {
            "step": 6, "rank": 2, "wall_s": 0.1, "between_s": 0.01, "gc_s": 0.0, "compile_s": 0.0, "cpu_wait_s": 0.005,
            "checkpoint_s": 0.0, "gc_own_s": 0.0,
            "asleep_s": 0.11 - 0.06 - 0.005, "cpu_s": 0.07, "system_s": 0.01, "fault_s": 0.01,
            "minor_faults": 300, "major_faults": 2, "voluntary_switches": 3, "involuntary_switches": 4,
            "alloc_retries": 0, "new_segments": 1,
        }
    )  # fmt: skip
    assert second.between_s == pytest.approx(0.002)
    assert second.asleep_s == pytest.approx(0.002)
    assert second.cpu_wait_s == 0.0
    assert second.minor_faults == 0
    assert second.alloc_retries == 3 - 1
    assert second.new_segments == 0


@pytest.mark.parametrize(
    "faults, user_s, kernel_s, fault_s",
    [
        (0, 0.0, 0.1, 0.0),
        (100, 0.0, 0.09, 0.05),  # half a millisecond each
        (100_000, 0.0, 0.03, 0.03),  # no more than the kernel took
        # the process ran for 400 ms in 100, so with four threads: their 100 ms in the kernel passed at once
        (100_000, 0.3, 0.1, 0.1 / 4),
    ],
)
def test_faults_take_at_most_the_time_of_the_kernel(faults: int, user_s: float, kernel_s: float, fault_s: float):
    raw = [reading(0, 0, 0), reading(1, 0, 100, ru_minflt=faults, ru_utime=user_s, ru_stime=kernel_s)]
    (counters,) = step_counters(raw)
    assert counters.fault_s == pytest.approx(fault_s)


def test_what_was_not_read_is_unknown() -> None:
    (counters,) = step_counters([reading(0, 0, 0), reading(1, 0, 10)], compilations=None)
    for name in ("cpu_wait_s", "asleep_s", "compile_s", "alloc_retries", "new_segments", "sm_clock_hz"):
        assert getattr(counters, name) is None


def test_the_gpus_clock_is_that_of_the_step() -> None:
    spans: list[tuple[float, float]] = []

    def gpu(began_s: float, ended_s: float) -> tuple[float, list[str]]:
        spans.append((began_s, ended_s))
        return 1e9, ["power cap"]

    (counters,) = step_counters([reading(0, 0, 0), reading(1, 5, 10)], gpu=gpu)
    assert spans == [(pytest.approx(0.005), pytest.approx(0.010))]
    assert counters == StepCounters(**{**counters.model_dump(), "sm_clock_hz": 1e9, "throttled": ["power cap"]})


# From 0 to 10 and from 12 to 20 ms.
TWO_STEPS = [reading(0, 0, 0), reading(1, 0, 10), reading(2, 12, 20)]


def test_collections_within_a_step_count() -> None:
    """One crosses the time between the steps; the step has the generation of the largest."""
    collections = [
        GarbageCollection(2 * MS, 4 * MS, 0),
        GarbageCollection(8 * MS, 13 * MS, 2),
        GarbageCollection(14 * MS, 15 * MS, 1),
    ]
    first, second = step_counters(TWO_STEPS, collections)
    assert first.gc_s == pytest.approx((4 - 2 + 10 - 8) * 1e-3)
    assert first.gc_generation == 0
    assert second.gc_s == pytest.approx((13 - 12 + 15 - 14) * 1e-3)
    assert second.gc_generation == 2


def test_compilations_within_a_step_count_once() -> None:
    """From 15 ms on, one within the other or overlapping it, until after the second step."""
    compilations = [
        TimedCompilation(0.015, 0.021, "f"),
        TimedCompilation(0.016, 0.019, "within f"),
        TimedCompilation(0.0185, 0.030, None),
    ]
    first, second = step_counters(TWO_STEPS, compilations=compilations)
    assert (first.compile_s, first.compiled) == (0.0, None)
    assert second.compile_s == pytest.approx((20 - 15) * 1e-3)
    assert second.compiled == "f"


def test_checkpoints_within_a_step_count() -> None:
    """From 2 to 5 ms, from 9 to 14, from 25 to 30; the last one goes on."""
    instants_ns = [ms * MS for ms in (2, 5, 9, 14, 25, 30, 40)]
    first, second = step_counters(TWO_STEPS, checkpoint_instants_ns=instants_ns)
    assert first.checkpoint_s == pytest.approx((5 - 2 + 10 - 9) * 1e-3)
    assert second.checkpoint_s == pytest.approx((14 - 12) * 1e-3)


def test_overlaps_are_what_brute_force_counts() -> None:
    rng = np.random.default_rng(1)
    instants = np.sort(rng.choice(10_000, 400, replace=False))
    collections = [GarbageCollection(int(a) * MS, int(b) * MS, 0) for a, b in instants.reshape(-1, 2)]
    busy = np.zeros(10_000, dtype=bool)
    for collection in collections:
        busy[collection.began_ns // MS : collection.ended_ns // MS] = True
    ends = [0, *np.sort(rng.choice(10_000, 60, replace=False)).tolist()]
    raw = [reading(0, 0, 0)] + [reading(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(ends), 1)]
    seen = [counters.gc_s for counters in step_counters(raw, collections)]
    assert seen == pytest.approx([busy[a:b].sum() * 1e-3 for a, b in itertools.pairwise(ends)])

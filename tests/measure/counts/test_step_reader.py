"""What is read between steps, on the real clocks of Linux."""

import gc
import itertools
import mmap
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lm_profiler.measure.boundary import comes_from_outside
from lm_profiler.measure.counts import step_reader
from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import (
    StepReader,
    ready_batches,
    seconds_compiling,
    step_counters,
    thread_times,
)

pytestmark = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts")


def reader_after(*steps: Any) -> StepReader:
    """Reads after each of ``steps``."""
    reader = StepReader(time.perf_counter_ns)
    reader.start()
    try:
        for number, step in enumerate(steps, 1):
            began_ns = time.perf_counter_ns()
            step()
            reader.note_instants(number, began_ns, time.perf_counter_ns())
            reader.read(number)
    finally:
        reader.stop()
    return reader


def spin(seconds: float) -> None:
    """Of this thread's own CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_running_waiting_and_sleeping_add_up() -> None:
    reader = reader_after(*[lambda: spin(0.05), lambda: time.sleep(0.05)] * 3)
    steps = list(step_counters(reader.timed_readings))
    assert all((spun.cpu_s or 0.0) >= 0.0499 for spun in steps[::2])
    asleep_s = [0.0 if step.asleep_s is None else step.asleep_s for step in steps]
    # Where another program has the CPU amid a reading, a step has some of its neighbour's: not in all three.
    assert min(asleep_s[::2]) < 0.02
    assert max(asleep_s[1::2]) > 0.0499
    for counters, (before, raw) in zip(steps, itertools.pairwise(reader.timed_readings), strict=True):
        ran_s = (int(raw[4].split()[0]) - int(before[4].split()[0])) * 1e-9
        known_s, wall_s = ran_s + counters.cpu_wait_s + counters.asleep_s, (raw[2] - before[2]) * 1e-9
        # The thread's times are read just after the instant: what it ran or waited since can be more than all of it.
        assert known_s == pytest.approx(wall_s) if counters.asleep_s else known_s >= wall_s


def test_pages_of_new_memory_are_counted() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 32 * 2**20) as fresh:  # torch may hand out memory that was touched before
            fresh[::4096] = bytes(32 * 2**8)

    (counters,) = step_counters(reader_after(touch).timed_readings)
    assert counters.minor_faults >= 16  # of huge pages
    before = list(Path("/proc/self/fd").iterdir())
    reader = reader_after(int)
    reader.stop()
    assert len(list(Path("/proc/self/fd").iterdir())) <= len(before)


def test_compilations_are_on_the_clock_of_the_steps() -> None:
    torch._dynamo.reset()

    def slow(graph: torch.fx.GraphModule, examples: Any) -> Any:
        time.sleep(0.1)
        return graph.forward

    @torch.compile(backend=slow, dynamic=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled(torch.ones(2))
    calls = [lambda length=length: doubled(torch.ones(length)) for length in (2, 3, 3)]
    reader = reader_after(*calls)
    none, one, again = step_counters(reader.timed_readings, compilations=reader.compilations)
    assert (none.compile_s, none.compiled, again.compile_s) == (0.0, None, 0.0)
    assert 0.1 < one.compile_s < one.wall_s
    assert one.compiled.partition(":")[0] == f"doubled ({Path(__file__).name}"
    assert "expected 2, actual 3" in one.compiled


def test_compilations_on_another_clock_are_unknown():
    reader = StepReader(lambda: 0)  # a clock that stands
    reader.start()
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    time.sleep(2e-3)
    reader.stop()
    assert reader.compilations is None


def test_a_nested_compilation_counts_once(monkeypatch: pytest.MonkeyPatch):
    spans = [TimedCompilation(began_s, ended_s, None) for began_s, ended_s in ((1.0, 4.0), (2.0, 3.0), (6.0, 6.5))]
    monkeypatch.setattr(step_reader, "compilations", lambda since_s: spans if since_s else None)
    assert seconds_compiling(1.0) == 3.5
    assert seconds_compiling(0.0) is None


def test_an_error_during_a_collection_is_raised_by_the_next_reading() -> None:
    def handle(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    class Signals:
        def __init__(self) -> None:
            self.me = self

    before = signal.signal(signal.SIGALRM, handle)
    reader = StepReader(time.perf_counter_ns)
    reader.start()
    kept = [[at] for at in range(1_000_000)]  # what a collection goes through
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        try:
            gc.collect()
        except KeyboardInterrupt:
            pytest.skip("it came before the collection began")
        with pytest.raises(KeyboardInterrupt) as raised:
            reader.read(1)
        assert comes_from_outside(raised.value)
        reader.read(2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        reader.stop()
        signal.signal(signal.SIGALRM, before)
        del kept


def timed_spans(work: Callable[[], None], times: int = 20) -> list[tuple[int, int]]:
    """Nanoseconds of the wall and of running, for each of several short spans."""
    seen = []
    for _ in range(times):
        began_ns, before = time.perf_counter_ns(), thread_times()
        work()
        after = thread_times()
        seen.append((time.perf_counter_ns() - began_ns, after.ran_ns - before.ran_ns))
    return seen


def test_a_thread_that_runs_is_running() -> None:
    """Counters that are as old as the last tick stand still in most spans of 0.3 ms."""
    assert all(0 < ran_ns <= wall_ns for wall_ns, ran_ns in timed_spans(lambda: spin(0.3e-3)))


def test_a_thread_that_sleeps_is_not_running() -> None:
    wall_ns, ran_ns = map(sum, zip(*timed_spans(lambda: time.sleep(0.003)), strict=True))
    assert ran_ns < 0.5 * wall_ns


def test_batches_made_and_not_yet_taken_are_counted() -> None:
    loader = DataLoader([1, 2, 3], 1, num_workers=1, prefetch_factor=5, multiprocessing_context="fork")
    iterator = iter(loader)
    until_s = time.monotonic() + 20
    while ready_batches(iterator, 1) != 3 and time.monotonic() < until_s:
        time.sleep(0.005)
    next(iterator)
    assert ready_batches(iterator, 1) == 2


@pytest.mark.parametrize("iterator,ready", [(iter(DataLoader([1, 2])), 0), (iter([1]), None)])
def test_without_workers_no_batch_is_ready(iterator: Any, ready: int | None) -> None:
    assert ready_batches(iterator, 0) == ready

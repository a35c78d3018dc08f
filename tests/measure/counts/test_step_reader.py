"""What is read between steps, on the real clocks of Linux."""

from __future__ import annotations

import gc
import itertools
import mmap
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_profiler.measure.boundary import comes_from_outside
from lm_profiler.measure.counts import step_reader
from lm_profiler.measure.counts.recompiles import TimedCompilation
from lm_profiler.measure.counts.step_reader import StepReader, seconds_compiling, step_counters

pytestmark = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts")


def read_of(*steps: Any) -> StepReader:
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


def test_running_waiting_and_sleeping_add_up_to_the_time_between_two_readings() -> None:
    reader = read_of(*[lambda: spin(0.05), lambda: time.sleep(0.05)] * 3)
    steps = step_counters(reader.raw)
    assert all((spun.cpu_s or 0.0) >= 0.0499 for spun in steps[::2])
    asleep_s = [0.0 if step.asleep_s is None else step.asleep_s for step in steps]
    # Where another program has the CPU amid a reading, a step has some of its neighbour's: not in all three.
    assert min(asleep_s[::2]) < 0.02
    assert max(asleep_s[1::2]) > 0.0499
    for counters, (before, raw) in zip(steps, itertools.pairwise(reader.raw), strict=True):
        ran_s = (int(raw[4].split()[0]) - int(before[4].split()[0])) * 1e-9
        assert counters.cpu_wait_s is not None
        assert counters.asleep_s is not None
        known_s, wall_s = ran_s + counters.cpu_wait_s + counters.asleep_s, (raw[2] - before[2]) * 1e-9
        # The thread's times are read just after the instant: what it ran or waited since can be more than all of it.
        assert known_s == pytest.approx(wall_s) if counters.asleep_s else known_s >= wall_s


def test_the_threads_time_is_not_as_old_as_the_last_tick() -> None:
    """Steps that take less than a tick; they look at no clock of the thread, which would bring its time up to date."""

    def work() -> None:
        sum(range(20_000))

    def took_ns() -> int:
        began_ns = time.thread_time_ns()
        work()
        return time.thread_time_ns() - began_ns

    least_ns = min(took_ns() for _ in range(20))
    reader = read_of(*[work] * 40)
    assert None not in [step.cpu_wait_s for step in step_counters(reader.raw)]
    ran_ns = [int(after[4].split()[0]) - int(before[4].split()[0]) for before, after in itertools.pairwise(reader.raw)]
    assert min(ran_ns) > least_ns / 2  # and of most steps nothing where only ticks are told


def test_pages_of_new_memory_are_counted() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 32 * 2**20) as fresh:  # torch may hand out memory that was touched before
            fresh[::4096] = bytes(32 * 2**8)

    (counters,) = step_counters(read_of(touch).raw)
    assert counters.minor_faults is not None
    assert counters.minor_faults >= 16  # of huge pages


def test_compilations_are_told_on_the_clock_of_the_steps() -> None:
    torch._dynamo.reset()

    def slow(graph: torch.fx.GraphModule, examples: Any) -> Any:
        time.sleep(0.1)
        return graph.forward

    @torch.compile(backend=slow, dynamic=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled(torch.ones(2))
    reader = read_of(lambda: doubled(torch.ones(2)), lambda: doubled(torch.ones(3)), lambda: doubled(torch.ones(3)))
    none, one, again = step_counters(reader.raw, compilations=reader.compilations)
    assert (none.compile_s, none.compiled, again.compile_s) == (0.0, None, 0.0)
    assert one.compile_s is not None
    assert one.wall_s is not None
    assert 0.1 < one.compile_s < one.wall_s
    assert one.compiled is not None
    assert one.compiled.partition(":")[0] == f"doubled ({Path(__file__).name}"
    assert "expected 2, actual 3" in one.compiled


def test_where_the_time_of_day_goes_another_way_compilations_are_unknown() -> None:
    reader = StepReader(lambda: 0)  # a clock that stands
    reader.start()
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    time.sleep(2e-3)
    reader.stop()
    assert reader.compilations is None


def test_what_was_raised_amid_a_collection_is_raised_by_the_next_reading() -> None:
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


def test_after_stop_no_file_is_open() -> None:
    before = list(Path("/proc/self/fd").iterdir())
    reader = read_of(int)
    reader.stop()
    assert len(list(Path("/proc/self/fd").iterdir())) <= len(before)


def test_a_nested_compilation_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [TimedCompilation(began_s, ended_s, None) for began_s, ended_s in ((1.0, 4.0), (2.0, 3.0), (6.0, 6.5))]
    monkeypatch.setattr(step_reader, "compilations", lambda since_s: spans if since_s else None)
    assert seconds_compiling(1.0) == 3.5
    assert seconds_compiling(0.0) is None

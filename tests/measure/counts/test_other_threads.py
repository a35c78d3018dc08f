"""A thread that holds Python's lock delays the training thread; one that computes without the lock does not."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm_profiler.measure.counts.other_threads import OtherThreadsReader, cpu_time_ns
from lm_profiler.measure.counts.step_reader import ThreadTimes

LONG_TURN_S = 0.05


@pytest.fixture
def long_turns() -> Iterator[None]:
    """Threads keep the lock for longer than a busy machine delays a thread by chance."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(LONG_TURN_S)
    yield
    sys.setswitchinterval(usual_s)


@contextmanager
def thread_of(work: Callable[[threading.Event], None], name: str = "prefetcher") -> Iterator[Thread]:
    """A thread that repeats ``work`` meanwhile."""
    is_over = threading.Event()
    thread = Thread(target=work, args=[is_over], name=name)
    thread.start()
    try:
        yield thread
    finally:
        is_over.set()
        thread.join()


def spin(is_over: threading.Event) -> None:
    while not is_over.is_set():
        pass


def multiply(is_over: threading.Event) -> None:
    matrix = torch.eye(600)
    while not is_over.is_set():
        matrix @ matrix


def wait(is_over: threading.Event) -> None:
    is_over.wait()


def reader_of(cpu_ms: dict[str, list[int]], pause_ms: float = 0.2, no_cpu_ms: float = 0.0) -> OtherThreadsReader:
    """A reader of two steps, of 50 ms each.

    Args:
        cpu_ms: the CPU time of each thread, by its name, at each reading.
        pause_ms: how long a pause of 0.2 ms takes, of which ``no_cpu_ms`` is a wait for a CPU.
    """
    instants_ms = iter([0.0, 100.0, 100.0, 100.0 + 8 * pause_ms])
    waited_ms = iter([0.0, 8 * no_cpu_ms])
    return OtherThreadsReader(
        clock=lambda: round(next(instants_ms) * 1e6),
        cpu_time_ns=lambda thread: cpu_ms[thread.name].pop(0) * 1_000_000 if thread.name in cpu_ms else None,
        training_thread=lambda: ThreadTimes(0, round(next(waited_ms) * 1e6)),
        pause=lambda _: None,
    )


@pytest.mark.parametrize("pause_ms, no_cpu_ms, lock_wait_ms", [(0.2, 0.0, 0.0), (5.2, 0.0, 5.0), (5.2, 4.0, 1.0)])
def test_the_times_are_those_of_a_step(pause_ms: float, no_cpu_ms: float, lock_wait_ms: float) -> None:
    reader = reader_of({"idle": [3, 4], "prefetcher": [20, 99], "lm_profiler watch": [0, 50]}, pause_ms, no_cpu_ms)
    with thread_of(wait, "idle"), thread_of(wait), thread_of(wait, "lm_profiler watch"):
        reader.begin()
        threads = reader.result(steps=2)
    assert threads is not None
    assert threads.ran_s == pytest.approx((1 + 79) / 2 * 1e-3)
    assert threads.lock_wait_s == pytest.approx(lock_wait_ms * 1e-3)
    assert (threads.busiest, threads.file) == ("prefetcher", None)


def test_threads_that_hardly_compute_are_left_out() -> None:
    reader = reader_of({"prefetcher": [20, 29]})
    with thread_of(wait):
        reader.begin()
        assert reader.result(steps=2) is None


def test_a_thread_that_has_ended_has_no_time() -> None:
    ended: Any = SimpleNamespace(native_id=(1 << 22) + 1)  # more than Linux gives any thread
    assert cpu_time_ns(ended) is None


@pytest.mark.skipif(cpu_time_ns(threading.current_thread()) is None, reason="only Linux reports CPU times of threads")
@pytest.mark.parametrize("work, holds_lock", [(spin, True), (multiply, False)])
def test_a_thread_that_spins_holds_the_lock(
    work: Callable[[threading.Event], None], holds_lock: bool, long_turns: None
) -> None:
    """Also on a busy machine: the training thread's wait for a CPU does not count."""
    reader = OtherThreadsReader()
    with thread_of(work):
        reader.begin()
        while (threads := reader.result(steps=1)) is None:
            torch.eye(600) @ torch.eye(600)
            reader.sample_lines()
    assert threads.busiest == "prefetcher"
    assert (threads.lock_wait_s > LONG_TURN_S / 4) == holds_lock
    assert (Path(threads.file or "").name, threads.function) == (Path(__file__).name, work.__name__)

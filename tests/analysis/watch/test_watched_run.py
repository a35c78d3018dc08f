"""Planted faults are reported with kind, part and cause."""

from typing import Any

import numpy as np
import pytest

from lm_profiler.analysis.watch.ledger import CHECKPOINTS, VALIDATION, NamedSpan
from lm_profiler.analysis.watch.watched_run import OwnWork, TracedStep, WatchedRun
from lm_profiler.record.counter_table import CounterTable
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import StepCounters
from lm_profiler.record.watch_files import WatchEvent, latest_events

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])
N = 6000


class Loop:
    """A made-up loop of steps of 0.1 s, whose parts vary by 1 %."""

    def __init__(self, seed: int = 0) -> None:
        self.parts_s = 0.1 * SHARES * np.exp(0.01 * np.random.default_rng(seed).standard_normal((N, len(PARTS))))
        self.counters: list[StepCounters] = []
        self.spans: list[tuple[int, str, float]] = []
        self.own_work_s: dict[int, tuple[float, float]] = {}  # by step: how long the watch worked, and its CPU time

    def events(self) -> list[WatchEvent]:
        seconds = np.column_stack([self.parts_s, self.parts_s.sum(axis=1)])
        ends = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
        ns = np.column_stack([np.concatenate([[0], ends[:-1]]), ends])
        run, written = WatchedRun(workers=0), []
        for at in range(0, N, 50):
            here = range(at, at + 50)
            counters = [counter for counter in self.counters if counter.step is not None and counter.step - 1 in here]
            spans = [NamedSpan(ns[s, 1] - round(d * 1e9), ns[s, 1] - 1, what) for s, what, d in self.spans if s in here]
            for step in self.own_work_s.keys() & here:
                worked_s, cpu_s = self.own_work_s[step]
                run.add_own_work(OwnWork(int(ns[step, 0]), int(ns[step, 0] + worked_s * 1e9), cpu_s))
            written += run.add(ns[at : at + 50], seconds[at : at + 50], CounterTable.from_counters(counters), spans)
        return latest_events([*written, *run.finish()])


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("part", ["data", "forward"])
@pytest.mark.parametrize("waited_s", [0.008, 0.02])
def test_waiting_that_stays_is_one_change_of_its_part(waited_s: float, part: str, every: int) -> None:
    """Threads or processes of the program itself may cause it. Readings are of every step, or of five together."""
    loop = Loop()
    loop.parts_s[3000:, PARTS.index(part)] += waited_s
    known = {"wall_s": 0.1, "between_s": 0.1 * (every - 1), "gc_s": 0.0}
    loop.counters = [
        StepCounters(step=step, **known, cpu_wait_s=every * waited_s * (step > 3000))
        for step in range(every, N + 1, every)
    ]
    (level,) = loop.events()
    assert (level.kind, level.part, level.cause) == ("level", part, "waiting for a CPU")
    assert level.since_step == pytest.approx(3001, abs=1)
    assert level.against == pytest.approx(0.1, rel=0.01)
    assert level.now == pytest.approx(0.1 + waited_s, rel=0.01)
    assert level.cause_s == pytest.approx(waited_s, rel=0.1)


def test_waiting_between_steps_hides_no_change_of_a_part() -> None:
    """From step 2001 on, 60 ms of waiting lie between two steps; from step 4001 on, forward is 25 % longer."""
    loop = Loop()
    loop.parts_s[4000:, PARTS.index("forward")] *= 1.25
    loop.counters = [
        StepCounters(step=step, wall_s=0.1, between_s=0.12 * (step > 2000), gc_s=0.0, cpu_wait_s=0.06 * (step > 2000))
        for step in range(1, N + 1)
    ]
    (level,) = loop.events()
    assert (level.kind, level.part) == ("level", "forward")
    assert level.since_step == pytest.approx(4001, abs=5)
    assert level.against == pytest.approx(0.1, rel=0.01)
    assert level.now == pytest.approx(0.1 + 0.25 * 0.03, rel=0.01)


@pytest.mark.parametrize("every", [1, 5])
def test_waiting_in_all_parts_is_the_cause_of_a_level(every: int) -> None:
    """Readings of every step, or of five steps together, of which each waits for 0 to 60 ms of 0.1 s."""
    loop = Loop()
    waited_s = np.zeros(N)
    waited_s[3000:] = np.random.default_rng(1).uniform(0.0, 0.06, N - 3000)
    loop.parts_s += waited_s[:, None] * SHARES / SHARES.sum()
    known = {"wall_s": 0.1, "between_s": 0.1 * (every - 1), "gc_s": 0.0}
    loop.counters = [
        StepCounters(step=step, **known, cpu_wait_s=waited_s[step - every : step].sum())
        for step in range(every, N + 1, every)
    ]
    (level,) = [event for event in loop.events() if event.kind == "level"]
    assert (level.in_all_parts, level.part, level.cause) == (True, None, "waiting for a CPU")
    assert level.since_step == pytest.approx(3001, abs=20)
    assert level.cause_s == pytest.approx(0.03, rel=0.1)


def test_a_little_waiting_is_no_cause_of_a_level() -> None:
    loop = Loop()
    loop.parts_s[3000:, PARTS.index("forward")] += 0.006
    loop.counters = [
        StepCounters(step=step, wall_s=0.1, between_s=0.0, cpu_wait_s=0.001 * (step > 3000)) for step in range(1, N + 1)
    ]
    (level,) = loop.events()
    assert (level.part, level.cause, level.cause_s) == ("forward", None, None)


def test_a_short_cause_does_not_explain_a_lasting_change() -> None:
    """A recompilation of one step near a change that lasts is not its cause."""
    loop = Loop()
    loop.parts_s[3000:, PARTS.index("forward")] += 0.02
    usual = {"wall_s": 0.1, "between_s": 0.0, "gc_s": 0.0, "compile_s": 0.0, "cpu_s": 0.1}
    loop.counters = [StepCounters(step=step, **usual) for step in range(1, N + 1)]
    loop.counters[3004] = StepCounters(step=3005, **usual | {"compile_s": 5.4}, compiled="forward")
    loop.parts_s[3004, PARTS.index("forward")] += 5.4
    level, recompiled = sorted(loop.events(), key=lambda event: event.kind)
    assert (level.kind, level.cause) == ("level", None)
    assert (recompiled.kind, recompiled.step, recompiled.cause) == ("slow step", 3005, "compilation of forward")


@pytest.mark.parametrize(
    "counted, part, cause",
    [
        ({"gc_s": 0.49, "gc_generation": 2}, "forward", "garbage collection of generation 2"),
        ({"fault_s": 0.49, "minor_faults": 40_000}, None, "40,000 page faults"),  # come in any part
        ({"fault_s": 0.49, "minor_faults": 26}, "forward", None),  # take microseconds, whatever the counter shows
    ],
)
def test_counters_of_a_slow_step_are_its_cause(counted: dict[str, Any], part: str | None, cause: str | None):
    loop = Loop()
    loop.parts_s[4000, PARTS.index("forward")] += 0.5
    usual = {"wall_s": 0.1, "between_s": 0.0, "gc_s": 0.0, "cpu_s": 0.1, "fault_s": 0.0, "minor_faults": 0}
    loop.counters = [StepCounters(step=step, rank=0, **usual) for step in range(3900, 4100)]
    loop.counters[101] = StepCounters(step=4001, rank=0, **usual | {"wall_s": 0.6} | counted)
    (event,) = loop.events()
    assert (event.step, event.part, event.cause) == (4001, part, cause)


@pytest.mark.parametrize(
    "cpu_s, is_reported",
    [(0.25, False), (0.02, True)],  # the watch may have waited for the step, not the step for it
)
def test_a_delay_by_the_watch_itself_is_no_event(cpu_s: float, is_reported: bool) -> None:
    loop = Loop()
    for step in range(1000, N, 500):
        loop.parts_s[step, PARTS.index("forward")] += 0.3
        loop.own_work_s[step] = (0.3, cpu_s)
    assert bool(loop.events()) == is_reported


def test_a_checkpoint_is_the_cause() -> None:
    loop = Loop()
    loop.parts_s[2999::1000, PARTS.index("other")] += 0.5
    loop.spans = [(at, CHECKPOINTS, 0.5) for at in range(2999, N, 1000)]
    assert {(event.kind, event.part, event.cause) for event in loop.events()} == {("slow step", "other", CHECKPOINTS)}


def test_a_slow_validation_is_an_event() -> None:
    run = WatchedRun()
    assert run.add_durations(VALIDATION, [2.0, 2.1, 1.9, 2.2, 2.3], 0.0) == []
    (event,) = run.add_durations(VALIDATION, [5.0], 1.0)
    assert (event.kind, event.now, event.against) == (VALIDATION, 5.0, 2.1)


def test_a_leak_is_an_event() -> None:
    """The run holds 1 MiB more each second, and 1 GiB is free. At the end it is reported again with all its growth."""
    run = WatchedRun()
    events = [e for at_s in range(1, 4001) for e in run.add_held_bytes(at_s, 2**31 + 2**20 * at_s, lambda: 2**30)]
    (last,) = latest_events([*events, *run.finish()])
    assert (last.kind, last.step, last.since_step) == ("memory", 0, 0)
    assert last.full_in_s == pytest.approx(2**30 / 2**20, rel=0.1)
    assert last.now == pytest.approx(3600 * 2**20, rel=0.01)
    assert last.grew_bytes == pytest.approx(4000 * 2**20, rel=0.05)
    assert last.held_bytes == pytest.approx(2**31 + 4000 * 2**20, rel=0.05)


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_a_stall_in_a_traced_step_is_reported_without_the_cost_of_tracing(stalled: int) -> None:
    run = WatchedRun()
    traced_s = np.full((3, len(TIMED)), 0.005)  # traced steps of 5 ms take 40
    traced_s[:, -1] = traced_s[:, :-1].sum(axis=1)
    tracing_alone = [TracedStep(10**9 * index, 10**9 * index + 10**8, row) for index, row in enumerate(traced_s)]
    assert run.judge_traced(301, tracing_alone) == []

    traced_s[stalled, [PARTS.index("other"), -1]] += 1.0
    steps = [TracedStep(2 * 10**9 * index, 2 * 10**9 * (index + 1), row) for index, row in enumerate(traced_s)]
    begin_ns = steps[stalled].begin_ns
    callback = NamedSpan(begin_ns + 1, begin_ns + 10**9, "callback: Registry")
    run.add(np.empty((0, 2), np.int64), np.empty((0, len(TIMED))), spans=[callback])
    (event,) = run.judge_traced(301, steps)
    assert (event.kind, event.step, event.part) == ("slow step", 301 + stalled, "other")
    assert event.cause == "callback: Registry"
    assert event.cost_s == pytest.approx(1.0)

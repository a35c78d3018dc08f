"""A cause is named where it explains half of what a step took beyond the others, and only there."""

from dataclasses import replace
from typing import Any

import pytest
from made_environment import made_step
from stored_texts import assert_stored

from lm_profiler.analysis.steps.odd_step_causes import with_causes
from lm_profiler.analysis.steps.summaries import model_of, odd_steps
from lm_profiler.record.run_record import OddStep, StepCounters
from lm_profiler.record.steps import StepRow

SLOW = 15
USUAL: dict[str, Any] = {
    "between_s": 1e-3, "gc_s": 2e-3, "compile_s": 0.0, "cpu_wait_s": 3e-3, "asleep_s": 20e-3, "cpu_s": 0.1,
    "system_s": 5e-3, "fault_s": 1e-3, "minor_faults": 1000, "major_faults": 0, "voluntary_switches": 9,
    "involuntary_switches": 2, "checkpoint_s": 0.0,
}  # fmt: skip


def step(number: int, part: str = "forward", more_s: float = 0.0, rank: int = 0) -> StepRow:
    seconds = {"data": 0.02, "forward": 0.08}
    seconds[part] = seconds.get(part, 0.0) + more_s
    return made_step(number, seconds, rank=rank)


def odd_step_with(
    part: str = "forward",
    excess_s: float = 1.0,
    workers: int | None = 0,
    epochs: dict[str, Any] | None = None,
    **counted: Any,
) -> tuple[OddStep, list[StepCounters]]:
    """Return, of 20 steps, the one that took ``excess_s`` more in ``part``, while ``counted`` was more than usual."""
    rows = [step(n, part, excess_s if n == SLOW else 0.0) for n in range(1, 21)]
    slow = {**USUAL, "wall_s": 0.1 + excess_s, **counted}
    for name, value in counted.items():
        if name in USUAL and value is not None:
            slow[name] = USUAL[name] + value
    counters = [StepCounters(step=n, **(slow if n == SLOW else {**USUAL, "wall_s": 0.1})) for n in range(1, 21)]
    odd = odd_steps(rows, model_of(rows))
    (odd_step,), shown = with_causes(odd, rows, counters, workers, **(epochs or {}))
    return odd_step, shown


@pytest.mark.parametrize(
    "counted, cause",
    [
        ({"gc_s": 0.9, "gc_generation": 2}, "garbage collection of generation 2"),
        ({"compile_s": 0.9, "compiled": "f (a.py:3)"}, "compilation of f (a.py:3)"),
        ({"compile_s": 0.9, "compiled": "f (a.py:3): x is 4"}, "recompilation of f (a.py:3): x is 4"),
        ({"compile_s": 0.9}, "compilation of a backward pass"),
        ({"cpu_wait_s": 0.9}, "waiting for a CPU"),
        ({"checkpoint_s": 0.9, "fault_s": 0.3}, "a checkpoint"),
        ({"fault_s": 0.9, "minor_faults": 899_000}, "900,000 page faults"),
    ],
)
def test_a_counter_that_explains_nine_tenths_is_the_cause(counted: dict[str, Any], cause: str) -> None:
    odd_step, shown = odd_step_with(**counted)
    assert (odd_step.step, odd_step.cause, odd_step.rank, odd_step.beside) == (SLOW, cause, 0, None)
    assert odd_step.cause_s == pytest.approx(0.9)
    assert [counters.step for counters in shown] == [None, SLOW]  # beside what is usual
    assert shown[0].gc_s == USUAL["gc_s"]


@pytest.mark.parametrize("counter", ["gc_s", "compile_s", "cpu_wait_s", "fault_s"])
@pytest.mark.parametrize("share, named", [(0.49, False), (0.51, True)])
def test_less_than_half_is_no_cause(counter: str, share: float, named: bool) -> None:
    odd_step, _ = odd_step_with(**{counter: share})
    assert (odd_step.cause is not None) == named
    assert (odd_step.beside is None) == named


@pytest.mark.parametrize(
    "counted, first_steps, new_workers, cause",
    [
        ({}, [SLOW], 2, "the first step of an epoch, which started 2 workers"),
        ({}, [SLOW], 0, "the first step of an epoch"),
        ({}, [SLOW - 1, SLOW + 1], 2, None),
        ({}, [SLOW - 1, SLOW], 2, "the first step of an epoch, which started 2 workers"),
        ({}, list(range(1, 21)), 2, None),  # each step begins an epoch, and one was slow
        ({"gc_s": 0.9, "gc_generation": 2}, [SLOW], 2, "garbage collection of generation 2"),
    ],
)
def test_the_beginning_of_an_epoch_is_a_cause_if_no_counter_is(
    counted: dict[str, Any], first_steps: list[int], new_workers: int, cause: str | None
) -> None:
    epochs: dict[str, Any] = {"first_steps": first_steps, "new_workers": new_workers}
    odd_step, _ = odd_step_with(epochs=epochs, **counted)
    assert odd_step.cause == cause
    assert (odd_step.beside is None) == (cause is not None)


def test_what_every_step_has_is_no_cause() -> None:
    """Each step waits a second for a CPU, and one took a second longer."""
    rows = [step(n, "forward", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    counters = [StepCounters(step=n, **{**USUAL, "cpu_wait_s": 1.0, "gc_s": 1.0}) for n in range(1, 21)]
    (odd_step,), _ = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert (odd_step.cause, odd_step.beside) == (None, "")


def test_counters_of_a_step_after_a_validation_prove_nothing() -> None:
    """A validation before the step took 0.8 s, in which the thread may have waited as well."""
    odd_step, _ = odd_step_with(cpu_wait_s=0.9, between_s=0.8)
    assert odd_step.cause is None
    odd_step, _ = odd_step_with(fault_s=3.0)
    assert odd_step.cause_s == pytest.approx(1.0)
    # The counters are read where steps end: those of a step after a validation are of both.
    odd_step, _ = odd_step_with(between_s=0.5, asleep_s=0.4, major_faults=900)
    assert (odd_step.cause, odd_step.beside) == (None, "")
    odd_step, _ = odd_step_with(between_s=0.5, asleep_s=0.7)
    assert odd_step.beside == "200 ms more asleep"


CAUSES: dict[str, dict[str, Any]] = {
    "garbage, whose instants are known, also after a validation": {"gc_s": 0.9, "gc_generation": 1, "between_s": 0.8},
    "a batch that this process makes late": {"part": "data"},
    "a batch that comes late from a loader that is nobody's": {"part": "data", "workers": None},
    "a batch that comes late from workers": {"part": "data", "workers": 2, "asleep_s": 0.95},
    "a thread that did not sleep did not wait for workers": {"part": "data", "workers": 2},
    "nor one that waited for a CPU": {"part": "data", "workers": 2, "cpu_wait_s": 0.9},
    "garbage that is collected in the loader is garbage": {"part": "data", "gc_s": 0.9, "gc_generation": 2},
    "a sleep in forward has no cause": {
        "asleep_s": 1.0, "major_faults": 1, "involuntary_switches": 7, "minor_faults": 12
    },
    "a step that computes more": {"excess_s": 0.2, "cpu_s": 0.19, "involuntary_switches": 11},
}  # fmt: skip


def test_causes_of_odd_steps() -> None:
    found = {case: odd_step_with(**facts)[0] for case, facts in CAUSES.items()}
    texts = {case: f"cause: {odd.cause}, {odd.cause_s or 0:.3f} s\nbeside: {odd.beside}" for case, odd in found.items()}
    assert_stored("analysis/causes", texts)


def test_retries_of_the_allocator_are_reported_beside_an_unknown_cause() -> None:
    rows = [step(n, "forward", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    none, some = {"alloc_retries": 0, "new_segments": 0}, {"alloc_retries": 2, "new_segments": 1}
    counters = [StepCounters(step=n, **USUAL, **(some if n == SLOW else none)) for n in range(1, 21)]
    (odd_step,), _ = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert odd_step.cause is None
    assert "2 retries" in odd_step.beside
    assert "1 new" in odd_step.beside


def test_the_cause_is_that_of_the_rank_that_all_waited_for() -> None:
    odd_step = odd_step_of_two_ranks({"gc_s": 0.9, "gc_generation": 2})
    assert odd_step.rank == 1
    assert "garbage collection" in odd_step.cause
    odd_step = odd_step_of_two_ranks({})
    assert (odd_step.cause, odd_step.rank) == (None, 1)


@pytest.mark.parametrize("clock_hz, named", [(0.5e9, True), (1.2e9, False)])
def test_a_low_clock_is_the_cause_if_it_explains_half_of_the_excess(clock_hz: float, named: bool) -> None:
    """Steps of 0.1 s at 1.5 GHz: at 0.5 GHz 0.3 s, at 1.2 GHz 0.125 s."""
    rows = [step(n, "forward", 0.25 if n == SLOW else 0.0) for n in range(1, 21)]
    held = {SLOW: {"sm_clock_hz": clock_hz, "throttled": ["power cap"]}, 4: {}}  # one has no sample
    counters = [StepCounters(step=n, **held.get(n, {"sm_clock_hz": 1.5e9})) for n in range(1, 21)]
    (odd_step,), _ = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert (odd_step.cause is not None) == named
    if named:
        assert odd_step.cause_s == pytest.approx(0.2)
        assert_stored("analysis/notes: a low clock", {"cause": odd_step.cause or ""})


def test_a_step_that_was_shorter_has_no_cause() -> None:
    rows = [step(n) for n in range(1, 21)]
    rows[4] = replace(rows[4], seconds=(1e-3,) * 9, host_seconds=(1e-3,) * 9)
    counters = [StepCounters(step=n, **USUAL) for n in range(1, 21)]
    (odd_step,), shown = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert odd_step.ratio < 1
    assert (odd_step.cause, odd_step.beside, odd_step.rank, shown) == (None, None, None, [])


def test_without_counters_there_is_no_cause() -> None:
    rows = [step(n, "data", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    (odd_step,), shown = with_causes(odd_steps(rows, model_of(rows)), rows, [], 0)
    assert (odd_step.cause, odd_step.beside, odd_step.rank, shown) == (None, None, None, [])
    odd_step, _ = odd_step_with(cpu_wait_s=None, asleep_s=None, fault_s=None)  # those that some machines lack
    assert (odd_step.cause, odd_step.beside) == (None, "")


def odd_step_of_two_ranks(of_one: dict[str, Any]) -> OddStep:
    """Two ranks that wait for each other; ``of_one`` is what rank 1 counted."""
    rows = [
        step(n, "forward" if rank else "backward", 1.0 if n == SLOW else 0.0, rank)
        for n in range(1, 21)
        for rank in (0, 1)
    ]
    mean = [step(n, "forward", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    slow = {1: {**USUAL, **of_one, "wall_s": 1.2}, 0: {**USUAL, "wall_s": 1.1, "asleep_s": 1.0}}
    counters = [
        StepCounters(step=n, rank=rank, **(slow[rank] if n == SLOW else {**USUAL, "wall_s": 0.1}))
        for n in range(1, 21)
        for rank in (0, 1)
    ]
    (odd_step,), _ = with_causes(odd_steps(mean, model_of(mean)), rows, counters, 0)
    return odd_step

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


def explained(
    part: str = "forward", excess_s: float = 1.0, workers: int | None = 0, **counted: Any
) -> tuple[OddStep, list[StepCounters]]:
    """Of twenty steps the one that took ``excess_s`` more in ``part``, while ``counted`` was more than usual."""
    rows = [step(n, part, excess_s if n == SLOW else 0.0) for n in range(1, 21)]
    slow = {**USUAL, "wall_s": 0.1 + excess_s, **{name: _more(name, value) for name, value in counted.items()}}
    counters = [StepCounters(step=n, **(slow if n == SLOW else {**USUAL, "wall_s": 0.1})) for n in range(1, 21)]
    (told,), shown = with_causes(odd_steps(rows, model_of(rows)), rows, counters, workers)
    return told, shown


def _more(name: str, value: Any) -> Any:
    return value + USUAL[name] if USUAL.get(name) is not None and value is not None else value


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
def test_what_explains_nine_tenths_is_the_cause(counted: dict[str, Any], cause: str) -> None:
    told, shown = explained(**counted)
    assert (told.step, told.cause, told.rank, told.beside) == (SLOW, cause, 0, None)
    assert told.cause_s == pytest.approx(0.9)
    assert [each.step for each in shown] == [None, SLOW]  # beside what is usual
    assert shown[0].gc_s == USUAL["gc_s"]


@pytest.mark.parametrize("counter", ["gc_s", "compile_s", "cpu_wait_s", "fault_s"])
@pytest.mark.parametrize("share, named", [(0.49, False), (0.51, True)])
def test_less_than_half_is_no_cause(counter: str, share: float, named: bool) -> None:
    told, _ = explained(**{counter: share})
    assert (told.cause is not None) == named
    assert (told.beside is None) == named


def test_a_cause_explains_no_more_than_there_is_and_not_what_every_step_has() -> None:
    """Each step waits a second for a CPU, and one took a second longer."""
    rows = [step(n, "forward", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    counters = [StepCounters(step=n, **{**USUAL, "cpu_wait_s": 1.0, "gc_s": 1.0}) for n in range(1, 21)]
    (told,), _ = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert (told.cause, told.beside) == (None, "")
    # A validation before the step took 0.8 s, in which the thread may have waited as well.
    told, _ = explained(cpu_wait_s=0.9, between_s=0.8)
    assert told.cause is None
    told, _ = explained(fault_s=3.0)
    assert told.cause_s == pytest.approx(1.0)
    # The counters are read where steps end: those of a step after a validation are of both.
    told, _ = explained(between_s=0.5, asleep_s=0.4, major_faults=900)
    assert (told.cause, told.beside) == (None, "")
    told, _ = explained(between_s=0.5, asleep_s=0.7)
    assert told.beside == "200 ms more asleep"


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


def test_causes_are_told_as_stored_and_are_of_the_rank_that_all_waited_for() -> None:
    told = {case: explained(**of)[0] for case, of in CAUSES.items()}
    said = {case: f"cause: {of.cause}, {of.cause_s or 0.0:.3f} s\nbeside: {of.beside}" for case, of in told.items()}
    assert_stored("analysis/causes", said)
    # Retries of the allocator are told and no cause for their time is unknown.
    rows = [step(n, "forward", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    none, some = {"alloc_retries": 0, "new_segments": 0}, {"alloc_retries": 2, "new_segments": 1}
    counters = [StepCounters(step=n, **USUAL, **(some if n == SLOW else none)) for n in range(1, 21)]
    (told,), _ = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert told.cause is None
    assert "2 retries" in told.beside
    assert "1 new" in told.beside
    # The cause is that of the rank which all waited for and waiting is none.
    told = both_ranks({"gc_s": 0.9, "gc_generation": 2})
    assert told.rank == 1
    assert "garbage collection" in told.cause
    told = both_ranks({})
    assert (told.cause, told.rank) == (None, 1)


@pytest.mark.parametrize("clock_hz, named", [(0.5e9, True), (1.2e9, False)])
def test_a_clock_is_the_cause_where_steps_at_that_clock_take_half_as_much_longer(clock_hz: float, named: bool) -> None:
    """Steps of 0.1 s at 1.5 GHz: at 0.5 GHz 0.3 s, at 1.2 GHz 0.125 s."""
    rows = [step(n, "forward", 0.25 if n == SLOW else 0.0) for n in range(1, 21)]
    held = {SLOW: {"sm_clock_hz": clock_hz, "throttled": ["power cap"]}, 4: {}}  # one has no sample
    counters = [StepCounters(step=n, **held.get(n, {"sm_clock_hz": 1.5e9})) for n in range(1, 21)]
    (told,), _ = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert (told.cause is not None) == named
    if named:
        assert told.cause_s == pytest.approx(0.2)
        assert_stored("analysis/notes: a low clock", {"cause": told.cause or ""})


def test_what_was_not_read_or_is_not_counted_is_no_cause() -> None:
    rows = [step(n) for n in range(1, 21)]
    rows[4] = replace(rows[4], seconds=(1e-3,) * 9, host_seconds=(1e-3,) * 9)
    counters = [StepCounters(step=n, **USUAL) for n in range(1, 21)]
    (told,), shown = with_causes(odd_steps(rows, model_of(rows)), rows, counters, 0)
    assert told.ratio < 1
    assert (told.cause, told.beside, told.rank, shown) == (None, None, None, [])
    # Where nothing was read nothing is said.
    rows = [step(n, "data", 1.0 if n == SLOW else 0.0) for n in range(1, 21)]
    (told,), shown = with_causes(odd_steps(rows, model_of(rows)), rows, [], 0)
    assert (told.cause, told.beside, told.rank, shown) == (None, None, None, [])
    # What this machine does not count is no cause.
    told, _ = explained(cpu_wait_s=None, asleep_s=None, fault_s=None)
    assert (told.cause, told.beside) == (None, "")


def both_ranks(of_one: dict[str, Any]) -> OddStep:
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
    (told,), _ = with_causes(odd_steps(mean, model_of(mean)), rows, counters, 0)
    return told

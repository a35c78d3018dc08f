"""What binds a run, from made-up steps: the first cause that they carry, and how sure its share is."""

from typing import Any

import numpy as np
import pytest
from made_environment import made_utilisation
from made_facts import busy_machine, owners_of_ms, python_line, record_with, rows_with, thread_that_ran, thread_use_of
from made_parts import made_kernels, made_phase
from made_ranks import made_ranks

from lm_profiler.analysis.binding import INPUT, RunFacts, binding
from lm_profiler.analysis.savings.ranking import findings_of
from lm_profiler.analysis.steps.summaries import model_of
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import (
    Contention,
    Flops,
    OtherByOwner,
    OuterCall,
    OutsideSteps,
    OwnedTime,
    RunRecord,
    Utilisation,
    Verdict,
)


def utilised(of_ceiling: float) -> Utilisation:
    flops = Flops(forward=1, backward=2, recomputation=0)
    return made_utilisation(flops=flops, dtype="float32", ceiling_flops_per_s=1e11, of_ceiling=of_ceiling)


def verdict_of(
    ms: dict[str, float] | None = None, noise: float = 0.01, kernels: KernelTable | None = None, **facts: Any
) -> Verdict:
    record = record_with(ms, noise=noise, **facts)
    record = record.model_copy(update={"findings": findings_of(record)})
    rows = rows_with(ms, noise=noise)
    return binding(RunFacts(record, rows, model_of(rows), facts.pop("device_idle", None), kernels))


def test_a_run_that_computes_is_bound_by_compute() -> None:
    found = verdict_of(utilisation=utilised(0.5))
    assert (found.bound_by, found.certain, found.because) == ("compute", True, "compute")
    assert found.share == pytest.approx(95.5 / 100.0, rel=0.01)
    assert found.share_low < found.share < found.share_high <= 1.0


def test_code_binds_nothing_below_its_share() -> None:
    """A sleep of 45 ms is in no known line; Python takes 20 of 100 ms."""
    sleeps_somewhere = {"thread_use": thread_use_of(asleep_ms=45.0)}
    short_python = {"python_times": [python_line(20.0)], "thread_use": thread_use_of()}
    for code in (sleeps_somewhere, short_python):
        assert verdict_of(**code, utilisation=utilised(0.05)).bound_by is None


def test_a_run_that_waits_for_half_of_its_time_is_bound_by_input() -> None:
    """Beside 98 ms of other work."""
    found = verdict_of({"data": 100.0}, utilisation=utilised(0.5))
    assert (found.bound_by, found.or_bound_by, found.certain) == ("input", None, True)
    assert found.share == pytest.approx(100.0 / 198.0, rel=0.05)


@pytest.mark.parametrize("excess_ms, bound_by", [(31.0, "straggler"), (4.0, "input")])
def test_a_straggler_precedes_every_other_cause(excess_ms: float, bound_by: str) -> None:
    found = verdict_of({"data": 100.0}, ranks=made_ranks(excess_ms=excess_ms))
    assert found.bound_by == bound_by


@pytest.mark.parametrize("exposed_s, bound_by", [(0.03, "communication"), (0.01, "compute")])
def test_communication_binds_from_a_share_of_the_step_on(exposed_s: float, bound_by: str) -> None:
    """Of a step of 0.1 s."""
    found = verdict_of(ranks=made_ranks(slow=None, exposed_s={"backward": exposed_s}), utilisation=utilised(0.5))
    assert found.bound_by == bound_by


@pytest.mark.parametrize("idle_share, bound_by", [(0.8, "host"), (0.2, None)])
def test_an_idle_device_is_bound_by_the_host(idle_share: float, bound_by: str | None) -> None:
    """It idles so much by the marks of the measured steps, and 0.12 of 0.3 s in the trace."""
    kernels = made_kernels([], {"forward": made_phase(busy_s=0.1, idle_s=0.12)}, window_s=0.3, steps=3)
    record = record_with(device="cuda", utilisation=utilised(0.1))
    rows = rows_with()
    found = binding(RunFacts(record, rows, model_of(rows), idle_share, kernels))
    assert found.bound_by == bound_by
    if bound_by == "host":
        assert found.facts["marks"] == idle_share
        assert found.facts["idle"] == pytest.approx(0.12 / 0.3)


def test_kernels_that_move_memory_for_most_of_the_time_bind() -> None:
    kernels = made_kernels([], {}, window_s=0.3, steps=3, memory_bound_share=0.6)
    found = verdict_of(device="cuda", kernels=kernels, utilisation=utilised(0.2))
    assert found.bound_by == "memory bandwidth"


@pytest.mark.parametrize("used", [None, 0.05])
def test_work_that_reaches_little_is_bound_by_nothing_that_is_known(used: float | None) -> None:
    found = verdict_of(utilisation=None if used is None else utilised(used))
    assert found.bound_by is None
    assert found.because == ("unknown" if used is None else "small operators")


def test_the_code_outside_the_phases_takes_what_the_table_shows() -> None:
    """A finding about a part of it saves less."""
    gap = OwnedTime(owner="", action="after optimizer.step()", seconds=0.056, calls=1.0, in_steps=3)
    call = OuterCall(outer_function="draw", file="net.py", line=12, seconds=0.054, loop_file="net.py", loop_line=50)
    found = verdict_of(
        ms={"other": 60.0},
        other_by_owner=OtherByOwner(steps=3, seconds=0.056, actions=[gap]),
        outer_calls=[call],
        loop="own",
    )
    assert found.because == "program code: owner"
    assert found.share == pytest.approx(60.0 / 158.0, rel=0.02)


@pytest.mark.parametrize(
    "code, name",
    [
        ({"python_times": [python_line(45.0, "time.sleep")], "thread_use": thread_use_of(45.0)}, "sleep"),
        ({"other_threads": thread_that_ran(50.0), "thread_use": thread_use_of(45.0)}, "threads"),
        ({"python_times": [python_line(45.0)], "thread_use": thread_use_of()}, "python"),
        ({"ms": {"other": 60.0}, "other_by_owner": owners_of_ms(Ema__on_train_batch_end=60.0)}, "owner"),
    ],
)
@pytest.mark.parametrize("contention", [None, busy_machine()])
def test_code_that_takes_a_third_binds(code: dict[str, Any], name: str, contention: Contention | None) -> None:
    """Version 0.2 blamed small operators for a ``forward`` that sleeps."""
    found = verdict_of(**code, utilisation=utilised(0.05), contention=contention)
    assert (found.bound_by, found.because) == ("program code", f"program code: {name}")
    assert found.share == pytest.approx(0.4, abs=0.06)


def test_near_a_third_both_causes_are_named() -> None:
    ms = {"data": 49.0}  # of 147: a third
    found = verdict_of(ms, noise=0.3, utilisation=utilised(0.5))
    assert {found.bound_by, found.or_bound_by} == {"input", "compute"}
    assert not found.certain
    assert found.share_low < INPUT < found.share_high


def test_runs_near_a_third_do_not_contradict_each_other() -> None:
    """Version 0.2 contradicted itself on 29 to 50 % of such pairs: each of two causes was certain."""
    record = record_with({"data": 49.0}, noise=0.3, utilisation=utilised(0.5))
    certain_causes = set()
    for seed in range(40):
        rows = rows_with({"data": 49.0}, noise=0.3, seed=seed)
        found = binding(RunFacts(record, rows, model_of(rows)))
        if found.certain:
            certain_causes.add(found.bound_by)
    assert len(certain_causes) <= 1


@pytest.mark.parametrize("ms, bound_by, certain", [({"data": 100.0}, "input", True), ({}, "compute", False)])
def test_on_a_busy_machine_only_waiting_for_input_is_certain(ms: dict[str, float], bound_by: str, certain: bool):
    found = verdict_of(ms, utilisation=utilised(0.5), contention=busy_machine())
    assert (found.bound_by, found.certain) == (bound_by, certain)


@pytest.mark.parametrize("forward, because", [(None, "outside"), ("unmarked", "model outside")])
def test_most_time_outside_of_phases_is_reported(forward: Any, because: str) -> None:
    """A forward pass of the model that no mark sees is not the work of the loop."""
    call = python_line(70.0, what="torch", phase="other").model_copy(update={"forward": forward})
    found = verdict_of({"other": 80.0}, utilisation=utilised(0.3), python_times=[call])
    assert (found.bound_by, found.because) == (None, because)
    assert found.facts["outside"] == pytest.approx(80.0 / 178.0, rel=0.02)


def test_most_time_between_steps_is_reported() -> None:
    """36 of the 41 s of a run are a validation after the 40 measured steps of 0.1 s."""
    validation = OutsideSteps(what="validation", seconds=36.0, times=1, per_step_s=0.8)
    found = verdict_of(utilisation=utilised(0.5), outside=[validation], stages_s=41.0)
    assert (found.bound_by, found.because) == ("between steps", "between steps: validation")
    assert found.share == pytest.approx(0.8 / 0.9, rel=0.01)
    assert found.facts == {"times": 1.0, "each_s": 36.0, "every": 45.0}


def test_without_steps_there_is_no_verdict() -> None:
    record = record_with()
    empty: RunRecord = record.model_copy(update={"time": {}})
    assert binding(RunFacts(empty, [], model_of([]))) is None
    assert np.isfinite(verdict_of().facts["working"])

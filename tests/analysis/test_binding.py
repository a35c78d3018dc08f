"""What binds a run, from made-up steps: the first cause that they carry, and how sure its share is."""

from typing import Any

import numpy as np
import pytest
from made_facts import busy, line, made, owned, rows_of, thread
from made_parts import made_kernels, made_phase

from lm_profiler.analysis.binding import INPUT, RunFacts, binding
from lm_profiler.analysis.savings.ranking import findings_of
from lm_profiler.analysis.steps.summaries import model_of
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import (
    Contention,
    Flops,
    OutsideSteps,
    RankFinding,
    Ranks,
    RunRecord,
    Utilisation,
    Verdict,
)


def use(of_ceiling: float) -> Utilisation:
    return Utilisation(
        flops=Flops(forward=1, backward=2, recomputation=0), dtype="float32", peak_flops_per_s=None, peak_source=None,
        mfu=None, hfu=None, ceiling_flops_per_s=1e11, of_ceiling=of_ceiling,
    )  # fmt: skip


def bound(
    ms: dict[str, float] | None = None, noise: float = 0.01, kernels: KernelTable | None = None, **facts: Any
) -> Verdict:
    record = made(ms, noise=noise, **facts)
    record = record.model_copy(update={"findings": findings_of(record)})
    rows = rows_of(ms, noise=noise)
    return binding(RunFacts(record, rows, model_of(rows), facts.pop("device_idle", None), kernels))


def ranks(saves_s: float = 0.0, exposed_s: float = 0.0) -> Ranks:
    finding = RankFinding(
        kind="straggler", rank=1, host="a", phase="data", saves_s=saves_s, low_s=saves_s, high_s=saves_s
    )
    facts = {"world": 2, "hosts": {"a": [0, 1]}, "witness": "a test", "steps": 40, "step_s": 0.1, "own": {}}
    facts |= {"waiting": {}, "waiting_share": 0.2, "by_rank": [], "finding": finding}
    return Ranks.model_validate({**facts, "exposed_s": {"backward": exposed_s}})


def test_compute_waiting_ranks_and_launches_bind_from_their_shares_on() -> None:
    found = bound(utilisation=use(0.5))
    assert (found.bound_by, found.certain, found.because) == ("compute", True, "compute")
    assert found.share == pytest.approx(95.5 / 100.0, rel=0.01)
    assert found.share_low < found.share < found.share_high <= 1.0
    # Code that only may cost or costs little binds nothing and a loader that takes half does.
    assert bound(thread_use=thread(45.0), utilisation=use(0.05)).bound_by is None  # of no known line
    assert bound(python_times=[line(20.0)], thread_use=thread(), utilisation=use(0.05)).bound_by is None
    found = bound({"data": 100.0}, utilisation=use(0.5))
    assert (found.bound_by, found.or_bound_by, found.certain) == ("input", None, True)
    assert found.share == pytest.approx(0.5, rel=0.05)
    # Ranks that wait come before everything and exposed communication from a fifth on.
    assert bound({"data": 100.0}, ranks=ranks(saves_s=0.03)).bound_by == "straggler"
    assert bound({"data": 100.0}, ranks=ranks(saves_s=0.003)).bound_by == "input"
    assert bound(ranks=ranks(exposed_s=0.03), utilisation=use(0.5)).bound_by == "communication"
    assert bound(ranks=ranks(exposed_s=0.01), utilisation=use(0.5)).bound_by == "compute"
    # A device that waits for launches is bound by the host and kernels by memory.
    idle = made_kernels([], {"forward": made_phase(0.1, 0.12)}, 0.3, steps=3)
    record = made(device="cuda", utilisation=use(0.1))
    rows = rows_of()
    found = binding(RunFacts(record, rows, model_of(rows), 0.8, idle))
    assert (found.bound_by, found.facts["marks"]) == ("host", 0.8)
    assert found.facts["idle"] == pytest.approx(0.4)
    assert binding(RunFacts(record, rows, model_of(rows), 0.2, idle)).bound_by is None
    bound_by_memory = made_kernels([], {}, 0.3, steps=3, memory_bound_share=0.6)
    found = bound(device="cuda", kernels=bound_by_memory, utilisation=use(0.2))
    assert found.bound_by == "memory bandwidth"


@pytest.mark.parametrize("used", [None, 0.05])
def test_work_that_reaches_little_is_bound_by_nothing_that_is_known(used: float | None) -> None:
    found = bound(utilisation=None if used is None else use(used))
    assert found.bound_by is None
    assert found.because == ("unknown" if used is None else "small operators")


@pytest.mark.parametrize(
    "code, name",
    [
        ({"python_times": [line(45.0, "time.sleep")], "thread_use": thread(45.0)}, "sleep"),
        ({"python_times": [line(45.0)], "thread_use": thread()}, "python"),
        ({"ms": {"other": 60.0}, "other_by_owner": owned(Ema__on_train_batch_end=60.0)}, "owner"),
    ],
)
@pytest.mark.parametrize("contention", [None, busy()])
def test_code_that_takes_a_third_binds(code: dict[str, Any], name: str, contention: Contention | None) -> None:
    """What version 0.2 said of a ``forward`` that sleeps: the time goes to small operators."""
    found = bound(**code, utilisation=use(0.05), contention=contention)
    assert (found.bound_by, found.because) == ("program code", f"program code: {name}")
    assert found.share == pytest.approx(0.4, abs=0.06)


def test_near_a_third_both_causes_are_named_and_equal_runs_do_not_contradict_each_other() -> None:
    ms = {"data": 49.0}  # of 147: a third
    found = bound(ms, noise=0.3, utilisation=use(0.5))
    assert {found.bound_by, found.or_bound_by} == {"input", "compute"}
    assert not found.certain
    assert found.share_low < INPUT < found.share_high
    # What 0.2 said of 29 to 50 % of such pairs: one bound by input, the other not, both for certain.
    said = []
    for seed in range(40):
        rows = rows_of({"data": 49.0}, noise=0.3, seed=seed)
        found = binding(RunFacts(made({"data": 49.0}, noise=0.3, utilisation=use(0.5)), rows, model_of(rows)))
        said.append((found.bound_by, found.certain))
    certain = {bound_by for bound_by, sure in said if sure}
    assert len(certain) <= 1


@pytest.mark.parametrize("ms, bound_by, certain", [({"data": 100.0}, "input", True), ({}, "compute", False)])
def test_on_a_busy_machine_only_what_it_cannot_fake_is_certain(ms: dict[str, float], bound_by: str, certain: bool):
    found = bound(ms, utilisation=use(0.5), contention=busy())
    assert (found.bound_by, found.certain) == (bound_by, certain)


def test_time_outside_every_phase_or_step_is_told() -> None:
    found = bound({"other": 80.0}, utilisation=use(0.3))
    assert (found.bound_by, found.because) == (None, "outside")
    assert found.facts["outside"] == pytest.approx(80.0 / 178.0, rel=0.02)
    # 36 of the 41 s of a run: 40 steps of 0.1 s, and a validation after the measured ones.
    validation = OutsideSteps(what="validation", seconds=36.0, times=1, per_step_s=0.8)
    found = bound(utilisation=use(0.5), outside=[validation], stages_s=41.0)
    assert (found.bound_by, found.because) == ("between steps", "between steps: validation")
    assert found.share == pytest.approx(0.8 / 0.9, rel=0.01)
    assert found.facts == {"seconds": 36.0, "run_s": 41.0}
    # Without steps there is no verdict.
    record = made()
    empty: RunRecord = record.model_copy(update={"time": {}})
    assert binding(RunFacts(empty, [], model_of([]))) is None
    assert np.isfinite(bound().facts["working"])

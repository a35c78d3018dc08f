"""The cause of a slow rank, from counters that are made so that it is known."""

import pytest
from made_environment import made_contention
from simulated_ranks import simulate, usual_work_s

from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.analysis.ranks.slow_rank_cause import CountersByRank
from lm_profiler.record.run_record import Contention, RankFinding, StepCounters

STEPS = 20
LONGER_S = 0.03


def counters(rank: int, **seconds: float) -> list[StepCounters]:
    return [StepCounters(step=step, rank=rank, **seconds) for step in range(1, STEPS + 1)]


def finding_of(readings: list[StepCounters], contention: Contention | None = None) -> RankFinding:
    """Rank 1 of two is 30 ms slower in forward."""
    work_s = usual_work_s(ranks=2, steps=STEPS, noise=0.02)
    work_s["forward"][1] += LONGER_S
    ranks = ranks_of(simulate(work_s).timelines, 2, overlap=True, counters=readings, contention=contention)
    return ranks.finding


@pytest.mark.parametrize(
    "field, words", [("gc_s", "collecting garbage"), ("compile_s", "compiling"), ("checkpoint_s", "saving checkpoints")]
)
def test_the_counter_that_explains_the_excess_is_the_cause(field: str, words: str) -> None:
    found = finding_of([*counters(0, **{field: 0.001}), *counters(1, **{field: 0.028})])
    assert (found.kind, found.rank, found.cause) == ("straggler", 1, words)
    assert found.slow[0].cause == words


def test_a_counter_that_explains_little_or_is_of_all_ranks_is_no_cause() -> None:
    assert finding_of([*counters(0, gc_s=0.0), *counters(1, gc_s=0.01)]).cause is None
    assert finding_of([*counters(0, gc_s=0.03), *counters(1, gc_s=0.03)]).cause is None
    assert finding_of([]).cause is None
    assert CountersByRank([StepCounters(rank=1, gc_s=1.0)]).mean_s(1, "gc_s") is None  # of no measured step


def test_on_a_shared_machine_a_rank_with_a_cause_of_its_own_is_named() -> None:
    """Other programs take a third of the CPU time: they can make a collection longer, and cannot bring it about."""
    shared = made_contention(0.33, wall_s=2.0, had_s=2.0, others_s=1.0, waited_s=0.6, throttled_s=0.0)
    busy = {"wall_s": 0.1, "asleep_s": 0.0, "cpu_wait_s": 0.03, "cpu_s": 0.07}
    late = {**busy, "wall_s": 0.13, "cpu_wait_s": 0.06}
    doubted = finding_of([*counters(0, **busy), *counters(1, **late)], shared)
    assert doubted.doubt == "shared machine"
    named = finding_of([*counters(0, **busy, gc_s=0.0), *counters(1, **late, gc_s=0.029)], shared)
    assert (named.kind, named.rank, named.cause) == ("straggler", 1, "collecting garbage")

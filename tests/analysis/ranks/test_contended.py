"""On a shared machine a rank is named for what other programs cannot have made, and for nothing else."""

from __future__ import annotations

import pytest
from simulated_ranks import simulate, usual

from lm_profiler.analysis.ranks.summary import ranks_of
from lm_profiler.record.run import Contention, RankFinding, StepCounters


def contention(not_had: float) -> Contention:
    return Contention(
        wall_s=9.0, cpus=2, had_s=9.0, waited_s=1.0, others_s=1.0, stolen_s=0.0, throttled_s=None, pressure=None,
        involuntary_switches=1, not_had=not_had,
    )  # fmt: skip


def said(not_had: float, lost_s: tuple[float, float], asleep_s: float, threads_s: float = 0.0) -> RankFinding:
    """Of two ranks of which the second is 26 ms late in data. Each loses ``lost_s`` of CPU time a step; the second
    sleeps for ``asleep_s`` of its own, and its other threads run for ``threads_s``; the first sleeps as it waits."""
    work_s = usual(2, 20, 0.02)
    work_s["data"][1] += 0.026
    asleep = (0.026, asleep_s)
    counters = [
        StepCounters(
            step=step,
            rank=rank,
            wall_s=0.098,
            asleep_s=asleep[rank],
            cpu_wait_s=lost_s[rank],
            cpu_s=0.098 - asleep[rank] - lost_s[rank] + threads_s * rank,
        )
        for rank in range(2)
        for step in range(1, 21)
    ]
    timelines = simulate(work_s).timelines
    found = ranks_of(timelines, 2, overlap=True, contention=contention(not_had), counters=counters)
    assert found is not None
    return found.finding


def test_a_rank_that_sleeps_is_named_however_busy_the_machine_is() -> None:
    finding = said(0.79, lost_s=(0.03, 0.03), asleep_s=0.026)
    assert (finding.kind, finding.rank, finding.phase, finding.slow[0].certain) == ("straggler", 1, "data", True)
    assert finding.saves_s == pytest.approx(0.026, rel=0.02)


def test_a_rank_that_stood_ready_without_a_cpu_is_not() -> None:
    finding = said(0.79, lost_s=(0.03, 0.056), asleep_s=0.0)
    assert (finding.kind, finding.doubt, finding.saves_s) == ("unsure", "shared machine", None)
    (slow,) = finding.slow
    assert (slow.rank, slow.phase, slow.certain) == (1, "data", False)


def test_nor_one_that_ran_longer_where_others_had_most_of_the_cores() -> None:
    """Caches and cores that are shared make a rank run longer, too: by so much as others had of them at most."""
    assert said(0.79, lost_s=(0.01, 0.01), asleep_s=0.0).doubt == "shared machine"
    assert said(0.06, lost_s=(0.01, 0.01), asleep_s=0.0).kind == "straggler"


def test_nor_one_that_slept_while_its_own_threads_wanted_a_cpu() -> None:
    assert said(0.5, lost_s=(0.0, 0.0), asleep_s=0.026, threads_s=0.05).doubt == "shared machine"


def test_where_nobody_counts_nobody_is_named() -> None:
    work_s = usual(2, 20, 0.02)
    work_s["data"][1] += 0.026
    found = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention(0.3))
    assert found is not None
    assert found.finding.doubt == "shared machine"
    idle = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention(0.01))
    assert idle is not None
    assert idle.finding.kind == "straggler"


def test_ranks_that_are_stopped_in_turns_may_be_other_programs_doing() -> None:
    work_s = usual(2, 20, 0.02)
    work_s["forward"][0, ::2] += 0.03
    work_s["forward"][1, 1::2] += 0.03
    found = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention(0.3))
    assert found is not None
    assert (found.finding.kind, found.finding.doubt, found.finding.phase) == ("unsure", "shared machine", "forward")

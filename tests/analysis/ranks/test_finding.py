"""On a shared machine a rank is named for what other programs cannot have made, and for nothing else."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_environment import made_contention
from simulated_ranks import BASE_S, DDP, SHARDED, simulate, usual

from lm_profiler.analysis.ranks.rank_timeline import RankTimeline
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.record.run_record import Contention, RankFinding, Ranks, StepCounters


def contention(not_had: float) -> Contention:
    return made_contention(not_had, wall_s=9.0, had_s=9.0, waited_s=1.0, others_s=1.0)


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
    return found.finding


def test_on_a_busy_machine_a_rank_is_named_for_what_others_cannot_have_made() -> None:
    finding = said(0.79, lost_s=(0.03, 0.03), asleep_s=0.026)
    assert (finding.kind, finding.rank, finding.phase, finding.slow[0].certain) == ("straggler", 1, "data", True)
    assert finding.saves_s == pytest.approx(0.026, rel=0.02)
    # A rank that stood ready without a cpu is not.
    finding = said(0.79, lost_s=(0.03, 0.056), asleep_s=0.0)
    assert (finding.kind, finding.doubt, finding.saves_s) == ("unsure", "shared machine", None)
    (slow,) = finding.slow
    assert (slow.rank, slow.phase, slow.certain) == (1, "data", False)
    # Caches and cores that are shared make a rank run longer, too: by so much as others had of them at most.
    assert said(0.79, lost_s=(0.01, 0.01), asleep_s=0.0).doubt == "shared machine"
    assert said(0.06, lost_s=(0.01, 0.01), asleep_s=0.0).kind == "straggler"
    # Nor one that slept while its own threads wanted a cpu.
    assert said(0.5, lost_s=(0.0, 0.0), asleep_s=0.026, threads_s=0.05).doubt == "shared machine"


def test_where_nobody_counts_or_ranks_are_stopped_in_turns_nobody_is_named() -> None:
    work_s = usual(2, 20, 0.02)
    work_s["data"][1] += 0.026
    found = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention(0.3))
    assert found.finding.doubt == "shared machine"
    idle = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention(0.01))
    assert idle.finding.kind == "straggler"
    # Ranks that are stopped in turns may be other programs doing.
    work_s = usual(2, 20, 0.02)
    work_s["forward"][0, ::2] += 0.03
    work_s["forward"][1, 1::2] += 0.03
    found = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention(0.3))
    assert (found.finding.kind, found.finding.doubt, found.finding.phase) == ("unsure", "shared machine", "forward")


Delays = list[tuple[int, str, Any]]


def found(
    ranks: int,
    delays: Delays,
    program: list[Any] = DDP,
    steps: int = 20,
    hosts: list[str] | None = None,
    noise: float = 0.02,
    seed: int = 1,
) -> tuple[Ranks, float]:
    """What is said of ranks with such delays, and what a step would really be shorter without the first of them."""
    work_s, mended_s = usual(ranks, steps, noise, seed), usual(ranks, steps, noise, seed)
    for index, (rank, part, delay_s) in enumerate(delays):
        work_s[part][rank] += delay_s
        mended_s[part][rank] += delay_s if index else 0.0
    truth = simulate(work_s, program, hosts)
    said = ranks_of(truth.timelines, ranks, overlap=program is not SHARDED)
    return said, truth.step_s - simulate(mended_s, program, hosts).step_s


def within(finding: RankFinding, truth_s: float) -> None:
    assert finding.saves_s == pytest.approx(truth_s, rel=0.02)
    assert finding.low_s - 2e-4 <= truth_s <= finding.high_s + 2e-4


@pytest.mark.parametrize("program", [DDP, SHARDED], ids=["DDP", "sharded"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", list(BASE_S))
def test_the_rank_the_phase_and_what_mending_it_saves(part: str, ranks: int, program: list[Any]) -> None:
    said, truth_s = found(ranks, [(1, part, 0.03)], program)
    finding = said.finding
    assert (finding.kind, finding.rank, finding.phase, finding.host) == ("straggler", 1, part, "here")
    assert finding.last_in >= 19  # the last step's optimizer nobody waits for
    assert finding.excess_s == pytest.approx(0.03, rel=0.05)
    assert finding.others_wait_s == pytest.approx(0.03, rel=0.1)
    within(finding, truth_s)


def slow_in(finding: RankFinding) -> dict[tuple[int, str], float]:
    """Milliseconds that each rank takes longer in each phase, of those that are certain."""
    return {(one.rank, one.phase): one.excess_s * 1e3 for one in finding.slow if one.certain}


@pytest.mark.parametrize("first, last", [(1, 10), (11, 20), (6, 15), (16, 20)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_slow_in_a_stretch_of_the_steps(first: int, last: int, ranks: int) -> None:
    late = np.where((np.arange(20) + 1 >= first) & (np.arange(20) < last), 0.0144, 0.0)
    said, truth_s = found(ranks, [(1, "forward", late)])
    (one,) = said.finding.slow
    assert (one.rank, one.phase, one.certain) == (1, "forward", True)
    assert (one.first_step, one.last_step) == (first, last)
    assert one.excess_s == pytest.approx(late.mean(), rel=0.05)
    within(said.finding, truth_s)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_slow_in_turns(ranks: int) -> None:
    turns: Delays = [(r, "forward", np.where(np.arange(20) % ranks == r, 0.03, 0.0)) for r in range(ranks)]
    finding = found(ranks, turns)[0].finding
    assert (finding.kind, finding.rank, finding.phase) == ("turns", None, "forward")
    assert finding.saves_s == pytest.approx(0.03, rel=0.05)


def test_a_host_whose_ranks_are_all_slower_is_waited_for_by_the_others_alone() -> None:
    hosts = ["a", "a", "b", "b"]
    said, _ = found(4, [(2, "forward", 0.03), (3, "forward", 0.03)], hosts=hosts)
    finding = said.finding
    assert (finding.kind, finding.host, finding.rank, finding.phase) == ("host", "b", None, "forward")
    assert finding.saves_s == pytest.approx(0.0295, rel=0.03)
    one, _ = found(4, [(2, "forward", 0.03)], hosts=hosts)
    assert (one.finding.kind, one.finding.rank, one.finding.host) == ("straggler", 2, "b")
    # The ranks of a host are waited for by the others alone.
    said, _ = found(4, [(2, "forward", 0.03), (3, "forward", 0.03)], hosts=["a", "a", "b", "b"])
    assert said.finding.others_wait_s == pytest.approx(0.03, rel=0.1)


def test_a_rank_that_is_slower_in_everything_but_what_adds_a_millisecond() -> None:
    delays: Delays = [(2, "forward", 0.01), (2, "backward", 0.02), (2, "optimizer", 0.004)]
    finding = found(4, delays)[0].finding
    assert (finding.kind, finding.rank, finding.phase) == ("straggler", 2, None)
    assert finding.saves_s == pytest.approx(0.033, rel=0.05)
    expected = {(2, "forward"): 10.0, (2, "backward"): 20.0, (2, "optimizer"): 4.0}
    assert slow_in(finding) == pytest.approx(expected, rel=0.05)
    # A phase that adds a millisecond is not named.
    delays: Delays = [(2, "forward", 0.01), (2, "backward", 0.02), (2, "optimizer", 0.001)]
    assert set(slow_in(found(4, delays)[0].finding)) == {(2, "forward"), (2, "backward")}
    # Two steps say nothing.
    finding = found(2, [(1, "data", 0.03)], steps=2)[0].finding
    assert (finding.kind, finding.doubt, finding.slow) == ("unsure", "few steps", [])


@pytest.mark.parametrize("ranks, steps", [(2, 20), (2, 5), (4, 10)])
def test_equal_ranks_raise_no_alarm(ranks: int, steps: int) -> None:
    """In 40 runs at most 2 (5 %): a word other than "equal", or "unsure" where the steps are few."""
    kinds: Counter[str] = Counter()
    for seed in range(40):
        kinds[found(ranks, [], steps=steps, noise=0.15, seed=seed)[0].finding.kind] += 1
    assert 40 - kinds["equal"] - kinds["unsure"] <= 2
    assert kinds["unsure"] <= 6


def test_several_slow_ranks_are_found_though_mending_one_saves_nothing() -> None:
    said, _ = found(4, [(1, "forward", 0.03), (3, "forward", 0.028)])
    finding = said.finding
    assert (finding.kind, finding.rank, finding.host, finding.phase) == ("several", None, "here", "forward")
    assert slow_in(finding) == pytest.approx({(1, "forward"): 30.0, (3, "forward"): 28.0}, rel=0.02)
    assert finding.others_wait_s == pytest.approx(0.029, rel=0.1)  # those two, not the mean of three
    assert finding.saves_s == pytest.approx(0.03, rel=0.05)
    assert finding.excess_s == pytest.approx(0.029, rel=0.02)
    # Ranks that are slow together in two phases and of two hosts.
    delays: Delays = [(rank, part, 0.02) for rank in (0, 5) for part in ("forward", "backward")]
    finding = found(8, delays, SHARDED, hosts=["a"] * 4 + ["b"] * 4)[0].finding
    assert (finding.kind, finding.host, finding.phase) == ("several", None, None)
    assert set(slow_in(finding)) == {(rank, part) for rank in (0, 5) for part in ("forward", "backward")}
    assert finding.saves_s == pytest.approx(0.04, rel=0.05)
    # Half of many ranks.
    work_s = usual(64, 12, 0.02)
    work_s["data"][::2] += 0.03
    said = ranks_of(simulate(work_s).timelines, 64, overlap=True)
    assert {one.rank for one in said.finding.slow} == set(range(0, 64, 2))
    assert said.finding.slow_ranks == 32


def late_between(between_s: Any) -> Ranks:
    """What is said of four ranks that work so long between the steps, before the first of which nobody looked."""
    program = [("work", "zero_grad", 1.0), *DDP]
    slow = simulate({**usual(4, 20, 0.02), "zero_grad": between_s}, program)
    return ranks_of([outside(each) for each in slow.timelines], 4, overlap=True)


def test_a_rank_that_is_late_from_between_the_steps() -> None:
    """Rank 3 validates longer, say, by 50 ms each of 19 times: the others wait for it in the step that follows."""
    said = late_between(np.repeat([[0.0], [0.0], [0.0], [0.05]], 20, axis=1))
    finding = said.finding
    assert (finding.kind, finding.rank, finding.phase) == ("straggler", 3, "between steps")
    assert finding.excess_s == pytest.approx(0.0475)
    assert finding.saves_s == pytest.approx(0.0475, rel=0.02)
    assert sum(said.by_rank[0].waiting_s.values()) == pytest.approx(0.0475, rel=0.1)
    assert late_between(np.full((4, 20), 0.05)).finding.kind == "equal"
    # A rank that is late from between a few steps.
    finding = late_between(np.where(np.arange(20) % 5 == 0, [[0.0], [0.0], [0.0], [0.25]], 0.0)).finding
    assert (finding.kind, finding.rank, finding.phase, finding.doubt) == ("unsure", 3, "between steps", "chance")


def outside(timeline: RankTimeline) -> RankTimeline:
    """Without the first part of each step, which lies before it."""
    first = timeline.first[:-1]
    keep = np.ones(len(timeline.codes), dtype=bool)
    keep[first] = False
    return replace(
        timeline,
        first=timeline.first - np.arange(len(timeline.first)),
        codes=timeline.codes[keep],
        host_ns=timeline.host_ns[keep],
    )

"""On a shared machine a rank is named for what other programs cannot have made, and for nothing else."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_environment import made_contention
from simulated_ranks import BASE_S, DDP, SHARDED, simulate, usual_work_s

from lm_profiler.analysis.ranks.rank_timeline import RankTimeline
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.record.run_record import Contention, RankFinding, Ranks, StepCounters


def contention_of(not_had: float) -> Contention:
    return made_contention(not_had, wall_s=9.0, had_s=9.0, waited_s=1.0, others_s=1.0)


def finding_of(not_had: float, lost_s: tuple[float, float], asleep_s: float, threads_s: float = 0.0) -> RankFinding:
    """Return the finding about two ranks of which the second is 26 ms late in data.

    Each loses ``lost_s`` of CPU time per step. The second sleeps for ``asleep_s``; its threads run for ``threads_s``.
    """
    work_s = usual_work_s(ranks=2, steps=20, noise=0.02)
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
    found = ranks_of(timelines, 2, overlap=True, contention=contention_of(not_had), counters=counters)
    return found.finding


def test_on_a_busy_machine_a_sleeping_rank_is_named() -> None:
    finding = finding_of(not_had=0.79, lost_s=(0.03, 0.03), asleep_s=0.026)
    assert (finding.kind, finding.rank, finding.phase, finding.slow[0].certain) == ("straggler", 1, "data", True)
    assert finding.saves_s == pytest.approx(0.026, rel=0.02)


def test_on_a_busy_machine_a_rank_that_waited_for_a_cpu_is_not_named() -> None:
    finding = finding_of(not_had=0.79, lost_s=(0.03, 0.056), asleep_s=0.0)
    assert (finding.kind, finding.doubt, finding.saves_s) == ("unsure", "shared machine", None)
    (slow,) = finding.slow
    assert (slow.rank, slow.phase, slow.certain) == (1, "data", False)


def test_on_a_busy_machine_a_rank_that_runs_longer_is_not_named() -> None:
    """Shared caches and cores make a rank run longer, by at most the share that others had of them."""
    assert finding_of(not_had=0.79, lost_s=(0.01, 0.01), asleep_s=0.0).doubt == "shared machine"
    assert finding_of(not_had=0.06, lost_s=(0.01, 0.01), asleep_s=0.0).kind == "straggler"
    # It sleeps, but while its own threads want a CPU.
    assert finding_of(not_had=0.5, lost_s=(0.0, 0.0), asleep_s=0.026, threads_s=0.05).doubt == "shared machine"


@pytest.mark.parametrize("not_had, kind", [(0.3, "unsure"), (0.01, "straggler")], ids=["busy", "idle"])
def test_without_counters_a_rank_is_named_only_on_an_idle_machine(not_had: float, kind: str) -> None:
    work_s = usual_work_s(ranks=2, steps=20, noise=0.02)
    work_s["data"][1] += 0.026
    found = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention_of(not_had))
    assert found.finding.kind == kind


def test_ranks_that_stop_in_turns_on_a_busy_machine_are_not_named() -> None:
    """Other programs may have stopped them."""
    work_s = usual_work_s(ranks=2, steps=20, noise=0.02)
    work_s["forward"][0, ::2] += 0.03
    work_s["forward"][1, 1::2] += 0.03
    found = ranks_of(simulate(work_s).timelines, 2, overlap=True, contention=contention_of(not_had=0.3))
    assert (found.finding.kind, found.finding.doubt, found.finding.phase) == ("unsure", "shared machine", "forward")


Delays = list[tuple[int, str, Any]]


def simulate_delays(
    ranks: int,
    delays: Delays,
    program: list[Any] = DDP,
    steps: int = 20,
    hosts: list[str] | None = None,
    noise: float = 0.02,
    seed: int = 1,
) -> tuple[Ranks, float]:
    """Return what is found of ranks with such delays, and by how much the first of them really prolongs a step."""
    work_s, mended_s = usual_work_s(ranks, steps, noise, seed), usual_work_s(ranks, steps, noise, seed)
    for index, (rank, part, delay_s) in enumerate(delays):
        work_s[part][rank] += delay_s
        mended_s[part][rank] += delay_s if index else 0.0
    truth = simulate(work_s, program, hosts)
    ranks_found = ranks_of(truth.timelines, ranks, overlap=program is not SHARDED)
    return ranks_found, truth.step_s - simulate(mended_s, program, hosts).step_s


def assert_saving_is(finding: RankFinding, truth_s: float) -> None:
    assert finding.saves_s == pytest.approx(truth_s, rel=0.02)
    assert finding.low_s - 2e-4 <= truth_s <= finding.high_s + 2e-4


@pytest.mark.parametrize("program", [DDP, SHARDED], ids=["DDP", "sharded"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", list(BASE_S))
def test_a_straggler_is_named_with_its_phase_and_its_cost(part: str, ranks: int, program: list[Any]) -> None:
    ranks_found, truth_s = simulate_delays(ranks, [(1, part, 0.03)], program)
    finding = ranks_found.finding
    assert (finding.kind, finding.rank, finding.phase, finding.host) == ("straggler", 1, part, "here")
    assert finding.last_in >= 19  # the last step's optimizer nobody waits for
    assert finding.excess_s == pytest.approx(0.03, rel=0.05)
    assert finding.others_wait_s == pytest.approx(0.03, rel=0.1)
    assert_saving_is(finding, truth_s)


def certain_delays_ms(finding: RankFinding) -> dict[tuple[int, str], float]:
    """Milliseconds that each rank takes longer in each phase, of those that are certain."""
    return {(delay.rank, delay.phase): delay.excess_s * 1e3 for delay in finding.slow if delay.certain}


@pytest.mark.parametrize("first, last", [(1, 10), (11, 20), (6, 15), (16, 20)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_slow_in_a_stretch_of_the_steps(first: int, last: int, ranks: int) -> None:
    late = np.where((np.arange(20) + 1 >= first) & (np.arange(20) < last), 0.0144, 0.0)
    ranks_found, truth_s = simulate_delays(ranks, [(1, "forward", late)])
    (delay,) = ranks_found.finding.slow
    assert (delay.rank, delay.phase, delay.certain) == (1, "forward", True)
    assert (delay.first_step, delay.last_step) == (first, last)
    assert delay.excess_s == pytest.approx(late.mean(), rel=0.05)
    assert_saving_is(ranks_found.finding, truth_s)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_slow_in_turns(ranks: int) -> None:
    turns: Delays = [(r, "forward", np.where(np.arange(20) % ranks == r, 0.03, 0.0)) for r in range(ranks)]
    finding = simulate_delays(ranks, turns)[0].finding
    assert (finding.kind, finding.rank, finding.phase) == ("turns", None, "forward")
    assert finding.saves_s == pytest.approx(0.03, rel=0.05)


def test_a_host_whose_ranks_are_all_slower_is_named() -> None:
    hosts = ["a", "a", "b", "b"]
    ranks_found, _ = simulate_delays(4, [(2, "forward", 0.03), (3, "forward", 0.03)], hosts=hosts)
    finding = ranks_found.finding
    assert (finding.kind, finding.host, finding.rank, finding.phase) == ("host", "b", None, "forward")
    assert finding.saves_s == pytest.approx(0.0295, rel=0.03)
    one, _ = simulate_delays(4, [(2, "forward", 0.03)], hosts=hosts)
    assert (one.finding.kind, one.finding.rank, one.finding.host) == ("straggler", 2, "b")
    # The ranks of a host are waited for by the others alone.
    ranks_found, _ = simulate_delays(4, [(2, "forward", 0.03), (3, "forward", 0.03)], hosts=["a", "a", "b", "b"])
    assert ranks_found.finding.others_wait_s == pytest.approx(0.03, rel=0.1)


def test_a_rank_that_is_slower_in_several_phases_has_no_single_phase() -> None:
    delays: Delays = [(2, "forward", 0.01), (2, "backward", 0.02), (2, "optimizer", 0.004)]
    finding = simulate_delays(4, delays)[0].finding
    assert (finding.kind, finding.rank, finding.phase) == ("straggler", 2, None)
    assert finding.saves_s == pytest.approx(0.033, rel=0.05)
    expected = {(2, "forward"): 10.0, (2, "backward"): 20.0, (2, "optimizer"): 4.0}
    assert certain_delays_ms(finding) == pytest.approx(expected, rel=0.05)


def test_a_phase_that_adds_a_millisecond_is_not_named() -> None:
    delays: Delays = [(2, "forward", 0.01), (2, "backward", 0.02), (2, "optimizer", 0.001)]
    assert set(certain_delays_ms(simulate_delays(4, delays)[0].finding)) == {(2, "forward"), (2, "backward")}


def test_two_steps_are_too_few_for_a_finding() -> None:
    finding = simulate_delays(2, [(1, "data", 0.03)], steps=2)[0].finding
    assert (finding.kind, finding.doubt, finding.slow) == ("unsure", "few steps", [])


@pytest.mark.parametrize("ranks, steps", [(2, 20), (2, 5), (4, 10)])
def test_equal_ranks_raise_no_alarm(ranks: int, steps: int) -> None:
    """In 40 runs at most 2 (5 %): a word other than "equal", or "unsure" where the steps are few."""
    kinds: Counter[str] = Counter()
    for seed in range(40):
        kinds[simulate_delays(ranks, [], steps=steps, noise=0.15, seed=seed)[0].finding.kind] += 1
    assert 40 - kinds["equal"] - kinds["unsure"] <= 2
    assert kinds["unsure"] <= 6


def test_two_slow_ranks_are_both_named() -> None:
    ranks_found, _ = simulate_delays(4, [(1, "forward", 0.03), (3, "forward", 0.028)])
    finding = ranks_found.finding
    assert (finding.kind, finding.rank, finding.host, finding.phase) == ("several", None, "here", "forward")
    assert certain_delays_ms(finding) == pytest.approx({(1, "forward"): 30.0, (3, "forward"): 28.0}, rel=0.02)
    assert finding.others_wait_s == pytest.approx(0.029, rel=0.1)  # those two, not the mean of three
    assert finding.saves_s == pytest.approx(0.03, rel=0.05)
    assert finding.excess_s == pytest.approx(0.029, rel=0.02)


def test_slow_ranks_of_two_hosts_and_two_phases_are_named() -> None:
    delays: Delays = [(rank, part, 0.02) for rank in (0, 5) for part in ("forward", "backward")]
    finding = simulate_delays(8, delays, SHARDED, hosts=["a"] * 4 + ["b"] * 4)[0].finding
    assert (finding.kind, finding.host, finding.phase) == ("several", None, None)
    assert set(certain_delays_ms(finding)) == {(rank, part) for rank in (0, 5) for part in ("forward", "backward")}
    assert finding.saves_s == pytest.approx(0.04, rel=0.05)


def test_half_of_64_ranks_are_named() -> None:
    work_s = usual_work_s(ranks=64, steps=12, noise=0.02)
    work_s["data"][::2] += 0.03
    ranks_found = ranks_of(simulate(work_s).timelines, 64, overlap=True)
    assert {delay.rank for delay in ranks_found.finding.slow} == set(range(0, 64, 2))
    assert ranks_found.finding.slow_ranks == 32


def ranks_with_gaps(between_s: Any) -> Ranks:
    """Return what is found of four ranks that work so long between the steps; the first gap was not observed."""
    program = [("work", "zero_grad", 1.0), *DDP]
    slow = simulate({**usual_work_s(ranks=4, steps=20, noise=0.02), "zero_grad": between_s}, program)
    return ranks_of([without_first_parts(timeline) for timeline in slow.timelines], 4, overlap=True)


def test_a_rank_that_is_late_after_each_gap_between_steps_is_named() -> None:
    """Rank 3 validates 50 ms longer in each of 19 gaps between 20 steps; the others wait in the step that follows."""
    ranks_found = ranks_with_gaps(np.repeat([[0.0], [0.0], [0.0], [0.05]], 20, axis=1))
    finding = ranks_found.finding
    assert (finding.kind, finding.rank, finding.phase) == ("straggler", 3, "between steps")
    excess_s = 0.05 * 19 / 20
    assert finding.excess_s == pytest.approx(excess_s)
    assert finding.saves_s == pytest.approx(excess_s, rel=0.02)
    assert sum(ranks_found.by_rank[0].waiting_s.values()) == pytest.approx(excess_s, rel=0.1)
    assert ranks_with_gaps(np.full((4, 20), 0.05)).finding.kind == "equal"


def test_a_rank_that_is_late_after_a_few_gaps_may_be_chance() -> None:
    finding = ranks_with_gaps(np.where(np.arange(20) % 5 == 0, [[0.0], [0.0], [0.0], [0.25]], 0.0)).finding
    assert (finding.kind, finding.rank, finding.phase, finding.doubt) == ("unsure", 3, "between steps", "chance")


def without_first_parts(timeline: RankTimeline) -> RankTimeline:
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

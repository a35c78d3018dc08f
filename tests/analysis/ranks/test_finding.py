"""For whom the others wait, and what mending it saves: the simulation is run again without the delay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated_ranks import ACCUMULATED, BASE_S, DDP, SHARDED, simulate, usual

from lm_profiler.analysis.ranks.summary import ranks_of
from lm_profiler.analysis.ranks.timeline import RankTimeline
from lm_profiler.record.run import RankFinding, Ranks

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
    assert said is not None
    return said, truth.step_s - simulate(mended_s, program, hosts).step_s


def within(finding: RankFinding, truth_s: float) -> None:
    assert finding.saves_s is not None
    assert finding.low_s is not None
    assert finding.high_s is not None
    assert finding.saves_s == pytest.approx(truth_s, rel=0.02)
    assert finding.low_s - 2e-4 <= truth_s <= finding.high_s + 2e-4


@pytest.mark.parametrize("program", [DDP, SHARDED], ids=["DDP", "sharded"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", list(BASE_S))
def test_the_rank_the_phase_and_what_mending_it_saves(part: str, ranks: int, program: list[Any]) -> None:
    said, truth_s = found(ranks, [(1, part, 0.03)], program)
    finding = said.finding
    assert (finding.kind, finding.rank, finding.phase, finding.host) == ("straggler", 1, part, "here")
    assert finding.last_in is not None
    assert finding.last_in >= 19  # the last step's optimizer nobody waits for
    assert finding.excess_s == pytest.approx(0.03, rel=0.05)
    assert finding.others_wait_s == pytest.approx(0.03, rel=0.1)
    within(finding, truth_s)


def test_of_two_slow_ranks_the_one_whose_mending_saves_more() -> None:
    """Rank 1 loads 30 ms longer; its broadcast waits for that, and then rank 0's forward is 20 ms longer."""
    said, truth_s = found(2, [(1, "data", 0.03), (0, "forward", 0.02)])
    assert (said.finding.rank, said.finding.phase) == (1, "data")
    within(said.finding, truth_s)


def test_what_another_slow_rank_takes_as_long_for_is_not_saved() -> None:
    """Without a meeting between, only what is beyond the other's delay is won."""
    alone = [op for op in DDP if op[1] != "gloo:broadcast"]
    said, truth_s = found(2, [(1, "data", 0.03), (0, "forward", 0.02)], alone)
    assert (said.finding.rank, said.finding.phase) == (1, "data")
    assert truth_s == pytest.approx(0.01, abs=0.001)
    within(said.finding, truth_s)


def test_every_batch_of_an_accumulated_step() -> None:
    said, truth_s = found(2, [(1, "forward", 0.12)], ACCUMULATED)
    assert (said.finding.rank, said.finding.phase) == (1, "forward")
    within(said.finding, truth_s)


def test_what_happens_every_fifth_step_counts_though_medians_do_not_show_it() -> None:
    now_and_then = np.where(np.arange(60) % 5 == 0, 0.1, 0.0)
    said, truth_s = found(2, [(1, "data", now_and_then)], steps=60)
    assert (said.finding.kind, said.finding.rank) == ("straggler", 1)
    assert truth_s == pytest.approx(0.02, rel=0.01)
    within(said.finding, truth_s)
    few, _ = found(2, [(1, "data", now_and_then[:10])], steps=10)
    assert few.finding.kind == "unsure"
    assert few.finding.evidence == "rank 1 was slow in data in some steps; too few steps (10) to say whether by chance"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_slow_in_turns(ranks: int) -> None:
    turns: Delays = [(r, "forward", np.where(np.arange(20) % ranks == r, 0.03, 0.0)) for r in range(ranks)]
    finding = found(ranks, turns)[0].finding
    assert (finding.kind, finding.rank, finding.phase) == ("turns", None, "forward")
    assert finding.saves_s == pytest.approx(0.03, rel=0.05)


def test_a_host_whose_ranks_are_all_slower() -> None:
    hosts = ["a", "a", "b", "b"]
    said, _ = found(4, [(2, "forward", 0.03), (3, "forward", 0.03)], hosts=hosts)
    finding = said.finding
    assert (finding.kind, finding.host, finding.rank, finding.phase) == ("host", "b", None, "forward")
    assert finding.saves_s == pytest.approx(0.0295, rel=0.03)
    one, _ = found(4, [(2, "forward", 0.03)], hosts=hosts)
    assert (one.finding.kind, one.finding.rank, one.finding.host) == ("straggler", 2, "b")


def test_a_rank_that_is_slower_in_everything() -> None:
    delays: Delays = [(2, "forward", 0.01), (2, "backward", 0.02), (2, "optimizer", 0.004)]
    finding = found(4, delays)[0].finding
    assert (finding.kind, finding.rank, finding.phase) == ("straggler", 2, None)
    assert finding.saves_s == pytest.approx(0.033, rel=0.05)
    assert "forward, backward, optimizer" in finding.evidence


def test_the_sentence_has_all_that_one_needs() -> None:
    finding = found(2, [(1, "data", 0.03)])[0].finding
    start = "rank 1 is 30.0 ms slower in data than the median of the others; the other ranks wait 30."
    assert finding.evidence.startswith(start)
    assert "mending it would save 29.9 ms a step [29." in finding.evidence
    assert finding.evidence.endswith("last in 20 of 20 steps")


def test_two_steps_say_nothing() -> None:
    assert found(2, [(1, "data", 0.03)], steps=2)[0].finding.kind == "unsure"


@pytest.mark.parametrize("noise", [0.02, 0.15])
@pytest.mark.parametrize("ranks, steps", [(2, 20), (2, 5), (4, 10)])
def test_equal_ranks_raise_no_alarm(ranks: int, steps: int, noise: float) -> None:
    """In 60 runs at most 3 (5 %): a word other than "equal", or "unsure" where the steps are few."""
    kinds: Counter[str] = Counter()
    for seed in range(60):
        kinds[found(ranks, [], steps=steps, noise=noise, seed=seed)[0].finding.kind] += 1
    assert 60 - kinds["equal"] - kinds["unsure"] <= 3
    assert kinds["unsure"] <= 6


def test_ranks_that_are_slow_together_are_found_though_mending_one_of_them_saves_nothing() -> None:
    said, _ = found(4, [(1, "forward", 0.03), (3, "forward", 0.028)])
    finding = said.finding
    assert (finding.kind, finding.rank, finding.host, finding.phase) == ("several", None, "here", "forward")
    assert finding.evidence.startswith("ranks 1, 3 are 29.0 ms slower in forward than the median of the others")
    assert finding.others_wait_s == pytest.approx(0.029, rel=0.1)  # those two, not the mean of three
    assert finding.saves_s == pytest.approx(0.03, rel=0.05)
    assert finding.excess_s == pytest.approx(0.029, rel=0.02)


def test_ranks_that_are_slow_together_in_two_phases_and_of_two_hosts() -> None:
    delays: Delays = [(rank, part, 0.02) for rank in (0, 5) for part in ("forward", "backward")]
    finding = found(8, delays, SHARDED, hosts=["a"] * 4 + ["b"] * 4)[0].finding
    assert (finding.kind, finding.host, finding.phase) == ("several", None, None)
    assert "ranks 0, 5 (hosts a, b) are 39.9 ms slower in forward, backward than" in finding.evidence
    assert finding.saves_s == pytest.approx(0.04, rel=0.05)


def test_half_of_many_ranks_are_counted_and_not_listed() -> None:
    work_s = usual(64, 12, 0.02)
    work_s["data"][::2] += 0.03
    said = ranks_of(simulate(work_s).timelines, 64, overlap=True)
    assert said is not None
    assert said.finding.evidence.startswith("32 of 64 ranks, 0 the first, are 30.")


def test_the_ranks_of_a_host_are_waited_for_by_the_others_alone() -> None:
    said, _ = found(4, [(2, "forward", 0.03), (3, "forward", 0.03)], hosts=["a", "a", "b", "b"])
    assert said.finding.others_wait_s == pytest.approx(0.03, rel=0.1)


def test_who_is_late_from_between_the_steps_is_told() -> None:
    """Rank 3 validates longer, say, by 50 ms each of 19 times: the others wait for it in the step that follows."""
    program = [("work", "zero_grad", 1.0), *DDP]
    between_s = np.repeat([[0.0], [0.0], [0.0], [0.05]], 20, axis=1)
    slow = simulate({**usual(4, 20, 0.02), "zero_grad": between_s}, program)
    said = ranks_of([outside(each) for each in slow.timelines], 4, overlap=True)
    assert said is not None
    assert said.finding.kind == "equal"
    told = "between the steps (validation, checkpoints, an epoch's end) rank 3 took 47.5 ms a step longer"
    assert told in said.finding.evidence
    assert "between" not in found(4, [])[0].finding.evidence


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

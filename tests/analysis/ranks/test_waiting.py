"""Own work and waiting, against simulated ranks of which both are known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated_ranks import ACCUMULATED, CALL_S, DDP, SHARDED, VALIDATED, simulate, usual_work_s

from lm_profiler.analysis.ranks.rank_timeline import OUTSIDE, Collective, RankTimeline
from lm_profiler.analysis.ranks.waiting import RanksWork, work_of
from lm_profiler.record.parts import PARTS

NANOSECONDS = 1e-7
"""Instants are rounded."""

OF_A_TREE = 8.1 * CALL_S
"""Of a broadcast that does not hold a rank, the call's own time counts as waiting: two in each of four batches."""


def own_work_s(work: RanksWork) -> Any:
    """Of the parts of a step."""
    return work.own_s[:, :, :OUTSIDE]


@pytest.mark.parametrize("program", [DDP, ACCUMULATED, SHARDED], ids=["DDP", "accumulated", "sharded"])
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "other"])
def test_own_work_and_waiting_are_the_simulated_ones(program: list[Any], ranks: int, part: str) -> None:
    work_s = usual_work_s(ranks=ranks, steps=12, noise=0.05, seed=ranks)
    work_s[part][1] += 0.03
    truth = simulate(work_s, program)
    work = work_of(truth.timelines, truth.timelines[0].steps, overlap=program is not SHARDED)
    off_s = NANOSECONDS if ranks == 2 else OF_A_TREE
    np.testing.assert_allclose(own_work_s(work), truth.own_s, atol=off_s)
    np.testing.assert_allclose(work.waiting_s, truth.waiting_s, atol=off_s)


def test_validation_is_own_work() -> None:
    """The other rank waits for it in a barrier, which is no part of a step either."""
    work_s = usual_work_s(ranks=2, steps=12, noise=0.05)
    work_s["validation"] = np.full((2, 12), 0.02)
    work_s["validation"][1] += 0.03
    truth = simulate(work_s, VALIDATED)
    work = work_of(truth.timelines, truth.timelines[0].steps, overlap=True)
    np.testing.assert_allclose(own_work_s(work), truth.own_s, atol=NANOSECONDS)
    np.testing.assert_allclose(work.own_s[:, :, OUTSIDE], truth.validation_s, atol=NANOSECONDS)
    assert work.waiting_outside_s[0] == pytest.approx(0.03, rel=0.2)


def test_only_the_steps_that_are_asked_for_are_compared() -> None:
    truth = simulate(usual_work_s(ranks=2, steps=12, noise=0.05))
    work = work_of(truth.timelines, np.array([3, 4, 7], dtype=np.int64), overlap=True)
    np.testing.assert_allclose(own_work_s(work), truth.own_s[:, [2, 3, 6]], atol=NANOSECONDS)


def test_a_call_that_a_rank_lacks_spoils_no_other_step() -> None:
    """The last one, of the third step."""
    truth = simulate(usual_work_s(ranks=2, steps=3))
    first, second = truth.timelines
    shorter = replace(second, collectives=second.collectives[:-1], arrivals_ns=second.arrivals_ns[:-1])
    work = work_of([first, shorter], first.steps, overlap=True)
    np.testing.assert_allclose(own_work_s(work)[:, :2], truth.own_s[:, :2], atol=NANOSECONDS)


def test_calls_hold_the_ranks_of_their_group() -> None:
    """Each pair of four ranks is sharded among itself."""
    work_s = usual_work_s(ranks=4, steps=12, noise=0.05)
    work_s["forward"][2] += 0.03
    truth = simulate(work_s, SHARDED, groups=2)
    work = work_of(truth.timelines, truth.timelines[0].steps, overlap=False)
    np.testing.assert_allclose(own_work_s(work), truth.own_s, atol=OF_A_TREE)
    np.testing.assert_allclose(work.waiting_s, truth.waiting_s, atol=OF_A_TREE)


def test_ranks_that_go_on_before_the_last_arrival_do_not_wait() -> None:
    asynchronous = []
    for operation in DDP:
        is_call = operation[0] == "call"
        asynchronous.append(("call", "gloo:all_reduce", "nobody") if is_call else operation)
    work_s = usual_work_s(ranks=2, steps=12)
    work_s["forward"][1] += 0.03
    truth = simulate(work_s, asynchronous)
    work = work_of(truth.timelines, truth.timelines[0].steps, overlap=False)
    assert work.waiting_s.max() == 0.0


def test_a_rank_for_which_others_wait_is_the_cause_alone() -> None:
    """Of four, rank 2 loads longer: rank 0 waits for it in the broadcast, the others for rank 0 at the gradients."""
    work_s = usual_work_s(ranks=4, steps=12, noise=0.02)
    work_s["data"][2] += 0.03
    truth = simulate(work_s)
    caused_s = work_of(truth.timelines, truth.timelines[0].steps, overlap=True).caused_s
    assert caused_s[2] == pytest.approx(0.03, rel=0.1)
    assert np.delete(caused_s, 2, axis=0).max() < 0.004


def timeline_of_step(rank: int, begins_ms: dict[str, float], calls_ms: list[tuple[float, float]]) -> RankTimeline:
    """One step, whose parts begin so; of each call when it came, and how long it waited inside of it."""
    return RankTimeline(
        rank,
        "here",
        np.array([1]),
        np.array([0, len(begins_ms)]),
        np.array([PARTS.index(part) for part in begins_ms], dtype=np.uint8),
        np.array([round(begin_ms * 1e6) for begin_ms in begins_ms.values()]),
        np.array([round(came_ms * 1e6) for came_ms, _ in calls_ms]),
        [Collective("0", number, "nccl:all_reduce") for number in range(len(calls_ms))],
        "here",
        np.array([round(waited_ms * 1e6) for _, waited_ms in calls_ms]),
    )


def test_waiting_on_a_stream_counts_unless_hidden() -> None:
    """Rank 1 came 30 ms later. Rank 0's first bucket waits all of it, but while it computes for 20; its last bucket
    stands behind that one, and waits for rank 1's again."""
    fast = timeline_of_step(0, {"forward": 0, "backward": 5, "optimizer": 60, "other": 65}, [(10, 30), (30, 20)])
    slow = timeline_of_step(1, {"forward": 0, "backward": 35, "optimizer": 60, "other": 65}, [(40, 0), (60, 0)])
    work = work_of([fast, slow], np.array([1]), overlap=True)
    backward = PARTS.index("backward")
    assert work.waiting_s[0, 0, backward] == pytest.approx(0.030)
    assert own_work_s(work)[0, 0, backward] == pytest.approx(0.060 - 0.005 - 0.030)
    assert work.waiting_s[1].sum() == 0.0

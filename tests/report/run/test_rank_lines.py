"""Several ranks: each phase's own work and waiting in the table, and one line for whom the others wait."""

from __future__ import annotations

from typing import Any

import pytest
from made_ranks import made_ranks
from made_runs import made_record

from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run import Floor, RankFinding, Ranks, SlowRank
from lm_profiler.report.run.rank_lines import ranks_lines, who_waits
from lm_profiler.report.run.run_page import time_table


def lines(ranks: Ranks | None) -> list[str]:
    return ranks_lines(made_record(ranks=ranks))


def texts(**options: Any) -> list[list[str]]:
    return [[cell.text for cell in row] for row in time_table(made_record(**options)).rows]


def test_the_table_has_own_work_and_a_row_for_waiting() -> None:
    assert texts(ranks=made_ranks(world=4, slow=2)) == [
        ["data", "5.00", "5.3%", "5.00", "35.0", "2"],
        ["forward", "20.0", "21.1%", "20.0", "20.0", ""],
        ["backward", "30.0", "31.6%", "30.0", "30.0", ""],
        ["optimizer", "10.0", "10.5%", "10.0", "10.0", ""],
        ["waiting", "30.0", "31.6%", "0.000", "30.0", "0"],
        ["step", "95.0", "", "", "", ""],
    ]


def test_the_step_keeps_its_interval_and_a_floor_is_held_against_own_work() -> None:
    floors = {"forward": Floor(seconds=4e-3, bound="compute", times=99.0)}
    table = time_table(made_record(ranks=made_ranks(), floors=floors))
    assert [cell.text for cell in table.rows[1]][-2:] == ["4.000 FLOPs", "5.0"]
    assert table.below[0] == "step: 10.00 [9.99, 10.01] ms, std 0.02, CV 0.2%, median 10.00, p95 10.03"


def test_a_line_says_for_whom_the_others_wait() -> None:
    assert lines(made_ranks(world=2))[0] == (
        "ranks: rank 1 is 30.0 ms slower in data; the others wait 30.0 ms a step for it; "
        "mending it would save 29.0 ms a step [28.0, 30.0]; last in 20 of 20 steps"
    )
    said = lines(made_ranks(finding=RankFinding(kind="of a later version")))[0]
    assert said == "ranks: the mean rank waits 15.0 of 95.0 ms a step"


def slow(rank: int, phase: str, host: str = "node0", **facts: Any) -> SlowRank:
    known: dict[str, Any] = {"excess_s": 0.02, "low_s": None, "high_s": None, "first_step": 6, "last_step": 25}
    return SlowRank(rank=rank, phase=phase, host=host, **{"certain": True, **known, **facts})


def several(*its: SlowRank, kind: str = "several", **facts: Any) -> RankFinding:
    ranks = len({one.rank for one in its})
    return RankFinding(kind=kind, slow=list(its), slow_ranks=ranks, saves_s=0.02, steps=20, **facts)


@pytest.mark.parametrize(
    "finding, start",
    [
        (several(slow(0, "data"), slow(2, "data")), "ranks 0, 2 are 20.0 ms slower in data; mending them"),
        (
            several(slow(0, "data"), slow(1, "forward", first_step=16)),
            "rank 0 is 20.0 ms slower in data; rank 1 is 20.0 ms slower in forward (steps 16 to 25); mending them",
        ),
        (
            several(slow(1, "backward"), slow(1, "forward"), kind="straggler"),
            "rank 1 is 40.0 ms slower in forward, backward; mending it",
        ),
        (several(slow(1, "between steps"), kind="straggler"), "rank 1 is 20.0 ms slower between steps; mending it"),
        (several(*(slow(rank, "data") for rank in range(0, 40, 2))), "20 of 64 ranks, 0 the first, are 20.0 ms slower"),
        (
            RankFinding(kind="unsure", slow=[slow(1, "data", certain=False)], doubt="shared machine", steps=20),
            "rank 1 is 20.0 ms slower in data, which other programs on this machine may have done; the mean rank waits",
        ),
        (
            RankFinding(kind="unsure", rank=1, phase="data", doubt="chance", steps=20),
            "rank 1 is slow in data in some steps, perhaps by chance; the mean rank",
        ),
        (RankFinding(kind="unsure", steps=2), "who waits for whom is unknown: too few steps (2) to be sure; the mean"),
        (
            RankFinding(kind="straggler", rank=1, phase="data", excess_s=0.03, saves_s=0.029, last_in=9),
            "rank 1: 30.0 ms slower in data; mending it would save 29.0 ms a step; last in 9 of 20 steps",
        ),
    ],
)
def test_who_is_named(finding: RankFinding, start: str) -> None:
    ranks = made_ranks(world=64, finding=finding)
    assert who_waits(ranks.model_copy(update={"hosts": {"node0": list(range(64))}})).startswith(start)


def test_ranks_of_several_hosts() -> None:
    host = several(*(slow(rank, "data", "node1") for rank in range(8, 16)), kind="host", host="node1")
    assert who_waits(made_ranks(world=16, finding=host)).startswith(
        "the ranks of host node1 are 20.0 ms slower in data"
    )
    two = several(slow(0, "data"), slow(8, "data", "node1"))
    assert who_waits(made_ranks(world=16, finding=two)).startswith("ranks 0, 8 (hosts node0, node1) are 20.0 ms slower")


def test_exposed_communication_and_what_one_must_know_of_it() -> None:
    assert lines(made_ranks(notes=["the ring was short"]))[1:] == [
        "exposed communication: backward 3.20 ms a step (DDP’s own timings)",
        "note: the ring was short",
    ]
    assert lines(None) == []


def test_the_figures_are_columns_of_report() -> None:
    record = made_record(ranks=made_ranks(world=4))
    for name, value in {
        "waiting_s": 22.5e-3,
        "own_work_s": 72.5e-3,
        "slow_rank": 1,
        "data_own_largest_s": 35e-3,
    }.items():
        assert QUANTITIES[name].get(record) == pytest.approx(value)
    assert QUANTITIES["mending_saves_s"].interval(record) == pytest.approx((28e-3, 30e-3))

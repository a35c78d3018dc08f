"""Several ranks: each phase's own work and waiting in the table, and one line for whom the others wait."""

from typing import Any

import pytest
from made_ranks import made_ranks
from made_runs import made_record
from stored_texts import assert_stored

from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run_record import CodePart, Floor, RankFinding, Ranks, SlowRank
from lm_profiler.report.run.rank_lines import ranks_lines
from lm_profiler.report.run.run_page import time_table


def texts(**options: Any) -> list[list[str]]:
    return [[cell.text for cell in row] for row in time_table(made_record(**options)).rows]


def test_the_table_has_rows_for_own_work_and_waiting() -> None:
    assert texts(ranks=made_ranks(world=4, slow=2)) == [
        ["data", "5.000", "5.3%", "5.000", "35.00", "2"],
        ["forward", "20.00", "21.1%", "20.00", "20.00", ""],
        ["backward", "30.00", "31.6%", "30.00", "30.00", ""],
        ["optimizer", "10.00", "10.5%", "10.00", "10.00", ""],
        ["waiting", "30.00", "31.6%", "0.000", "30.00", "0"],
        ["step", "95.00", "", "", "", ""],
    ]
    floors = {"forward": Floor(seconds=4e-3, bound="compute", times=99.0)}
    table = time_table(made_record(ranks=made_ranks(), floors=floors))
    assert [cell.text for cell in table.rows[1]][-2:] == ["4.000 FLOPs", "5.0"]
    assert "10.00 [9.99, 10.01]" in table.below[0]


def test_a_marked_part_stands_below_its_phase() -> None:
    parts = [
        CodePart(name="loss", phase="forward", seconds=9.5e-3, calls=1),
        CodePart(name="copy", phase="transfer", seconds=1e-3, calls=1),  # no rank works in this phase
    ]
    rows = texts(ranks=made_ranks(world=4, slow=2), code_parts=parts)
    assert rows[1:3] == [
        ["forward", "20.00", "21.1%", "20.00", "20.00", ""],
        ["  loss, on rank 0", "9.500", "10.0%", "", "", ""],
    ]
    assert [row[0] for row in rows] == ["data", "forward", rows[2][0], "backward", "optimizer", "waiting", "step"]


def slow_rank(rank: int, phase: str = "data", host: str = "node0", **facts: Any) -> SlowRank:
    known: dict[str, Any] = {"excess_s": 0.02, "low_s": None, "high_s": None, "first_step": 6, "last_step": 25}
    return SlowRank(rank=rank, phase=phase, host=host, **{"certain": True, **known, **facts})


def several(*its: SlowRank, kind: str = "several", **facts: Any) -> RankFinding:
    ranks = len({finding.rank for finding in its})
    return RankFinding(kind=kind, slow=list(its), slow_ranks=ranks, saves_s=0.02, steps=20, **facts)


def of_one_host(finding: RankFinding) -> Ranks:
    return made_ranks(world=64, finding=finding, hosts={"node0": list(range(64))})


SURE = {"kind": "straggler", "rank": 1, "phase": "data", "excess_s": 0.03, "saves_s": 0.029, "last_in": 9}
CASES = {
    "one rank": made_ranks(world=2),
    "a finding of a later version": made_ranks(finding=RankFinding(kind="of a later version")),
    "two ranks": of_one_host(several(slow_rank(0, "data"), slow_rank(2, "data"))),
    "two ranks in two phases": of_one_host(several(slow_rank(0, "data"), slow_rank(1, "forward", first_step=16))),
    "one in two phases": of_one_host(several(slow_rank(1, "backward"), slow_rank(1, "forward"), kind="straggler")),
    "one between steps": of_one_host(several(slow_rank(1, "between steps"), kind="straggler")),
    "many ranks": of_one_host(several(*(slow_rank(rank, "data") for rank in range(0, 40, 2)))),
    "other programs may have done it": of_one_host(
        RankFinding(kind="unsure", slow=[slow_rank(1, "data", certain=False)], doubt="shared machine", steps=20)
    ),
    "but this may be chance": of_one_host(RankFinding(kind="unsure", rank=1, phase="data", doubt="chance", steps=20)),
    "too few steps": of_one_host(RankFinding(kind="unsure", steps=2)),
    "an earlier version's record": of_one_host(RankFinding(**SURE)),
    "a host": made_ranks(
        world=16, finding=several(*(slow_rank(r, "data", "node1") for r in range(8, 16)), kind="host", host="node1")
    ),
    "one of each of two hosts": made_ranks(world=16, finding=several(slow_rank(0), slow_rank(8, host="node1"))),
    "with a note": made_ranks(notes=["the ring was short"]),
    "no ranks": None,
}


def test_printed_findings_about_ranks() -> None:
    assert_stored("report/ranks", {case: ranks_lines(made_record(ranks=ranks)) for case, ranks in CASES.items()})
    record = made_record(ranks=made_ranks(world=4))
    for name, value in {
        "waiting_s": 22.5e-3,
        "own_work_s": 72.5e-3,
        "slow_rank": 1,
        "data_own_largest_s": 35e-3,
    }.items():
        assert QUANTITIES[name].get(record) == pytest.approx(value)
    assert QUANTITIES["mending_saves_s"].interval(record) == pytest.approx((28e-3, 30e-3))

"""Several ranks: each phase's own work and waiting in the table, and one line for whom the others wait."""

from __future__ import annotations

from typing import Any

import pytest
from made_ranks import made_ranks
from made_runs import made_record

from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run import Floor, RankFinding, Ranks, Verdict
from lm_profiler.report.run.ranks import ranks_lines
from lm_profiler.report.run.terminal import time_table


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
        "ranks: rank 1 is 30.0 ms slower in data than the median of the others; the other ranks wait 30.0 ms a step "
        "for it; mending it would save 29.0 ms a step [28.0, 30.0]; last in 20 of 20 steps"
    )
    said = lines(made_ranks(finding=RankFinding(kind="of a later version")))[0]
    assert said == "ranks: the mean rank waits 15.0 of 95.0 ms a step"


def test_exposed_communication_and_what_one_must_know_of_it() -> None:
    assert lines(made_ranks(notes=["the ring was short"]))[1:] == [
        "exposed communication: backward 3.20 ms a step (DDP’s own timings)",
        "note: the ring was short",
    ]
    assert lines(None) == []


def test_what_the_verdict_says_is_not_said_twice() -> None:
    found = made_ranks(exposed_s={})
    verdict = Verdict(bound_by=None, share=None, evidence=found.finding.evidence, advice="mend it")
    assert ranks_lines(made_record(ranks=found, verdict=verdict)) == []


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

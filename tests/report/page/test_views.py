"""What the Ranks view is told: a row a rank, how much each is above the fast ones, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_ranks import made_ranks
from made_runs import made_entry, made_record
from stored_texts import assert_stored

from lm_profiler.record.entry import Entry
from lm_profiler.report.page.views import ranks


def told(**options: Any) -> Any:
    return ranks(Entry(Path("a"), made_record(**options)))


def test_each_rank_is_held_against_the_fast_ones() -> None:
    answer = told(ranks=made_ranks(world=2, slow=1))
    assert answer["phases"] == ["data", "forward", "backward", "optimizer"]
    fast, slow = answer["rows"]
    assert fast["above"] == pytest.approx([0, 0, 0, 0])
    assert slow["above"] == pytest.approx([30e-3, 0, 0, 0])
    assert (fast["waiting"], slow["waiting"]) == pytest.approx((30e-3, 0))
    assert len(slow["by_column"]) == len(answer["columns"]) == 20
    assert sum(slow["by_column"]) / 20 == pytest.approx(30e-3, abs=1e-3)


def test_of_three_ranks_two_slow_ones_do_not_hide_each_other() -> None:
    found = made_ranks(world=3, slow=1)
    also = found.by_rank[2].model_copy(update={"own_s": {**found.by_rank[2].own_s, "forward": 40e-3}})
    answer = told(ranks=found.model_copy(update={"by_rank": [*found.by_rank[:2], also]}))
    assert [row["above"][1] for row in answer["rows"]] == pytest.approx([0, 0, 20e-3])


def test_more_slow_ranks_than_fast_ones_have_a_colour() -> None:
    fast, *others = made_ranks(world=4, slow=0).by_rank[::-1]
    rows = [fast, *(of.model_copy(update={"own_s": {**of.own_s, "data": 45e-3}}) for of in others)]
    answer = told(ranks=made_ranks(world=4).model_copy(update={"by_rank": rows}))
    assert [row["above"][0] for row in answer["rows"]] == pytest.approx([40e-3, 40e-3, 40e-3, 0])


def test_where_not_all_ranks_are_known_the_slowest_come_first_and_it_is_said() -> None:
    found = made_ranks(world=100, slow=70)
    kept = [of for of in found.by_rank if of.rank in (0, 1, 70)]
    answer = told(ranks=found.model_copy(update={"by_rank": kept}))
    assert [row["rank"] for row in answer["rows"]] == [70, 0, 1]
    assert answer["rows"][0]["above"][0] == pytest.approx(30e-3)
    assert "3 of 100 ranks" in answer["left_out"]
    assert answer["several_hosts"]


def test_a_rank_that_did_not_say_is_none_of_those_left_out() -> None:
    """Of three, the last one's clock is unknown, say."""
    found = made_ranks(world=2).model_copy(update={"world": 3})
    answer = told(ranks=found)
    assert answer["headline"].startswith("2 of")
    assert answer["left_out"] == ""
    assert answer["rows"][1]["above"] == pytest.approx([30e-3, 0, 0, 0])  # than the other one, not than both
    assert ("ranks heard", "2") in [(row[0], row[1]) for row in answer["facts"]["rows"]]


def test_a_record_without_steps_has_no_columns() -> None:
    found = made_ranks()
    rows = [of.model_copy(update={"own_by_column_s": []}) for of in found.by_rank]
    answer = told(ranks=found.model_copy(update={"by_rank": rows, "columns": []}))
    assert [row["by_column"] for row in answer["rows"]] == [[], []]


def test_a_run_without_ranks_says_why(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "a")
    said = {"one rank": str(ranks(entry)["why"])}
    assert ranks(entry).keys() == {"why"}
    assert entry.record is not None
    assert entry.record.environment is not None
    several = entry.record.environment.model_copy(update={"world_size": 2})
    assert "2 ranks" in ranks(Entry(tmp_path, made_record(environment=several)))["why"]
    said["no run"] = str(ranks(Entry(tmp_path, None))["why"])
    assert_stored("report/page_without_ranks", said)

"""What the Ranks view shows: a row a rank, how much each is above the fast ones, and what is left out."""

from pathlib import Path
from typing import Any

import pytest
from made_ranks import STEPS, made_ranks
from made_runs import made_entry, made_record
from shown import block_titled, blocks_of_kind, blocks_of_view, series_of, table_rows, text_of
from stored_texts import assert_stored

from lm_profiler.record.entry import Entry
from lm_profiler.report.views.ranks_view import excess_over_fast


def ranks_view(**options: Any) -> list[Any]:
    return blocks_of_view("ranks", Entry(Path("a"), made_record(**options)))


def shaded_percent(blocks: list[Any]) -> dict[tuple[int, int], float]:
    """How strong the shade of each cell is that has one, by row and column."""
    [table] = [table for table in blocks_of_kind(blocks, "table") if "shades" in table]
    percent = {}
    for row, shades in enumerate(table["shades"]):
        for column, shade in enumerate(shades):
            if shade:
                percent[row, column] = shade["percent"]
    return percent


def test_each_rank_is_compared_with_the_fast_ones() -> None:
    """Rank 1 takes 30 ms longer in data, for which rank 0 waits."""
    ranks = made_ranks(world=2, slow=1, excess_ms=30)
    assert excess_over_fast(ranks, ranks.by_rank, "data") == pytest.approx([0, 30e-3])
    assert excess_over_fast(ranks, ranks.by_rank, "forward") == pytest.approx([0, 0])
    blocks = ranks_view(ranks=ranks)
    titles, fast, slow = table_rows(block_titled(blocks, "Own work and waiting"))
    assert titles == ["rank", "data", "forward", "backward", "optimizer", "waiting"]
    data, waiting = titles.index("data"), titles.index("waiting")
    assert fast[waiting] == "30.0"
    assert slow[data] == "35.0"
    assert slow[waiting] == "0.0"
    assert shaded_percent(blocks) == {(0, waiting): 70.0, (1, data): 70.0}


def test_own_work_is_drawn_step_by_step() -> None:
    """Above the fast ranks: rank 1 is 30 ms slower in each step."""
    blocks = ranks_view(ranks=made_ranks(world=2, slow=1, excess_ms=30))
    heat = series_of(block_titled(blocks, "Own work, step by step"))["own work"]
    of_rank_0, of_rank_1 = heat["z"]
    assert all(excess_ms <= 20 for excess_ms in of_rank_0)
    assert len(of_rank_1) == STEPS
    assert all(excess_ms > 20 for excess_ms in of_rank_1)
    assert sum(of_rank_1) / STEPS == pytest.approx(30, abs=1)
    assert heat["zmax"] >= 30


def test_without_steps_nothing_is_drawn() -> None:
    ranks = made_ranks()
    rows = [row.model_copy(update={"own_by_column_s": []}) for row in ranks.by_rank]
    without_steps = ranks.model_copy(update={"by_rank": rows, "columns": []})
    assert blocks_of_kind(ranks_view(ranks=without_steps), "chart") == []


def test_ranks_that_are_not_shown_are_noted() -> None:
    ranks = made_ranks(world=100, slow=70)
    kept = [row for row in ranks.by_rank if row.rank in (0, 1, 70)]
    blocks = ranks_view(ranks=ranks.model_copy(update={"by_rank": kept}))
    titles, *rows = table_rows(block_titled(blocks, "Own work and waiting"))
    assert titles[:2] == ["host", "rank"]
    assert [rank for _, rank, *_ in rows] == ["70", "0", "1"]
    assert "3 of 100 ranks" in text_of(blocks)


def test_a_rank_that_did_not_report_is_noted() -> None:
    """Of three ranks the last one is missing; its clock may be unknown."""
    ranks = made_ranks(world=2, slow=1, excess_ms=30).model_copy(update={"world": 3})
    blocks = ranks_view(ranks=ranks)
    assert "2 of 3 ranks" in blocks[0]["title"]
    assert "Drawn are" not in text_of(blocks)
    excess_s = excess_over_fast(ranks, ranks.by_rank, "data")
    assert excess_s == pytest.approx([0, 30e-3])  # over the other one, not over both
    assert ["ranks that reported", "2"] in table_rows(block_titled(blocks, "Sources of these figures"))


def test_a_run_without_ranks_has_a_reason(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "a")
    texts = {"one rank": text_of(blocks_of_view("ranks", entry))}
    several = entry.record.environment.model_copy(update={"world_size": 2})
    assert "2 ranks" in text_of(blocks_of_view("ranks", Entry(tmp_path, made_record(environment=several))))
    texts["no run"] = text_of(blocks_of_view("ranks", Entry(tmp_path, None)))
    assert_stored("report/page_without_ranks", texts)

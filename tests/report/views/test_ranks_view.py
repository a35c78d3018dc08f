"""What the Ranks view shows: a row a rank, how much each is above the fast ones, and what is left out."""

from pathlib import Path
from typing import Any

import pytest
from made_ranks import STEPS, made_ranks
from made_runs import made_entry, made_record
from shown import of_kind, rows_of, series_of, shown, text_of, titled
from stored_texts import assert_stored

from lm_profiler.record.entry import Entry
from lm_profiler.report.views.ranks_view import excess_over_fast


def ranks_view(**options: Any) -> list[Any]:
    return shown("ranks", Entry(Path("a"), made_record(**options)))


def shades(blocks: list[Any]) -> dict[tuple[int, int], float]:
    """How strong the shade of each cell is that has one, by row and column."""
    [table] = [table for table in of_kind(blocks, "table") if "shades" in table]
    return {
        (row, column): shade["percent"]
        for row, shades in enumerate(table["shades"])
        for column, shade in enumerate(shades)
        if shade
    }


def test_each_rank_is_compared_with_the_fast_ones() -> None:
    ranks = made_ranks(world=2, slow=1)
    assert excess_over_fast(ranks, ranks.by_rank, "data") == pytest.approx([0, 30e-3])
    assert excess_over_fast(ranks, ranks.by_rank, "forward") == pytest.approx([0, 0])
    blocks = ranks_view(ranks=ranks)
    titles, fast, slow = rows_of(titled(blocks, "Own work and waiting"))
    assert titles == ["rank", "data", "forward", "backward", "optimizer", "waiting"]
    assert (fast[-1], slow[1], slow[-1]) == ("30.0", "35.0", "0.0")
    assert shades(blocks) == {(0, 5): 70.0, (1, 1): 70.0}  # the other's waiting, its data
    heat = series_of(titled(ranks_view(ranks=made_ranks(world=2, slow=1)), "Own work, step by step"))["own work"]
    assert [sum(more > 20 for more in row) for row in heat["z"]] == [0, STEPS]
    assert sum(heat["z"][1]) / STEPS == pytest.approx(30, abs=1)
    assert heat["zmax"] >= 30
    ranks = made_ranks()
    rows = [row.model_copy(update={"own_by_column_s": []}) for row in ranks.by_rank]
    assert of_kind(ranks_view(ranks=ranks.model_copy(update={"by_rank": rows, "columns": []})), "chart") == []


def test_omissions_are_noted() -> None:
    ranks = made_ranks(world=100, slow=70)
    kept = [row for row in ranks.by_rank if row.rank in (0, 1, 70)]
    blocks = ranks_view(ranks=ranks.model_copy(update={"by_rank": kept}))
    titles, *rows = rows_of(titled(blocks, "Own work and waiting"))
    assert titles[:2] == ["host", "rank"]
    assert [row[1] for row in rows] == ["70", "0", "1"]
    assert "3 of 100 ranks" in text_of(blocks)
    # Of three ranks the last one is missing; its clock may be unknown.
    ranks = made_ranks(world=2).model_copy(update={"world": 3})
    blocks = ranks_view(ranks=ranks)
    assert "2 of 3 ranks" in blocks[0]["title"]
    assert "Drawn are" not in text_of(blocks)
    excess_s = excess_over_fast(ranks, ranks.by_rank, "data")
    assert excess_s == pytest.approx([0, 30e-3])  # over the other one, not over both
    assert ["ranks that reported", "2"] in rows_of(titled(blocks, "Sources of these figures"))


def test_a_run_without_ranks_has_a_reason(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "a")
    texts = {"one rank": text_of(shown("ranks", entry))}
    several = entry.record.environment.model_copy(update={"world_size": 2})
    assert "2 ranks" in text_of(shown("ranks", Entry(tmp_path, made_record(environment=several))))
    texts["no run"] = text_of(shown("ranks", Entry(tmp_path, None)))
    assert_stored("report/page_without_ranks", texts)

"""Every rank's rows as they come, one file of all in the end, and nothing lost on the way from one to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lm_profiler.record.quantities import TIMED
from lm_profiler.record.steps import (
    UNKNOWN,
    StepRow,
    StepTable,
    append_steps,
    begin_rows,
    rank_file,
    read_rows,
    write_rows,
    write_steps,
)


def row(step: int, rank: int, **options: Any) -> StepRow:
    seconds = tuple((part + step + 10 * rank) / 1000 for part in range(len(TIMED)))
    values: dict[str, Any] = {"stage": "measure", "seconds": seconds, "host_seconds": seconds, "tokens": 7}
    return StepRow(step, **{**values, **options}, rank=rank)


def test_what_every_rank_wrote_so_far_is_read_together(tmp_path: Path) -> None:
    for rank in (0, 1, 12):
        begin_rows(tmp_path / "run", rank)
        append_steps(rank_file(tmp_path / "run", rank), [row(1, rank), row(2, rank)])
    with rank_file(tmp_path / "run", 12).open("a") as file:
        file.write("3,measure,0.0")  # killed amid a row
    rows = list(read_rows(tmp_path / "run", growing=True))
    assert rows == [row(step, rank) for step in (1, 2) for rank in (0, 1, 12)]


def test_one_file_of_all_ranks_takes_the_place_of_theirs_once_all_have_ended(tmp_path: Path) -> None:
    rows = [row(step, rank) for step in (1, 2) for rank in (0, 1)]
    begin_rows(tmp_path, 0)
    for rank in (1, 2):  # nobody heard of rank 2 again
        begin_rows(tmp_path, rank)
        append_steps(rank_file(tmp_path, rank), [row(1, rank)])
    write_rows(tmp_path, rows, all_ended=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.csv", "steps.rank1.csv", "steps.rank2.csv"]
    assert list(read_rows(tmp_path)) == [*rows[:2], row(1, 2), *rows[2:]]  # each once
    write_rows(tmp_path, rows, all_ended=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.csv", "steps.rank2.csv"]
    assert list(read_rows(tmp_path)) == [*rows[:2], row(1, 2), *rows[2:]]


def test_columns_are_rows_and_rows_are_columns() -> None:
    rows = [row(1, 0, stage="warmup"), row(2, 3, seconds=None, tokens=None), row(3, 1, memory=(1, None, 2**50))]
    table = StepTable.of(rows)
    assert list(table) == rows
    assert table[1] == rows[1]
    assert table[-1] == rows[-1]
    assert list(table[1:]) == rows[1:]
    assert StepTable.of(table) is table
    assert list(table.of_stages("measure").timed) == [rows[2]]
    assert table.largest_memory == (1, None, 2**50)
    assert list(StepTable.of([])) == []
    assert StepTable.of([]).largest_memory == UNKNOWN
    assert np.isnan(table.tokens[1])


def test_of_a_run_that_was_cut_short_the_steps_count_that_all_ranks_finished(tmp_path: Path) -> None:
    rows = StepTable.of([row(step, rank) for rank, last in ((0, 9), (1, 7), (2, 8)) for step in range(1, last + 1)])
    assert {(each.step, each.rank) for each in rows.finished_by_all()} == {
        (step, rank) for step in range(1, 8) for rank in range(3)
    }
    assert len(StepTable.of([]).finished_by_all()) == 0
    write_steps(tmp_path / "steps.csv", rows)
    assert len(read_rows(tmp_path)) == 24

"""Every rank's rows as they come, one file of all in the end, and nothing lost on the way from one to the other."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.files import RecordError
from lm_profiler.record.quantities import STEP_COLUMNS, TIMED
from lm_profiler.record.steps import (
    FEW_RANKS,
    FEW_ROWS,
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

pytest.importorskip("pyarrow")


def row(step: int, rank: int, **options: Any) -> StepRow:
    seconds = tuple((part + step + 10 * rank) / 1000 for part in range(len(TIMED)))
    values: dict[str, Any] = {"stage": "measure", "seconds": seconds, "host_seconds": seconds, "tokens": 7}
    return StepRow(step, **{**values, **options}, rank=rank)


def many_rows(ranks: int = FEW_RANKS + 1) -> list[StepRow]:
    """Just as many as are too many for text."""
    steps = FEW_ROWS // ranks + 1
    return [row(step, rank) for step in range(1, steps + 1) for rank in range(ranks)]


def test_steps_written_so_far_are_read(tmp_path: Path) -> None:
    for rank in (0, 1, 12):
        begin_rows(tmp_path / "run", rank)
        append_steps(rank_file(tmp_path / "run", rank), [row(1, rank), row(2, rank)])
    with rank_file(tmp_path / "run", 12).open("a") as file:
        file.write("3,measure,0.0")  # killed amid a row
    rows = list(read_rows(tmp_path / "run", growing=True))
    assert rows == [row(step, rank) for step in (1, 2) for rank in (0, 1, 12)]


def test_few_ranks_or_few_steps_are_text(tmp_path: Path) -> None:
    for name, rows in (("few", many_rows(FEW_RANKS)), ("short", [row(1, rank) for rank in range(100)])):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, rows, all_ended=True)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["steps.csv"]


def test_one_file_of_all_ranks_takes_the_place_of_theirs_once_all_have_ended(tmp_path: Path) -> None:
    rows = [row(step, rank) for step in (1, 2) for rank in (0, 1)]
    begin_rows(tmp_path, 0)
    for rank in (1, 2):  # nobody heard of rank 2 again
        begin_rows(tmp_path, rank)
        append_steps(rank_file(tmp_path, rank), [row(1, rank)])
    assert write_rows(tmp_path, rows, all_ended=False) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.csv", "steps.rank1.csv", "steps.rank2.csv"]
    assert list(read_rows(tmp_path)) == [*rows[:2], row(1, 2), *rows[2:]]  # each once
    write_rows(tmp_path, rows, all_ended=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.csv", "steps.rank2.csv"]
    assert list(read_rows(tmp_path)) == [*rows[:2], row(1, 2), *rows[2:]]


def test_many_rows_are_readable_parquet(tmp_path: Path) -> None:
    from pyarrow import parquet

    rows = many_rows()
    rows[0] = row(1, 0, stage="warmup", seconds=None, tokens=None, memory=(1 << 40, None, 5))
    begin_rows(tmp_path, 0)
    begin_rows(tmp_path, 3)
    assert write_rows(tmp_path, rows, all_ended=True) == []
    assert [path.name for path in tmp_path.iterdir()] == ["steps.parquet"]
    table = parquet.read_table(tmp_path / "steps.parquet")
    assert tuple(table.column_names) == STEP_COLUMNS
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["stage"], first["rank"], first["tokens"], first["forward_s"]) == ("warmup", 0, None, None)
    assert (first["allocated_peak_bytes"], first["reserved_peak_bytes"]) == (1 << 40, None)
    assert (tmp_path / "steps.parquet").stat().st_size < 100 * len(rows)

    back = read_rows(tmp_path)
    assert len(back) == len(rows)
    for written, read in zip(rows[::997], list(back)[::997], strict=True):
        known = (written.step, written.stage, written.tokens, written.memory, written.rank)
        assert (read.step, read.stage, read.tokens, read.memory, read.rank) == known
        assert read.host_seconds == pytest.approx(written.host_seconds, rel=1e-7)
        assert (read.seconds is None) is (written.seconds is None)


def test_without_pyarrow_many_rows_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = many_rows()
    (tmp_path / "columns").mkdir()
    write_rows(tmp_path / "columns", rows, all_ended=True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (note,) = write_rows(tmp_path, rows, all_ended=True)
    assert f"{len(rows):,} rows" in note
    assert "lm_profiler[parquet]" in note
    assert len(read_rows(tmp_path)) == len(rows)
    message = refusal(RecordError, lambda: read_rows(tmp_path / "columns"))
    assert_stored("record/problems: no pyarrow", {"columns": message}, run=tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"step,stage\n"])
def test_damaged_parquet_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "steps.parquet").write_bytes(content)
    with pytest.raises(RecordError, match=f"^{tmp_path / 'steps.parquet'}: is damaged"):
        read_rows(tmp_path)


def test_rows_and_columns_convert_into_each_other() -> None:
    rows = [row(1, 0, stage="warmup"), row(2, 3, seconds=None, tokens=None), row(3, 1, memory=(1, None, 2**50))]
    table = StepTable.from_rows(rows)
    assert list(table) == rows
    assert table[1] == rows[1]
    assert table[-1] == rows[-1]
    assert list(table[1:]) == rows[1:]
    assert StepTable.from_rows(table) is table
    assert list(table.of_stages("measure").timed) == [rows[2]]
    assert table.largest_memory == (1, None, 2**50)
    assert list(StepTable.from_rows([])) == []
    assert StepTable.from_rows([]).largest_memory == UNKNOWN
    assert np.isnan(table.tokens[1])


def test_a_run_cut_short_has_the_steps_that_all_ranks_finished(tmp_path: Path) -> None:
    last_steps = {0: 9, 1: 7, 2: 8}
    finished = [row(step, rank) for rank, last_step in last_steps.items() for step in range(1, last_step + 1)]
    rows = StepTable.from_rows(finished)
    assert {(row.step, row.rank) for row in rows.finished_by_all()} == {
        (step, rank) for step in range(1, 8) for rank in range(3)
    }
    assert len(StepTable.from_rows([]).finished_by_all()) == 0
    write_steps(tmp_path / "steps.csv", rows)
    assert len(read_rows(tmp_path)) == 24

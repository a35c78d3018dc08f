"""Columns relative to a baseline: the ratio to the row that has all else in common."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry

from lm_profiler.record.entry import Entry
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.tables.layouts import pivot
from lm_profiler.report.tables.relative import baseline_named, with_relative, with_speedups
from lm_profiler.report.tables.rows import raw_runs_table, runs_table
from lm_profiler.report.tables.run_groups import repeats_together, single_run_groups
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import columns_named
from lm_profiler.usage_error import UsageError


def swept_entries(folder: Path, forward_s: dict[tuple[str, str], float], repeats: int = 1) -> list[Entry]:
    """Runs by attention and context; a step is the forward pass and 7 ms."""
    entries = []
    for number, ((attention, context), seconds) in enumerate(forward_s.items()):
        overrides = {"model.attention": attention, "data.context_length": context}
        for repeat in range(repeats):
            entry = made_entry(folder / f"{number}-{repeat}", overrides, forward_s=seconds * (1 + 0.01 * repeat))
            cell = Cell(id=f"cell{number}", overrides=overrides, repeat=repeat, arguments=["fit"])
            entries.append(replace(entry, cell=cell, sweep=folder))
    return entries


FORWARD_S = {("sdpa", "128"): 0.003, ("math", "128"): 0.013, ("sdpa", "256"): 0.013, ("math", "256"): 0.023}


def test_each_row_is_over_the_row_with_the_same_other_facts(tmp_path: Path) -> None:
    entries = swept_entries(tmp_path, FORWARD_S)
    groups = repeats_together(entries)
    columns = columns_named(["attention", "context_length", "step_s"], entries)
    baseline = baseline_named("attention=sdpa", groups)
    table = with_relative(runs_table(groups, columns), groups, baseline)
    ratios = [row[3].value for row in table.rows]
    assert ratios == pytest.approx([1, 20 / 10, 1, 30 / 20], rel=1e-3)
    assert [row[3].text.partition(" ")[0] for row in table.rows] == ["1", "2", "1", "1.5"]
    for row in (table.rows[1], table.rows[3]):
        low, high = row[3].low, row[3].high
        assert low < row[3].value < high
    records: list[dict[str, Any]] = with_relative(raw_runs_table(groups, columns), groups, baseline).records()
    assert [record["step_s_relative"] for record in records] == pytest.approx(ratios)
    # What came out of a run does not part it from its baseline.
    record = entries[1].record
    steadiness = record.steadiness.model_copy(update={"word": "noisy"})
    entries[1] = replace(entries[1], record=record.model_copy(update={"steadiness": steadiness}))
    groups = repeats_together(entries)
    table = with_relative(runs_table(groups), groups, baseline_named("attention=sdpa", groups))
    [index] = [number for number, heading in enumerate(table.headings) if heading.name == "step_s_relative"]
    assert [row[index].value for row in table.rows] == pytest.approx([1, 20 / 10, 1, 30 / 20], rel=1e-3)


def test_repeats_have_an_interval(tmp_path: Path) -> None:
    groups = repeats_together(swept_entries(tmp_path, FORWARD_S, repeats=3))
    columns = columns_named(["step_s"], groups[0])
    table = with_relative(runs_table(groups, columns), groups, baseline_named("attention=sdpa", groups))
    cell = table.rows[1][1]
    assert cell.low < 20.13 / 10.03 < (cell.high or 0)
    some = {key: seconds for key, seconds in FORWARD_S.items() if key != ("sdpa", "256")}
    groups = repeats_together(swept_entries(tmp_path, some))
    columns = columns_named(["step_s"], groups[0])
    table = with_relative(runs_table(groups, columns), groups, baseline_named("attention=sdpa", groups))
    assert [row[1].value is None for row in table.rows] == [False, False, True]
    assert "without a ratio" in table.below[-1]


@pytest.mark.parametrize(
    "text, message",
    [
        ("attention=flash", "found none; attention is sdpa, math"),
        ("attention", "such as attention=sdpa"),
        ("=sdpa", "such as attention=sdpa"),
        ("step_s=3", "given the figure 'step_s'"),
        ("nothing=1", "given 'nothing'"),
    ],
)
def test_a_baseline_that_is_not_there_is_refused(tmp_path: Path, text: str, message: str) -> None:
    groups = repeats_together(swept_entries(tmp_path, FORWARD_S))
    with pytest.raises(UsageError, match=message):
        baseline_named(text, groups)


def pivoted(entries: list[Entry], across: list[str], baseline: str, value: str = "forward_s") -> Table:
    rows, columns, [figure] = (columns_named(names, entries) for names in (["context_length"], across, [value]))
    table = pivot(entries, rows, columns, figure)
    return with_speedups(table, entries, rows, columns, figure, baseline_named(baseline, single_run_groups(entries)))


def test_a_pivot_ends_with_how_many_times_faster_each_column_is(tmp_path: Path) -> None:
    """As in reports on attention: | seq_len | regular | triton_flash | triton vs regular |, with 3.79x."""
    some = {**FORWARD_S, ("math", "512"): 0.05, ("sdpa", "1024"): 0.08}
    table = pivoted(swept_entries(tmp_path, some), ["attention"], "attention=math")
    assert [heading.title for heading in table.headings] == ["context", "math", "sdpa", "sdpa vs math"]
    assert [row[3].text.partition(" ")[0] for row in table.rows] == ["4.33x", "1.77x", "—", "—"]
    faster = table.rows[0][3]
    assert faster.value == pytest.approx(13 / 3, rel=1e-3)
    assert faster.low < 13 / 3 < (faster.high or 0)
    rates = pivoted(swept_entries(tmp_path / "rates", FORWARD_S), ["attention"], "attention=math", "tokens_per_s")
    assert rates.rows[0][3].value == pytest.approx(20 / 10, rel=1e-3)  # more tokens, not fewer
    with pytest.raises(UsageError, match="in the columns of the pivot"):
        pivoted(swept_entries(tmp_path, FORWARD_S), ["d_model"], "attention=math")

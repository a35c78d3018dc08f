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
    """Runs by attention and context, each repeat 1 % slower in forward; a step is the forward pass and 7 ms."""
    entries = []
    for number, ((attention, context), seconds) in enumerate(forward_s.items()):
        overrides = {"model.attention": attention, "data.context_length": context}
        for repeat in range(repeats):
            entry = made_entry(folder / f"{number}-{repeat}", overrides, forward_s=seconds * (1 + 0.01 * repeat))
            cell = Cell(id=f"cell{number}", overrides=overrides, repeat=repeat, arguments=["fit"])
            entries.append(replace(entry, cell=cell, sweep=folder))
    return entries


def table_relative_to_sdpa(entries: list[Entry], *names: str) -> Table:
    groups = repeats_together(entries)
    table = runs_table(groups, columns_named([*names], entries)) if names else runs_table(groups)
    return with_relative(table, groups, baseline_named("attention=sdpa", groups))


def cells_titled(table: Table, name: str) -> list[Any]:
    (index,) = [number for number, heading in enumerate(table.headings) if heading.name == name]
    return [row[index] for row in table.rows]


FORWARD_S = {("sdpa", "128"): 0.003, ("math", "128"): 0.013, ("sdpa", "256"): 0.013, ("math", "256"): 0.023}


# Steps take 7 ms more: 10 and 20 ms at a context of 128, 20 and 30 ms at 256.
STEP_RATIOS = [1, 20 / 10, 1, 30 / 20]


def test_each_row_is_over_the_row_with_the_same_other_facts(tmp_path: Path) -> None:
    entries = swept_entries(tmp_path, FORWARD_S)
    table = table_relative_to_sdpa(entries, "attention", "context_length", "step_s")
    ratios = cells_titled(table, "step_s_relative")
    assert [ratio.value for ratio in ratios] == pytest.approx(STEP_RATIOS, rel=1e-3)
    assert [ratio.text.partition(" ")[0] for ratio in ratios] == ["1", "2", "1", "1.5"]
    for ratio in (ratios[1], ratios[3]):
        assert ratio.low < ratio.value < ratio.high


def test_records_of_the_raw_table_have_the_ratios(tmp_path: Path) -> None:
    groups = repeats_together(swept_entries(tmp_path, FORWARD_S))
    columns = columns_named(["attention", "context_length", "step_s"], groups[0])
    table = with_relative(raw_runs_table(groups, columns), groups, baseline_named("attention=sdpa", groups))
    ratios = [record["step_s_relative"] for record in table.records()]
    assert ratios == pytest.approx(STEP_RATIOS, rel=1e-3)


def test_results_of_a_run_do_not_part_it_from_its_baseline(tmp_path: Path) -> None:
    entries = swept_entries(tmp_path, FORWARD_S)
    record = entries[1].record
    noisy = record.steadiness.model_copy(update={"word": "noisy"})
    entries[1] = replace(entries[1], record=record.model_copy(update={"steadiness": noisy}))
    ratios = cells_titled(table_relative_to_sdpa(entries), "step_s_relative")
    assert [ratio.value for ratio in ratios] == pytest.approx(STEP_RATIOS, rel=1e-3)


def test_repeats_have_an_interval(tmp_path: Path) -> None:
    """The second of three repeats is the mean: its forward pass takes 1 % longer, its step 13.13 + 7 ms."""
    entries = swept_entries(tmp_path, FORWARD_S, repeats=3)
    _, math, *_ = cells_titled(table_relative_to_sdpa(entries, "step_s"), "step_s_relative")
    assert math.low < 20.13 / 10.03 < math.high


def test_a_row_without_a_baseline_has_no_ratio(tmp_path: Path) -> None:
    without_baseline = {key: seconds for key, seconds in FORWARD_S.items() if key != ("sdpa", "256")}
    table = table_relative_to_sdpa(swept_entries(tmp_path, without_baseline), "step_s")
    _, _, math_256 = cells_titled(table, "step_s_relative")
    assert math_256.value is None
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


def pivot_with_speedups(entries: list[Entry], across: str, baseline: str, value: str = "forward_s") -> Table:
    rows, columns, [figure] = (columns_named([name], entries) for name in ("context_length", across, value))
    table = pivot(entries, rows, columns, figure)
    return with_speedups(table, entries, rows, columns, figure, baseline_named(baseline, single_run_groups(entries)))


def test_a_pivot_ends_with_how_many_times_faster_each_column_is(tmp_path: Path) -> None:
    """As in reports on attention: | seq_len | regular | triton_flash | triton vs regular |, with 3.79x."""
    forward_s = {**FORWARD_S, ("math", "512"): 0.05, ("sdpa", "1024"): 0.08}
    table = pivot_with_speedups(swept_entries(tmp_path, forward_s), "attention", baseline="attention=math")
    assert [heading.title for heading in table.headings] == ["context", "math", "sdpa", "sdpa vs math"]
    speedups = [row[-1] for row in table.rows]
    # 13 / 3 and 23 / 13; two contexts have one of the two runs.
    assert [speedup.text.partition(" ")[0] for speedup in speedups] == ["4.33x", "1.77x", "—", "—"]
    assert speedups[0].value == pytest.approx(13 / 3, rel=1e-3)
    assert speedups[0].low < 13 / 3 < speedups[0].high


def test_more_tokens_per_second_are_faster(tmp_path: Path) -> None:
    entries = swept_entries(tmp_path, FORWARD_S)
    rates = pivot_with_speedups(entries, "attention", baseline="attention=math", value="tokens_per_s")
    assert rates.rows[0][-1].value == pytest.approx(20 / 10, rel=1e-3)


def test_a_baseline_that_is_no_column_of_the_pivot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in the columns of the pivot"):
        pivot_with_speedups(swept_entries(tmp_path, FORWARD_S), "d_model", baseline="attention=math")

"""What the first step costs beyond the others: made runs whose steps are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import made_entry, made_rows

from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import StepRow, write_steps
from lm_profiler.report.tables.rows import runs_table
from lm_profiler.report.tables.run_groups import single_run_groups
from lm_profiler.report.tables.table_columns import columns_named


def slower_first(rows: list[StepRow], forward_s: float) -> list[StepRow]:
    """The first forward pass takes ``forward_s`` longer, as one that tries tiles."""
    seconds = list(rows[0].seconds)
    seconds[PARTS.index("forward")] += forward_s
    return [replace(rows[0], seconds=tuple(seconds)), *rows[1:]]


@pytest.mark.parametrize("compile_s, tuning_s", [(0.25, 0.5), (0.0, 0.75), (2.0, 0.0), (None, None)])
def test_autotuning_is_what_the_first_passes_take_beyond_later_ones_and_the_compiler(
    tmp_path: Path, compile_s: float | None, tuning_s: float | None
) -> None:
    tuned = made_entry(tmp_path / "tuned", warmup_compile_s=compile_s)
    write_steps(tmp_path / "tuned" / "steps.csv", slower_first(made_rows(), 0.75))
    [column] = columns_named(["autotuning_s"], [tuned])
    found_s = column.get(tuned)
    assert found_s == (None if tuning_s is None else pytest.approx(tuning_s, abs=1e-4))


def test_the_first_pass_is_compared_with_the_mean_of_the_measured_ones(tmp_path: Path) -> None:
    tuned, plain, gone = (made_entry(tmp_path / name, name=name) for name in ("tuned", "plain", "gone"))
    write_steps(tmp_path / "tuned" / "steps.csv", slower_first(made_rows(), 0.75))
    (tmp_path / "gone" / "steps.csv").unlink()
    entries = [tuned, plain, gone, made_entry(tmp_path / "oom", status="oom")]
    columns = columns_named(["first_forward_extra_s", "first_backward_extra_s"], entries)
    table = runs_table(single_run_groups(entries), columns)
    values = [[cell.value for cell in row[-2:]] for row in table.rows]
    assert values[0] == pytest.approx([0.75, 0.0], abs=1e-4)
    assert values[1] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert values[2:] == [[None, None], [None, None]]

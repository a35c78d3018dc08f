"""Columns about kernels: shares and the largest, against a table reckoned by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_trace import cuda_step, kernel_table
from made_runs import made_entry

from lm_profiler.record.kernels import kernels_file
from lm_profiler.report.tables.rows import runs_table
from lm_profiler.report.tables.run_groups import repeats_together
from lm_profiler.report.tables.table_columns import columns_named


def test_shares_are_of_the_step_or_of_a_pass_and_the_largest_kernels_are_named(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "run", name="run")
    (tmp_path / "run" / "trace").mkdir()
    kernel_table(cuda_step()).write(kernels_file(tmp_path / "run" / "trace" / "rank0.pt.trace.json.gz"))
    untraced = made_entry(tmp_path / "untraced", name="untraced")
    names = ["share_matmul", "share_matmul_forward", "share_communication", "top_kernel", "top_other_kernel"]
    columns = columns_named(names, [entry, untraced])
    table = runs_table(repeats_together([entry, untraced]), columns)
    values = [cell.value for cell in table.rows[0]]
    # Matrix products take 60 of 170 microseconds; in forward 40 of the 50 busy and 12 idle ones.
    assert values[:3] == pytest.approx([60 / 170, 40 / 62, 30 / 170])
    assert values[3] == "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN 35.3%"
    assert values[4].endswith("17.6%")
    assert [cell.text for cell in table.rows[0][:2]] == ["35.3", "64.5"]
    assert [cell.value for cell in table.rows[1]] == [None] * 5

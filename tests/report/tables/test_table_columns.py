"""FLOP/s of attention alone, as FlashAttention's tables count them."""

from dataclasses import replace
from pathlib import Path

import pytest
from cuda_trace import cuda_step, kernel_table
from made_runs import made_entry, made_rows

from lm_profiler.record.kernels import kernels_file
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import StepRow, write_steps
from lm_profiler.report.tables.rows import runs_table
from lm_profiler.report.tables.run_groups import repeats_together, single_run_groups
from lm_profiler.report.tables.table_columns import COLUMNS, columns_named

TABLED = [  # B, T, D, causal, and the FLOPs of a forward pass by hand
    (2, 128, 64, "true", 4 * 2 * 128**2 * 64 / 2),
    (1, 256, 16, "false", 4 * 256**2 * 16),
]


@pytest.mark.parametrize("sequences, tokens, width, causal, flops", TABLED)
def test_flops_are_four_per_pair(tmp_path: Path, sequences: int, tokens: int, width: int, causal: str, flops: float):
    model = {"d_model": width, "attention": "sdpa", "is_causal": causal == "true"}
    config = {"model": model, "data": {"batch_size": sequences, "context_length": tokens}}
    entry = made_entry(tmp_path / "run", config=config)
    forward_s, backward_s = COLUMNS["forward_s"].get(entry), COLUMNS["backward_s"].get(entry)
    assert COLUMNS["attention_forward_flops_per_s"].get(entry) == pytest.approx(flops / forward_s)
    assert COLUMNS["attention_backward_flops_per_s"].get(entry) == pytest.approx(2.5 * flops / backward_s)
    # The peak of these runs is 1e12 FLOP/s.
    assert COLUMNS["attention_forward_of_peak"].get(entry) == pytest.approx(flops / forward_s / 1e12)


def test_shares_are_of_the_step_or_of_a_pass(tmp_path: Path) -> None:
    """Of 170 us, matrix products take 60 and communication 30; forward has 40 us of products in 50 busy, 12 idle us."""
    entry = made_entry(tmp_path / "run", name="run")
    (tmp_path / "run" / "trace").mkdir()
    kernel_table(cuda_step()).write(kernels_file(tmp_path / "run" / "trace" / "rank0.pt.trace.json.gz"))
    untraced = made_entry(tmp_path / "untraced", name="untraced")
    names = ["share_matmul", "share_matmul_forward", "share_communication", "top_kernel", "top_other_kernel"]
    columns = columns_named(names, [entry, untraced])
    traced_row, untraced_row = runs_table(repeats_together([entry, untraced]), columns).rows
    matmul, matmul_forward, communication, top_kernel, top_other_kernel = traced_row
    assert matmul.value == pytest.approx(60 / 170)
    assert matmul.text == "35.3"
    assert matmul_forward.value == pytest.approx(40 / (50 + 12))
    assert matmul_forward.text == "64.5"
    assert communication.value == pytest.approx(30 / 170)
    assert top_kernel.value == "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN 35.3%"
    assert top_other_kernel.value.endswith("17.6%")  # the all-reduce
    assert all(cell.value is None for cell in untraced_row)


def slower_first(rows: list[StepRow], forward_s: float) -> list[StepRow]:
    """The first forward pass takes ``forward_s`` longer, as one that tries tiles."""
    seconds = list(rows[0].seconds)
    seconds[PARTS.index("forward")] += forward_s
    return [replace(rows[0], seconds=tuple(seconds)), *rows[1:]]


@pytest.mark.parametrize("compile_s, tuning_s", [(0.25, 0.5), (0.0, 0.75), (2.0, 0.0), (None, None)])
def test_autotuning_is_the_excess_of_the_first_passes(tmp_path: Path, compile_s: float | None, tuning_s: float | None):
    tuned = made_entry(tmp_path / "tuned", warmup_compile_s=compile_s)
    write_steps(tmp_path / "tuned" / "steps.csv", slower_first(made_rows(), 0.75))
    [column] = columns_named(["autotuning_s"], [tuned])
    found_s = column.get(tuned)
    assert found_s == (None if tuning_s is None else pytest.approx(tuning_s, abs=1e-4))


def test_the_first_pass_is_compared_with_the_mean_of_the_measured_ones(tmp_path: Path) -> None:
    names = ("tuned", "plain", "without steps", "oom")
    tuned, plain, without_steps = (made_entry(tmp_path / name, name=name) for name in names[:3])
    died = made_entry(tmp_path / "oom", status="oom")
    write_steps(tuned.folder / "steps.csv", slower_first(made_rows(), 0.75))
    (without_steps.folder / "steps.csv").unlink()
    entries = [tuned, plain, without_steps, died]
    columns = columns_named(["first_forward_extra_s", "first_backward_extra_s"], entries)
    table = runs_table(single_run_groups(entries), columns)
    extra_s = {}
    for name, (*_, forward, backward) in zip(names, table.rows, strict=True):
        extra_s[name] = [forward.value, backward.value]
    assert extra_s["tuned"] == pytest.approx([0.75, 0.0], abs=1e-4)
    assert extra_s["plain"] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert extra_s["without steps"] == extra_s["oom"] == [None, None]

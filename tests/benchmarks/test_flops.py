"""The rows of `benchmarks.flops` that need no step: our sizes and those of transformers against torchtitan's count."""

from __future__ import annotations

import pytest
from benchmarks.flops import torchtitan_rows

pytest.importorskip("transformers")


def test_flops_a_token_are_torchtitans() -> None:
    rows = list(torchtitan_rows())
    assert len(rows) == 17
    assert {row.workload: row.flops for row in rows} == {row.workload: row.truth for row in rows}


def test_the_published_count_of_qwen3_30b_at_another_context() -> None:
    """torchtitan#4300 publishes 37,578,559,488 for context 8,192; attention alone grows with it."""
    [row] = [row for row in torchtitan_rows() if row.workload.startswith("qwen3/30B-A3B")]
    assert row.flops + 12 * 48 * 32 * 128 * (8192 - 4096) == 37_578_559_488

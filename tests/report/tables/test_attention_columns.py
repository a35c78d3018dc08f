"""FLOP/s of attention alone, as FlashAttention's tables count them."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import made_entry

from lm_profiler.report.tables.table_columns import COLUMNS

TABLED = [  # B, T, D, causal, and the FLOPs of a forward pass by hand
    (2, 128, 64, "true", 4 * 2 * 128**2 * 64 / 2),
    (1, 256, 16, "false", 4 * 256**2 * 16),
]


@pytest.mark.parametrize("sequences, tokens, width, causal, flops", TABLED)
def test_flops_are_four_for_each_pair_and_number(
    tmp_path: Path, sequences: int, tokens: int, width: int, causal: str, flops: float
) -> None:
    model = {"d_model": width, "attention": "sdpa", "is_causal": causal == "true"}
    config = {"model": model, "data": {"batch_size": sequences, "context_length": tokens}}
    entry = made_entry(tmp_path / "run", config=config)
    forward_s, backward_s = COLUMNS["forward_s"].get(entry), COLUMNS["backward_s"].get(entry)
    assert COLUMNS["attention_forward_flops_per_s"].get(entry) == pytest.approx(flops / forward_s)
    assert COLUMNS["attention_backward_flops_per_s"].get(entry) == pytest.approx(2.5 * flops / backward_s)
    # The peak of these runs is 1e12 FLOP/s.
    assert COLUMNS["attention_forward_of_peak"].get(entry) == pytest.approx(flops / forward_s / 1e12)


def test_another_module_has_none(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "run")
    assert COLUMNS["attention_forward_flops_per_s"].get(entry) is None

"""What attention alone cannot do without, against sums by hand, and that each remedy is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lm_profiler.training.fits.attention import AttentionFootprint

GIB = 2**30
CELL = AttentionFootprint(8, 65536, 64, "math", False, "32-true", True)


def test_three_arrays_of_scores_are_what_math_cannot_do_without() -> None:
    inputs, scores = 3 * 8 * 65536 * 64 * 4, 8 * 65536 * 65536 * 4
    assert CELL.total_bytes == inputs + 3 * scores
    assert replace(CELL, training=False).total_bytes == inputs + 3 * scores
    assert replace(CELL, compile=True).total_bytes == inputs + scores
    assert replace(CELL, precision="bf16-true").total_bytes == inputs // 2 + 3 * scores // 2
    for mixed in ("bf16-mixed", "bf16"):
        assert replace(CELL, precision=mixed).total_bytes == inputs + 3 * scores // 2


def test_sdpa_needs_q_k_v_and_their_gradients() -> None:
    inputs = 3 * 8 * 65536 * 64 * 4
    assert replace(CELL, attention="sdpa").total_bytes == 2 * inputs
    assert replace(CELL, attention="sdpa", training=False).total_bytes == inputs


def test_it_says_what_is_needed_what_there_is_and_several_ways_out() -> None:
    assert str(CELL.refusal(24 * GIB)) == (
        "memory: expected at most the 24.0 GiB that are free, given 384.4 GiB "
        "(Q, K and V 0.4 GiB, scores 384.0 GiB; math, 32-true)\n"
        "would fit: --model.attention=sdpa or --data.context_length=8192; --check_memory=false to run anyway"
    )


@pytest.mark.parametrize("available", [10, 10_000, GIB // 2, GIB, 60 * GIB, 383 * GIB])
@pytest.mark.parametrize("attention", ["math", "sdpa"])
def test_every_remedy_is_one_and_what_just_fits_is_not_refused(available: int, attention: Any) -> None:
    cell = replace(CELL, attention=attention)
    assert cell.refusal(cell.total_bytes) is None
    refused = cell.refusal(min(available, cell.total_bytes - 1))
    assert refused is not None
    for option in refused.remedies:
        name, _, value = option.partition("=")
        changed: dict[str, Any] = {name.rpartition(".")[2]: int(value) if value.isdigit() else value}
        assert replace(cell, **changed).refusal(available) is None, option

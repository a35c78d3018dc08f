"""The rows of `benchmarks.flops` that need no step: our sizes and those of transformers against torchtitan's count."""

import pytest
from benchmarks.flops import TORCHTITAN_OF_TRANSFORMERS, has_config, torchtitan_rows

transformers = pytest.importorskip("transformers")


def test_flops_a_token_are_torchtitans() -> None:
    rows = list(torchtitan_rows())
    kinds = [kind for kind, *_ in TORCHTITAN_OF_TRANSFORMERS.values()]
    later_kinds = [kind for kind in kinds if not has_config(transformers, kind)]
    assert len(rows) == 23 - len(later_kinds)
    assert {row.workload: row.flops for row in rows} == {row.workload: row.truth for row in rows}
    # torchtitan#4300 publishes 37,578,559,488 for context 8,192; attention alone grows with it
    [qwen] = [row for row in rows if row.workload.startswith("qwen3/30B-A3B")]
    assert qwen.flops + 12 * 48 * 32 * 128 * (8192 - 4096) == 37_578_559_488

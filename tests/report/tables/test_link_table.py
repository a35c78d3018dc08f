"""Bandwidths against nccl-tests' own definitions."""

import pytest

from lm_profiler.report.tables.link_table import LinkFigures, link_table


@pytest.mark.parametrize(
    "op, ranks, busbw",
    # A ring moves 2 (n-1) parts of size/n over each link for an all-reduce, n-1 for its halves; a broadcast the whole.
    [("all_reduce", 8, 1.75e9), ("all_gather", 8, 0.875e9), ("reduce_scatter", 2, 0.5e9), ("broadcast", 8, 1e9)],
)
def test_the_bus_bandwidth_is_what_a_link_of_a_ring_carries(op: str, ranks: int, busbw: float) -> None:
    row = LinkFigures("gloo", ranks, op, 1_000_000, [1e-3] * 3)
    assert row.algorithm_bandwidth == pytest.approx(1e9)
    assert row.bus_bandwidth == pytest.approx(busbw)


def test_collectives_without_a_time_have_a_reason() -> None:
    [row] = link_table([LinkFigures("gloo", 2, "broadcast", 8, [], "not offered")]).records()
    assert row["median_s_status"] == "unknown"
    assert [row[name] for name in ("median_s", "repeats", "algbw_bytes_per_s", "busbw_bytes_per_s")] == [None] * 4

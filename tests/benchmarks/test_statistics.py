"""The benchmark of the statistics: its rows are simulated, and both versions are asked the same."""

import math

from benchmarks import statistics


def test_every_row_has_a_share_or_none_of_its_runs_has_an_interval() -> None:
    rows = list(statistics.rows())
    assert len({(row.aim, row.case) for row in rows}) == len(rows)
    for row in rows[:: len(rows) // 12]:
        share = row.told(1)
        assert math.isnan(share) or 0.0 <= share <= 1.0

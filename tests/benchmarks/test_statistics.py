"""The benchmark of the statistics: its rows are simulated, and both versions are asked the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.statistics_subjects import Now, subject

from benchmarks import statistics


def test_every_row_has_a_share_or_none_of_its_runs_has_an_interval() -> None:
    rows = list(statistics.rows())
    assert len({(row.aim, row.case) for row in rows}) == len(rows)
    for row in rows[:: len(rows) // 12]:
        share = row.told(1)
        assert math.isnan(share) or 0.0 <= share <= 1.0


@pytest.mark.parametrize("place, slow", [("first 3", [0, 1, 2]), ("last 3", [7, 8, 9]), ("1/2", [5, 6, 7, 8, 9])])
def test_a_change_is_where_its_place_says(place: str, slow: list[int]) -> None:
    times = statistics.at_place(np.random.default_rng(0), 10, place, 1.0, 0.001)
    assert np.flatnonzero(times > 0.15).tolist() == slow


def test_this_version_is_asked_and_stops_where_its_rule_does() -> None:
    of = subject()
    assert isinstance(of, Now)
    assert of.stops_at(np.full(400, 0.1), 0.005) == 10
    assert of.stops_at(0.1 * np.exp(np.random.default_rng(0).standard_normal(60)), 0.005) == 60

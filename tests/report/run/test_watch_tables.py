"""The tables of a watched run, from files that may be damaged."""

from __future__ import annotations

import math

import pytest

from lm_profiler.report.run.watch_tables import _clock


@pytest.mark.parametrize("at_s", [1e12, -1e12, 1e300, math.inf, -math.inf, math.nan])
def test_a_time_that_no_calendar_has_is_unknown(at_s: float) -> None:
    assert _clock(at_s) == "unknown"

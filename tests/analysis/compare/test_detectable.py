"""The smallest change that is promised to be told, of a comparison that was made."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.compare.ratio import RatioInterval, minimum_detectable_effect


@pytest.mark.parametrize(
    "interval,effect",
    [
        (RatioInterval(1.0, 0.98, 1.02, 0.95), 0.02 * 2.801585 / 1.959964),
        (RatioInterval(1.0, 0.9999, 1.0001), 0.01),
        (RatioInterval(0.93, 0.92, 0.94), 0.07),
    ],
)
def test_it_is_the_largest_of_power_margin_and_what_was_seen(interval: RatioInterval, effect: float) -> None:
    assert minimum_detectable_effect(interval) == pytest.approx(effect, rel=1e-5)

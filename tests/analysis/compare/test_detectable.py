"""The smallest change that is promised to be told is told about as often as promised."""

from __future__ import annotations

import numpy as np
import pytest

from lm_profiler.analysis.compare.ratio import (
    PROCESS_SPREAD,
    RatioInterval,
    change,
    minimum_detectable_effect,
    ratio_interval,
)


def test_a_true_change_of_that_size_is_called_in_four_of_five_tries() -> None:
    rng = np.random.default_rng(5)
    steps, spread, tries = 60, 0.04, 250

    def run(scale: float) -> list[float]:
        process = float(np.exp(PROCESS_SPREAD * rng.standard_normal()))
        return list(scale * process * (1.0 + spread * rng.standard_normal(steps)))

    same = [ratio_interval([run(1.0)], [run(1.0)], resamples=1000) for _ in range(tries)]
    # What was seen between A and A is in the promise too; the interval's width alone is what has the power.
    widths = [(i.high - i.low) for i in same if i is not None]
    width = float(np.median(widths))
    effect = minimum_detectable_effect(RatioInterval(1.0, 1.0 - width / 2, 1.0 + width / 2))
    assert effect > 0.011  # otherwise the margin decides, and nothing is tested
    told = [change(ratio_interval([run(1.0)], [run(1.0 + effect)], resamples=1000)) for _ in range(tries)]
    assert told.count("SLOWER") / tries == pytest.approx(0.8, abs=0.1)
    assert "FASTER" not in told


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

"""The medians of a pattern's phases are those of numpy."""

from __future__ import annotations

import numpy as np

from lm_profiler.analysis.steps.patterns import _phase_medians


def test_medians_of_phases_equal_nanmedian_on_random_series() -> None:
    random = np.random.default_rng(0)
    for n in range(6, 160):
        values = random.normal(size=n).round(int(random.integers(1, 16)))  # few digits: with ties
        for p in range(2, n // 3 + 1):
            padded = np.append(values, np.full(-n % p, np.nan)).reshape(-1, p)
            assert np.array_equal(_phase_medians(values, p), np.nanmedian(padded, axis=0)), (n, p)

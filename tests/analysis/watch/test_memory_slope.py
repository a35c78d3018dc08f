"""A leak is told with its size; what fills up, jumps or only varies is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lm_profiler.analysis.watch.memory_slope import MemorySlope

GIB = 2.0**30


def first(held: Callable[[float], float], seconds: int = 20_000) -> float | None:
    slope, rng = MemorySlope(), np.random.default_rng(0)
    values = (slope.add(at, held(at) * (1.0 + 0.002 * rng.random())) for at in range(seconds))
    return next((each for each in values if each is not None), None)


def test_a_leak_is_told_with_its_size() -> None:
    assert first(lambda at: 2 * GIB + 2**20 * at) == pytest.approx(2**20, rel=0.1)


def test_what_is_no_leak_is_not_told() -> None:
    assert first(lambda at: 2 * GIB) is None
    assert first(lambda at: 2 * GIB * (2.0 - np.exp(-at / 100.0))) is None
    assert first(lambda at: (2 if at < 3000 else 3) * GIB) is None

"""What a page fault costs here."""

from __future__ import annotations

import pytest

from lm_profiler.measure.device import fault_cost as module
from lm_profiler.measure.device.fault_cost import fault_cost


def test_it_is_the_time_of_the_first_touch_less_that_of_the_second_over_the_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults, now = iter(range(0, 10_000, 100)), iter(range(10_000))
    monkeypatch.setattr(module, "_faults", faults.__next__)
    passed = [0.0, 5.0, 6.0]  # the first touch takes 5 s, the second one 1
    cost = fault_cost(lambda: 10.0 * ((n := next(now)) // 3) + passed[n % 3])
    assert cost is not None
    assert cost == pytest.approx(((5.0 - 1.0) / 100, (5.0 - 1.0) / 100))


def test_whatever_lengthens_some_touches_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three times, the first touch is the least in one and the second in another."""
    faults = iter(range(0, 10_000, 100))
    monkeypatch.setattr(module, "_faults", faults.__next__)
    passed = [(5.0, 9.0), (7.0, 1.0), (6.0, 8.0)] * 2
    now = iter([at for first, again in passed for at in (0.0, first, first + again)])
    assert fault_cost(now.__next__) == pytest.approx(((5.0 - 1.0) / 100,) * 2)


def test_without_faults_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_faults", lambda: 7)
    assert fault_cost() is None


def test_on_this_machine_it_is_some_nanoseconds_to_milliseconds() -> None:
    cost = fault_cost()
    assert cost is not None
    assert all(20e-9 < seconds < 20e-3 for seconds in cost)

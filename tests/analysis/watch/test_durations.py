"""Validations and checkpoints that take long are reported, once or as a course."""

from collections.abc import Sequence

import pytest

from lm_profiler.analysis.watch.durations import Durations, LongDurations


def long_durations(durations_s: Sequence[float]) -> list[LongDurations]:
    durations = Durations()
    events: list[LongDurations] = []
    for number, duration_s in enumerate(durations_s, 1):
        durations.add(duration_s, step=1000 * number, at_s=float(number), step_s=0.005)
        events += [event for event in durations.take_changed() if event not in events]
    durations.finish()
    events += [event for event in durations.take_changed() if event not in events]
    return [event for event in events if not event.is_withdrawn]


def test_a_validation_that_grows_by_a_quarter_each_time_is_a_drift() -> None:
    (event,) = long_durations([0.1 * 1.25**number for number in range(12)])
    assert event.is_drift
    assert (event.against_s, event.now_s) == pytest.approx((0.1, 0.1 * 1.25**11))
    assert event.first_step <= 6000


def test_one_long_checkpoint_among_usual_ones() -> None:
    (event,) = long_durations([0.2, 0.21, 0.19, 0.7, 0.2, 0.2])
    assert (event.first_step, event.times, event.is_drift) == (4000, 1, False)
    assert (event.now_s, event.against_s) == pytest.approx((0.7, 0.2))


def test_long_ones_that_repeat_are_counted() -> None:
    (event,) = long_durations([2.0, 2.1, 1.9, 2.0, 2.1, 6.0, 2.0, 2.0, 6.2, 2.0])
    assert event.times == 2
    assert event.excess_s == pytest.approx(8.2, abs=0.1)


def test_durations_that_vary_are_not_reported() -> None:
    assert long_durations([2.0, 2.4, 1.8, 2.2, 2.5, 1.9, 2.3, 2.1, 2.4, 1.7] * 5) == []


def test_a_drift_that_ends_has_its_end() -> None:
    (event,) = long_durations([1.0] * 5 + [2.0] * 5 + [1.0] * 3)
    assert event.until_step == 11_000


@pytest.mark.parametrize(
    "duration_s, gap_s, reports_cost, is_found",
    [(0.7, 2.0, True, True), (0.7, 20.0, True, False), (0.02, 0.1, True, False), (0.7, 2.0, False, False)],
)
def test_epoch_boundaries_that_all_take_long_are_a_cost(
    duration_s: float, gap_s: float, reports_cost: bool, is_found: bool
) -> None:
    durations = Durations(reports_cost=reports_cost)
    for number in range(10):
        durations.add(duration_s, step=800 * number, at_s=number * (gap_s + duration_s), step_s=0.0025)
    durations.finish()
    events = durations.take_changed()
    assert bool(events) == is_found
    if events:
        (cost,) = events
        assert (cost.times, cost.now_s, cost.excess_s) == (9, pytest.approx(0.7), pytest.approx(6.3))
        assert cost.share == pytest.approx(0.7 / 2.7)


def test_epoch_boundaries_that_are_handed_over_together_are_no_cost_yet() -> None:
    """They have the same time, so their share of it is unknown."""
    durations = Durations(reports_cost=True)
    for _ in range(6):
        durations.add(0.06, step=600, at_s=10.0, step_s=0.005)
    assert durations.take_changed() == []
    for number in range(6):
        durations.add(0.06, step=700 + number, at_s=20.0 + 5 * number, step_s=0.005)
    durations.finish()
    assert durations.take_changed() == []

"""Slow steps are found with their phase and grouped with their rhythm and cost; noise is not reported."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lm_profiler.analysis.watch.slow_steps import Occurrence, SlowStep, SlowStepGroups
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import WatchEvent, latest_events

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])


def parts_of(steps: int, seed: int = 0) -> NDArray[np.float64]:
    """Return the parts of steps of 5 ms that vary by 2 %, with a delay of 1 to 20 ms somewhere in one of 200."""
    rng = np.random.default_rng(seed)
    parts_s = 0.005 * np.exp(0.02 * rng.standard_normal(steps))[:, None] * SHARES
    delayed = np.flatnonzero(rng.random(steps) < 0.005)
    parts_s[delayed, rng.integers(len(PARTS), size=len(delayed))] += 0.001 * 20 ** rng.random(len(delayed))
    return parts_s


def events_of(parts_s: NDArray[np.float64], steps_together: int = 190) -> list[WatchEvent]:
    seconds = np.column_stack([parts_s, parts_s.sum(axis=1)])
    ends = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    ns = np.column_stack([np.concatenate([[0], ends[:-1]]), ends])
    run = WatchedRun(workers=0)
    events: list[WatchEvent] = []
    for first in range(0, len(seconds), steps_together):
        chunk = slice(first, first + steps_together)
        events += run.add(ns[chunk], seconds[chunk])
    return latest_events([*events, *run.finish()])


def test_one_slow_step_in_each_phase() -> None:
    planted = {1500: ("data", 1.0), 3000: ("forward", 2.0), 5000: ("backward", 5.0), 7000: ("optimizer", 1.0)}
    parts_s = parts_of(12_000)
    for step, (part, seconds) in planted.items():
        parts_s[step - 1, PARTS.index(part)] += seconds
    events = events_of(parts_s)
    assert [(event.step, event.part, event.times) for event in events] == [
        (step, part, 1) for step, (part, _) in planted.items()
    ]
    assert [event.cost_s for event in events] == pytest.approx([seconds for _, seconds in planted.values()], rel=0.05)


def test_five_short_stalls_are_one_event() -> None:
    planted = [1700, 3900, 5100, 8000, 11_990]
    parts_s = parts_of(12_000)
    parts_s[np.array(planted) - 1, PARTS.index("forward")] += 0.085
    (event,) = events_of(parts_s)
    assert (event.kind, event.part, event.steps) == ("slow step", "forward", planted)
    assert event.cost_s == pytest.approx(5 * 0.085, rel=0.1)


@pytest.mark.parametrize("every, steps", [(1000, 50_000), (5, 12_000)])
def test_slow_steps_that_come_regularly_are_one_event_with_their_rhythm(every: int, steps: int) -> None:
    parts_s = parts_of(steps)
    parts_s[every - 1 :: every] += 0.045 * SHARES
    (event,) = events_of(parts_s)
    assert event.every_steps == every
    assert event.cost_s == pytest.approx(steps / every * 0.045, rel=0.1)


@pytest.mark.parametrize("grows", [True, False])
def test_growing_slow_steps_are_reported_with_their_first_and_last_times(grows: bool) -> None:
    parts_s = parts_of(8000)
    slow = list(range(666, 8000, 666))
    delays_s = [0.1 + 0.02 * number for number in range(len(slow))]
    if not grows:
        delays_s = [delays_s[number * 5 % len(slow)] for number in range(len(slow))]
    parts_s[slow, 0] += delays_s
    event = max(events_of(parts_s), key=lambda event: event.times)
    if grows:
        assert event.grew_from_s == pytest.approx(0.11, abs=0.03)
        assert event.grew_to_s == pytest.approx(0.31, abs=0.03)
    else:
        assert event.grew_from_s is None


def test_ten_slow_steps_of_a_real_run_take_longer_and_longer() -> None:
    """A logger that rewrites its file: the milliseconds are those of a real training."""
    delays_ms = [18.3, 20.2, 20.7, 24.5, 17.1, 40.9, 33.1, 35.6, 41.9, 48.5]
    parts_s = parts_of(3000)
    parts_s[400 : 400 + 250 * 10 : 250, PARTS.index("other")] += np.array(delays_ms) * 1e-3
    (event,) = events_of(parts_s)
    assert event.every_steps == 250
    assert (event.grew_from_s, event.grew_to_s) == pytest.approx((0.0183 + 0.005, 0.0485 + 0.005), rel=0.02)


@pytest.mark.parametrize("steps_after", [1, 30])
def test_a_slow_step_beside_a_trace_belongs_to_its_group(steps_after: int) -> None:
    """Steps 1,001 to 1,003 are traced. The slow steps come every 200 steps but for one, soon after the trace."""
    parts_s = 0.005 * np.exp(0.02 * np.random.default_rng(0).standard_normal(3000))[:, None] * SHARES
    slow = [200, 400, 600, 800, 999, 1003 + steps_after, 1200, 1400, 1600, 1800]
    parts_s[np.array(slow) - 1, PARTS.index("data")] += 0.03
    seconds = np.column_stack([parts_s, parts_s.sum(axis=1)])
    ends = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    ns = np.column_stack([np.concatenate([[0], ends[:-1]]), ends])
    run = WatchedRun(workers=0)
    events = run.add(ns[:1000], seconds[:1000])
    run.skip(3)
    events += run.add(ns[1003:], seconds[1003:]) + run.finish()
    (event,) = latest_events(events)
    assert event.steps == slow


def test_every_fifth_step_that_is_slow_from_somewhere_on() -> None:
    parts_s = parts_of(12_000)
    parts_s[6000::5] += 0.006 * SHARES
    events = [event for event in events_of(parts_s) if event.kind == "slow step"]
    assert [event.every_steps for event in events] == [5]
    assert events[0].step == pytest.approx(6001, abs=5)


def test_steps_that_are_long_by_chance_are_one_event_with_their_share() -> None:
    rng = np.random.default_rng(1)
    parts_s = parts_of(50_000)
    parts_s[rng.random(50_000) < 0.1] += 0.01 * SHARES
    (event,) = events_of(parts_s)
    assert event.kind == "slow step"
    assert event.every_steps is None
    assert event.share == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("is_in_one_part", [True, False])
def test_irregular_delays_of_one_part_are_an_event_at_a_small_cost(is_in_one_part: bool) -> None:
    """In one of 125 steps of 5 ms a matching takes 8 to 16 ms longer: 1.9 % of the time. Others delay any part."""
    rng = np.random.default_rng(3)
    parts_s = parts_of(8_000)
    delayed = np.flatnonzero(rng.random(8_000) < 1 / 125)
    parts = np.full(len(delayed), PARTS.index("forward"))
    if not is_in_one_part:
        parts = rng.choice(len(PARTS), size=len(delayed), p=SHARES / SHARES.sum())
    parts_s[delayed, parts] += rng.uniform(0.008, 0.016, len(delayed))
    events = events_of(parts_s)
    assert [event.part for event in events] == ["forward"] * is_in_one_part


@pytest.mark.parametrize("seed", range(4))
def test_delays_by_others_are_no_event_of_the_part_that_takes_most_of_a_step(seed: int) -> None:
    """Backward takes 85 % of a step, and so it has 85 % of the delays, which cost 1.5 % of the time."""
    rng = np.random.default_rng(seed)
    shares = np.array([0.01, 0.01, 0.05, 0.01, 0.85, 0.01, 0.04, 0.02])
    parts_s = 0.02 * np.exp(0.02 * rng.standard_normal(4_000))[:, None] * shares
    delayed = np.flatnonzero(rng.random(4_000) < 1 / 80)
    parts = rng.choice(len(PARTS), size=len(delayed), p=shares)
    parts_s[delayed, parts] += rng.uniform(0.015, 0.033, len(delayed))
    assert events_of(parts_s) == []


def test_short_delays_alone_are_not_reported() -> None:
    assert events_of(parts_of(300_000, seed=2), steps_together=500) == []


def test_delays_by_other_processes_are_one_event_of_any_size() -> None:
    groups = SlowStepGroups()
    for step, excess_s in ((100, 0.02), (200, 0.2), (300, 2.0), (400, 0.05)):
        slow = SlowStep(
            step=step,
            begin_ns=0,
            end_ns=0,
            step_s=0.005 + excess_s,
            usual_s=0.005,
            part="forward",
            part_s=excess_s,
            data_s=0.0,
            usual_data_s=0.0,
        )
        occurrence = Occurrence(
            slow=slow, at_s=step * 0.005, cause="waiting for a CPU", cause_s=excess_s, starts_epoch=False
        )
        groups.add(occurrence, watched_s=step * 0.005)
    (group,) = groups.to_write(at_s=3.0, run_is_over=True)
    assert (group.times, group.part) == (4, None)
    assert group.excess_s == pytest.approx(2.27)

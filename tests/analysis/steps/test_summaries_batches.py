"""Batches and samples of a mean step, from where they change."""

from __future__ import annotations

import pytest
from stored_texts import assert_stored

from lm_profiler.analysis.steps.summaries import BatchCount, changed_batches_note, lasting_step_s, mean_counts
from lm_profiler.record.run_record import LoaderFacts

GROWING = [BatchCount(1, 1, 2), BatchCount(5, 4, 8)]


def test_the_mean_is_over_the_steps_asked_for_and_all_ranks() -> None:
    assert mean_counts([GROWING], [3, 4, 5, 6])[:2] == (2.5, 5.0)
    assert mean_counts([GROWING, [BatchCount(1, 1, 3)]], [1, 2])[:2] == (2.0, 5.0)


def test_what_nobody_counted_is_unknown() -> None:
    for ranks, steps in (([], [1]), ([GROWING], []), ([GROWING, []], [1])):
        assert mean_counts(ranks, steps)[:2] == (None, None)
    assert mean_counts([[BatchCount(1, 0, None)]], [1])[:2] == (None, None)
    assert mean_counts([[BatchCount(1, 2, None)]], [1])[:2] == (2.0, None)
    assert mean_counts([[BatchCount(1, 2, 4), BatchCount(3, 2, None)]], [1, 2, 3])[:2] == (2.0, None)


def test_a_note_says_where_batches_change() -> None:
    assert_stored("analysis/notes: changed batches", {"of 6 steps": changed_batches_note(GROWING, 6, 2.5)})
    assert changed_batches_note(GROWING, 4, 1.0) == []
    assert changed_batches_note([BatchCount(1, 2, 4), BatchCount(3, 2, 1)], 9, 2.0) == []


PREFETCH = 2


def simulated(work_s: float, fetch_s: float, workers: int, first_s: float, steps: int) -> tuple[list[float], list[int]]:
    """When each step of the loop ended, and how many batches were ready then.

    A worker has at most ``PREFETCH`` batches asked of it that were not taken; batches go to workers in turns.
    """
    made, taken, ready = list[float](), list[float](), list[int]()
    for batch in range(steps + workers * PREFETCH):
        asked_s = taken[batch - workers * PREFETCH] if batch >= workers * PREFETCH else 0.0
        before_s = made[batch - workers] if batch >= workers else 0.0
        made.append(max(asked_s, before_s) + fetch_s)
        if len(taken) < steps and len(made) > len(taken):
            at = len(taken)
            begun_s = taken[-1] + (first_s if at == 1 else work_s) if taken else 0.0
            taken.append(max(begun_s, made[at]))
    ends = [taken[at] + (first_s if at == 0 else work_s) for at in range(steps)]
    for at, end_s in enumerate(ends):
        ready.append(sum(when <= end_s for when in made) - at - 1)
    return ends, ready


@pytest.mark.parametrize(
    "work_s,fetch_s,workers",
    [
        (0.010, 0.060, 4),  # the workers make one in 15 ms, and the queue is not empty when the steps end
        (0.010, 0.045, 4),
        (0.001, 0.100, 3),
        (0.010, 0.019, 2),  # the loop is the slower one
        (0.010, 0.004, 1),
    ],
)
def test_a_queue_that_shrinks_tells_the_rate_of_the_workers(work_s: float, fetch_s: float, workers: int) -> None:
    ends, ready = simulated(work_s, fetch_s, workers, first_s=2.0, steps=26)
    warm, last = 5, 25
    mean_s = (ends[last] - ends[warm]) / (last - warm)
    facts = LoaderFacts(workers=workers, ahead=workers * PREFETCH, ready_before=ready[warm], ready_after=ready[last])
    told = lasting_step_s(mean_s, last - warm, 1, facts) or 0.0
    truth = max(work_s, fetch_s / workers)
    if truth == work_s:
        assert told == pytest.approx(truth)
        return
    made = last - warm - (facts.used_up or 0)
    assert told == pytest.approx(truth, rel=workers / 2 / made)


def test_elements_are_a_mean_over_steps_and_a_sum_over_ranks() -> None:
    lengths = [BatchCount(1, 1, 2, 20), BatchCount(2, 1, 2, 40), BatchCount(3, 1, 2, 60)]
    assert mean_counts([lengths, lengths], [1, 2, 3, 4]).elements == 2 * 45.0  # the last lasts
    assert mean_counts([lengths, [BatchCount(1, 1, 2)]], [1]).elements is None

"""Batches and samples of a mean step, from where they change."""

from __future__ import annotations

from lm_profiler.analysis.steps.batch_counts import BatchCount, changed_batches_note, mean_counts

GROWING = [BatchCount(1, 1, 2), BatchCount(5, 4, 8)]


def test_the_mean_is_over_the_steps_asked_for_and_all_ranks() -> None:
    assert mean_counts([GROWING], [3, 4, 5, 6]) == (2.5, 5.0)
    assert mean_counts([GROWING, [BatchCount(1, 1, 3)]], [1, 2]) == (2.0, 5.0)


def test_what_nobody_counted_is_unknown() -> None:
    assert mean_counts([], [1]) == mean_counts([GROWING], []) == mean_counts([GROWING, []], [1]) == (None, None)
    assert mean_counts([[BatchCount(1, 0, None)]], [1]) == (None, None)
    assert mean_counts([[BatchCount(1, 2, None)]], [1]) == (2.0, None)
    assert mean_counts([[BatchCount(1, 2, 4), BatchCount(3, 2, None)]], [1, 2, 3]) == (2.0, None)


def test_a_note_says_where_batches_change() -> None:
    assert "1 to 4 batches, from step 5 on" in changed_batches_note(GROWING, 6, 2.5)[0]
    assert changed_batches_note(GROWING, 4, 1.0) == []
    assert changed_batches_note([BatchCount(1, 2, 4), BatchCount(3, 2, 1)], 9, 2.0) == []

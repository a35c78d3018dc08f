"""Figures from rows, against the statistics of the standard library."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from made_environment import made_step
from stored_texts import assert_stored
from tabled import made_run_of, step_rows

from lm_profiler.analysis.steps.summaries import (
    BatchCount,
    changed_batches_note,
    judged_after_warmups,
    lasting_step_s,
    mean_counts,
    mean_over_ranks,
    model_of,
    rank_medians,
    readable,
    scalars,
    step_figures,
    steps_after,
    summaries,
    throughput,
)
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import LoaderFacts, Steadiness, Throughput, TimeSummary
from lm_profiler.record.steps import UNKNOWN, StepRow, StepTable


def row(step: int, forward_ms: float = 3.0, backward_ms: float = 5.0, **options: Any) -> StepRow:
    """Forward, backward, and 2 ms of other; on the host a tenth of it."""
    seconds = {"forward": forward_ms / 1000, "backward": backward_ms / 1000, "other": 2e-3}
    return made_step(step, seconds, host=0.1, **options)


def times_of(rows: list[StepRow]) -> dict[str, TimeSummary]:
    return summaries(rows, "device", model_of(rows, keeps_all_steps=True))


def test_means_over_ranks_are_those_of_brute_force() -> None:
    """Three steps of three ranks in any order, with tokens 10, 11 and 12; the row of rank 0's third step is missing."""
    rng = np.random.default_rng(0)
    rows = []
    for rank in (2, 0, 1):
        for step in (1, 2, 3):
            rows.append(row(step, float(rng.uniform(1, 9)), rank=rank, tokens=10 + rank))
    rows = [row for row in rows if (row.rank, row.step) != (0, 3)]
    for mean in mean_over_ranks(rows):
        of_step = [row for row in rows if row.step == mean.step]
        assert mean.time("forward") == pytest.approx(fmean(row.time("forward") for row in of_step))
        assert mean.time("step", "host") == pytest.approx(fmean(row.time("step", "host") for row in of_step))
        assert mean.tokens == (None if mean.step == 3 else 10 + 11 + 12)
    assert [mean.tokens for mean in mean_over_ranks(rows, world=4)] == [None] * 3


def test_two_ranks_have_means_of_times_sums_of_tokens_and_peaks_of_memory() -> None:
    rows = [
        row(2, forward_ms=3.0, tokens=10, memory=(5, None, 1), rank=0),
        row(1, forward_ms=1.0, tokens=10, rank=1),
        row(2, forward_ms=7.0, tokens=30, memory=(4, None, 2), rank=1),
        row(1, forward_ms=2.0, tokens=None, rank=0),
    ]
    first, second = mean_over_ranks(rows)
    assert (first.step, second.step) == (1, 2)
    assert second.time("forward") == pytest.approx(5e-3)
    assert sum(second.time(part) for part in PARTS) == pytest.approx(second.time("step"), abs=1e-12)
    assert second.tokens == 10 + 30
    assert first.tokens is None  # unknown on one rank is unknown
    assert second.memory == (5, None, 2)


def test_a_step_without_device_times_on_one_rank_has_none() -> None:
    (mean,) = mean_over_ranks([row(1), row(1, seconds=None, rank=1)])
    assert mean.seconds is None
    assert mean.time("step", "host") == pytest.approx(1e-3)


def test_rank_medians_are_host_times_in_the_order_of_ranks() -> None:
    """With 7 ms of backward and other, steps take 10 and 20 ms; on the host a tenth of it."""
    slower_rank = [row(step, forward_ms=13.0, rank=1) for step in (1, 2, 3)]
    faster_rank = [row(step, forward_ms=3.0, rank=0) for step in (1, 2, 3)]
    assert rank_medians(slower_rank + faster_rank) == pytest.approx([1e-3, 2e-3])
    assert rank_medians([]) == []


def test_scalars_are_in_the_units_of_their_tags() -> None:
    """A step of 3 + 5 + 2 ms; on the host a tenth of it."""
    values = scalars(row(1, forward_ms=3.0, backward_ms=5.0, tokens=50, memory=(2**30, None, 2**29)))
    assert values["time_ms/forward"] == pytest.approx(3.0)
    assert values["host_time_ms/forward_backward"] == pytest.approx(0.1 * (3.0 + 5.0))
    assert values["time_ms/step"] == pytest.approx(10.0)
    assert values["memory_gib/allocated_peak"] == 1.0
    assert values["memory_gib/resident_peak"] == 0.5
    assert "memory_gib/reserved_peak" not in values
    assert values["throughput/tokens_per_s"] == pytest.approx(50 / 10e-3)
    values = scalars(row(1, seconds=None, tokens=50, memory=UNKNOWN))
    assert all(tag.startswith("host_time_ms/") for tag in values)
    assert "throughput/tokens_per_s" not in scalars(row(1))


def test_throughput_is_all_tokens_over_all_time() -> None:
    """Steps of 10, 50 and 10 ms: backward and other take 7."""
    rows = [row(1, 3.0, tokens=100), row(2, 43.0, tokens=130), row(3, 3.0, tokens=100)]
    found = throughput(rows, times_of(rows)["step"].mean)
    assert found.tokens_per_step == (100 + 130 + 100) / 3
    assert found.tokens_per_s == pytest.approx((100 + 130 + 100) / 70e-3)
    rows = [row(1), row(2)]
    found = throughput(rows, times_of(rows)["step"].mean)
    assert found.tokens_per_step is None
    assert found.tokens_per_s is None


def test_without_a_setting_the_steps_are_those_of_the_record() -> None:
    """Two steps of warm-up are cut, and the 3 of the measured ones that the record's ``cut`` counts."""
    entry = made_run_of("a", MEASURED_S, WARMUP_S)
    steadiness = Steadiness(word="steady", cut=3, drift=0.0, lag1=0.0, bias_of_mean=None, evidence="", recompilations=0)
    rows = StepTable.from_rows(entry.rows)
    entry = replace(entry, record=entry.record.model_copy(update={"steadiness": steadiness}))
    entry.__dict__["rows"] = rows
    assert [row.time("forward") for row in steps_after(entry).rows] == pytest.approx(FORWARD_S[2 + 3 :])


def test_an_odd_step_has_the_part_that_differs_most() -> None:
    """Of steps of 10 ms one has 20 ms more of backward, and one 10 ms more of forward."""
    rng = np.random.default_rng(0)
    rows = []
    for step in range(1, 41):
        forward_ms = 13.0 if step == 20 else 3.0 + float(rng.normal(0, 0.02))
        backward_ms = 25.0 if step == 9 else 5.0
        rows.append(row(step, forward_ms, backward_ms))
    slow_backward, slow_forward = step_figures(rows, model_of(rows))["odd_steps"]
    assert (slow_backward.step, slow_backward.part) == (9, "backward")
    assert slow_backward.ratio == pytest.approx(3.0, rel=0.02)
    assert slow_backward.excess_s == pytest.approx(20e-3, rel=0.02)
    assert (slow_forward.step, slow_forward.part) == (20, "forward")


def test_an_odd_step_is_compared_with_its_own_level() -> None:
    """The first 30 of 50 steps take 40 ms and the rest 10; one of the rest takes 30, due to backward."""
    rng = np.random.default_rng(1)
    rows = []
    for step in range(1, 51):
        forward_ms = 33.0 if step <= 30 else 3.0
        backward_ms = 25.0 if step == 44 else 5.0
        rows.append(row(step, forward_ms + float(rng.normal(0, 0.02)), backward_ms))
    model = model_of(rows)
    (odd,) = step_figures(rows, model)["odd_steps"]
    assert (model.begin, model.end) == (0, 30)
    assert (odd.step, odd.part) == (44, "backward")
    assert odd.excess_s == pytest.approx(20e-3, rel=0.02)


GROWING = [BatchCount(step=1, batches=1, samples=2), BatchCount(step=5, batches=4, samples=8)]


@pytest.mark.parametrize(
    "ranks, steps, batches, samples",
    [
        # A count holds until the next one: two steps of 1 batch of 2 samples, then two of 4 batches of 8.
        ([GROWING], [3, 4, 5, 6], (1 + 1 + 4 + 4) / 4, (2 + 2 + 8 + 8) / 4),
        ([GROWING, [BatchCount(step=1, batches=1, samples=3)]], [1, 2], 1 + 1, 2 + 3),  # the sum over ranks
        ([], [1], None, None),
        ([GROWING], [], None, None),
        ([GROWING, []], [1], None, None),  # the second rank counted nothing
        ([[BatchCount(step=1, batches=0, samples=None)]], [1], None, None),
        ([[BatchCount(step=1, batches=2, samples=None)]], [1], 2, None),
        ([[BatchCount(step=1, batches=2, samples=4), BatchCount(step=3, batches=2, samples=None)]], [1, 2, 3], 2, None),
    ],
)
def test_batches_and_samples_are_means_over_steps_of_sums_over_ranks(
    ranks: list[list[BatchCount]], steps: list[int], batches: float | None, samples: float | None
) -> None:
    means = mean_counts(ranks, steps)
    assert (means.batches, means.samples) == (batches, samples)


def test_elements_are_means_over_steps_and_unknown_unless_every_rank_counts_them() -> None:
    counts = [BatchCount(step, batches=1, samples=2, elements=20 * step) for step in (1, 2, 3)]
    one_rank = (20 + 40 + 60 + 60) / 4  # step 4 has the last count
    assert mean_counts([counts, counts], [1, 2, 3, 4]).elements == 2 * one_rank
    assert mean_counts([counts, [BatchCount(step=1, batches=1, samples=2)]], [1]).elements is None


def test_a_note_reports_batches_that_grow() -> None:
    assert_stored("analysis/notes: changed batches", {"of 6 steps": changed_batches_note(GROWING, 6, 2.5)})
    assert changed_batches_note(GROWING, 4, 1.0) == []
    fewer_samples = [BatchCount(step=1, batches=2, samples=4), BatchCount(step=3, batches=2, samples=1)]
    assert changed_batches_note(fewer_samples, 9, 2.0) == []


PREFETCH = 2


def simulated_loader(
    work_s: float, fetch_s: float, workers: int, first_s: float, steps: int
) -> tuple[list[float], list[int]]:
    """When each step of the loop ended, and how many batches were ready then.

    A worker has at most ``PREFETCH`` batches asked of it that were not taken; batches go to workers in turns.
    """
    made_at_s, taken_at_s = list[float](), list[float]()
    for batch in range(steps + workers * PREFETCH):
        asked_at_s = taken_at_s[batch - workers * PREFETCH] if batch >= workers * PREFETCH else 0.0
        last_made_at_s = made_at_s[batch - workers] if batch >= workers else 0.0
        made_at_s.append(max(asked_at_s, last_made_at_s) + fetch_s)
        step = len(taken_at_s)
        if step < steps and len(made_at_s) > step:
            previous_step_s = first_s if step == 1 else work_s
            wanted_at_s = taken_at_s[-1] + previous_step_s if taken_at_s else 0.0
            taken_at_s.append(max(wanted_at_s, made_at_s[step]))

    ends_s, ready = list[float](), list[int]()
    for step, begin_s in enumerate(taken_at_s):
        end_s = begin_s + (first_s if step == 0 else work_s)
        ends_s.append(end_s)
        ready.append(sum(when_s <= end_s for when_s in made_at_s) - step - 1)
    return ends_s, ready


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
def test_a_queue_that_shrinks_shows_the_rate_of_the_workers(work_s: float, fetch_s: float, workers: int) -> None:
    ends_s, ready = simulated_loader(work_s, fetch_s, workers, first_s=2.0, steps=26)
    first, last = 5, 25
    steps = last - first
    mean_s = (ends_s[last] - ends_s[first]) / steps
    facts = LoaderFacts(workers=workers, ahead=workers * PREFETCH, ready_before=ready[first], ready_after=ready[last])
    step_s = lasting_step_s(mean_s, steps, 1, facts)
    is_slower_loop = work_s >= fetch_s / workers
    if is_slower_loop:
        assert step_s == pytest.approx(work_s)
        return
    batches_made = steps - (facts.used_up or 0)
    assert step_s == pytest.approx(fetch_s / workers, rel=workers / 2 / batches_made)


RNG = np.random.default_rng(0)
WARMUP_S = [(3.0, 1.0), (0.5, 0.6)]
MEASURED_S = [tuple(pair) for pair in RNG.uniform(0.1, 0.2, size=(10, 2))]
FORWARD_S = np.array([*WARMUP_S, *MEASURED_S])[:, 0]


def test_ranks_are_averaged():
    """Rank 1 takes three times as long as rank 0, so the mean is twice as long; steps of other stages do not count."""
    entry = made_run_of("a", MEASURED_S, WARMUP_S)
    rank_0 = step_rows(MEASURED_S, WARMUP_S)
    rank_1 = []
    for step in rank_0:
        rank_1.append(replace(step, rank=1, seconds=tuple(3 * seconds for seconds in step.seconds)))
    of_memory_stage = replace(rank_0[0], step=13, stage="memory")
    entry.__dict__["rows"] = StepTable.from_rows([*rank_0, *rank_1, of_memory_stage])
    assert [row.time("forward") for row in steps_after(entry, 1).rows] == pytest.approx(2 * FORWARD_S[1:])


def test_a_run_that_died_has_no_steps_to_cut() -> None:
    died = made_run_of("died", failed=("oom", "no memory left"))
    good, problems = readable([made_run_of("a", MEASURED_S), died])
    assert [str(entry.folder) for entry in good] == ["a"]
    assert_stored("analysis/notes: no steps to cut", {"one that died": problems})


def test_samples_of_a_cut_are_those_of_its_own_steps() -> None:
    """Warm-up steps have 2 samples, measured ones 5 and 6 in turn: 5.5 in each mean step of 0.4 s, whatever the cut."""
    own = made_run_of("a", [(0.1, 0.3)] * 10, [(0.1, 0.3)] * 2)
    warmup = BatchCount(step=1, batches=1, samples=2)
    measured = [BatchCount(step, batches=1, samples=5 + step % 2) for step in range(3, 13)]
    cuts, problems = judged_after_warmups([own], [0, 2, 4], None, lambda folder: [[warmup, *measured]])
    assert problems == []
    found = [entry.record.throughput.samples_per_s for entry in cuts]
    assert found == pytest.approx([(2 * 2 + 10 * 5.5) / 12 / 0.4, 5.5 / 0.4, 5.5 / 0.4])


def test_without_counts_the_samples_are_those_of_the_run() -> None:
    """The mean is 5.5 samples per step, stored rounded as 6; the warm-up steps took twice as long."""
    own = made_run_of("a", [(0.1, 0.3)] * 10, [(0.2, 0.6)] * 2)
    rate = Throughput(tokens_per_step=None, tokens_per_s=None, samples_per_step=6, samples_per_s=5.5 / 0.4)
    entry = replace(own, record=own.record.model_copy(update={"throughput": rate}))
    entry.__dict__["rows"] = own.rows
    cuts, _ = judged_after_warmups([entry], [0, 2], None)
    found = [cut.record.throughput.samples_per_s for cut in cuts]
    assert found == pytest.approx([5.5 / ((2 * 0.8 + 10 * 0.4) / 12), 5.5 / 0.4])

"""Figures from rows, against the statistics of the standard library."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_environment import made_step
from stored_texts import assert_stored
from tabled import run, step_rows

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
    rng = np.random.default_rng(0)
    numbers = [(rank, step) for rank in (2, 0, 1) for step in (1, 2, 3)]
    rows = [row(step, float(rng.uniform(1, 9)), rank=rank, tokens=10 + rank) for rank, step in numbers]
    del rows[5]  # rank 0's third step
    for mean in mean_over_ranks(rows):
        own = [each for each in rows if each.step == mean.step]
        assert mean.time("forward") == pytest.approx(sum(each.time("forward") for each in own) / len(own))
        assert mean.time("step", "host") == pytest.approx(sum(each.time("step", "host") for each in own) / len(own))
        assert mean.tokens == (33 if mean.step < 3 else None)
    assert [mean.tokens for mean in mean_over_ranks(rows, world=4)] == [None] * 3
    rows = [
        row(2, 3.0, tokens=10, memory=(5, None, 1), rank=0),
        row(1, 1.0, tokens=10, rank=1),
        row(2, 7.0, tokens=30, memory=(4, None, 2), rank=1),
        row(1, 2.0, tokens=None, rank=0),
    ]
    first, second = mean_over_ranks(rows)
    assert (first.step, second.step) == (1, 2)
    assert second.time("forward") == pytest.approx(5e-3)
    assert sum(second.time(part) for part in PARTS) == pytest.approx(second.time("step"), abs=1e-12)
    assert (second.tokens, first.tokens) == (40, None)  # unknown on one rank is unknown
    assert second.memory == (5, None, 2)
    (step,) = mean_over_ranks([row(1), row(1, seconds=None, rank=1)])
    assert step.seconds is None
    assert step.time("step", "host") == pytest.approx(1e-3)
    rows = [row(n, forward, rank=rank) for rank, forward in ((1, 13.0), (0, 3.0)) for n in (1, 2, 3)]
    assert rank_medians(rows) == pytest.approx([1e-3, 2e-3])
    assert rank_medians([]) == []


def test_scalars_are_in_the_units_of_their_tags() -> None:
    values = scalars(row(1, tokens=50, memory=(2**30, None, 2**29)))
    assert values["time_ms/forward"] == pytest.approx(3.0)
    assert values["host_time_ms/forward_backward"] == pytest.approx(0.8)
    assert values["time_ms/step"] == pytest.approx(10.0)
    assert values["memory_gib/allocated_peak"] == 1.0
    assert values["memory_gib/resident_peak"] == 0.5
    assert "memory_gib/reserved_peak" not in values
    assert values["throughput/tokens_per_s"] == pytest.approx(5000)
    values = scalars(row(1, seconds=None, tokens=50, memory=UNKNOWN))
    assert all(tag.startswith("host_time_ms/") for tag in values)
    assert "throughput/tokens_per_s" not in scalars(row(1))


def test_throughput_is_all_tokens_over_all_time() -> None:
    rows = [row(1, tokens=100), row(2, 43.0, tokens=130), row(3, tokens=100)]
    found = throughput(rows, times_of(rows)["step"].mean)
    assert found.tokens_per_step == 110
    assert found.tokens_per_s == pytest.approx(330 / 70e-3)
    rows = [row(1), row(2)]
    found = throughput(rows, times_of(rows)["step"].mean)
    assert found.tokens_per_step is None
    assert found.tokens_per_s is None


def test_without_a_setting_the_steps_are_those_of_the_record() -> None:
    entry = run("a", MEASURED_S, WARMUP_S)
    cut = Steadiness(word="steady", cut=3, drift=0.0, lag1=0.0, bias_of_mean=None, evidence="", recompilations=0)
    rows = entry.rows
    entry = replace(entry, record=entry.record.model_copy(update={"steadiness": cut}))
    entry.__dict__["rows"] = StepTable.from_rows(rows)
    assert [row.time("forward") for row in steps_after(entry).rows] == pytest.approx(FORWARD[5:])


def test_an_odd_step_has_the_part_that_differs_most() -> None:
    rng = np.random.default_rng(0)
    forwards = 3.0 + rng.normal(0, 0.02, 40)
    rows = [row(at, float(forwards[at - 1]), 25.0 if at == 9 else 5.0, tokens=100) for at in range(1, 41)]
    rows[19] = row(20, 13.0)
    found = step_figures(rows, model_of(rows))["odd_steps"]
    assert [(odd.step, odd.part) for odd in found] == [(9, "backward"), (20, "forward")]
    assert found[0].ratio == pytest.approx(3.0, rel=0.02)
    assert found[0].excess_s == pytest.approx(20e-3, rel=0.02)


def test_an_odd_step_is_compared_with_its_own_level() -> None:
    """The first 30 of 50 steps take 40 ms and the rest 10; one of the rest takes 30, due to backward."""
    rng = np.random.default_rng(1)
    forwards = np.where(np.arange(50) < 30, 33.0, 3.0) + rng.normal(0, 0.02, 50)
    rows = [row(step, float(forwards[step - 1]), 25.0 if step == 44 else 5.0) for step in range(1, 51)]
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
def test_a_queue_that_shrinks_shows_the_rate_of_the_workers(work_s: float, fetch_s: float, workers: int) -> None:
    ends, ready = simulated_loader(work_s, fetch_s, workers, first_s=2.0, steps=26)
    warm, last = 5, 25
    mean_s = (ends[last] - ends[warm]) / (last - warm)
    facts = LoaderFacts(workers=workers, ahead=workers * PREFETCH, ready_before=ready[warm], ready_after=ready[last])
    step_s = lasting_step_s(mean_s, last - warm, 1, facts) or 0.0
    truth = max(work_s, fetch_s / workers)
    if truth == work_s:
        assert step_s == pytest.approx(truth)
        return
    made = last - warm - (facts.used_up or 0)
    assert step_s == pytest.approx(truth, rel=workers / 2 / made)


RNG = np.random.default_rng(0)
WARMUP_S = [(3.0, 1.0), (0.5, 0.6)]
MEASURED_S = [tuple(pair) for pair in RNG.uniform(0.1, 0.2, size=(10, 2))]
FORWARD = np.array([*WARMUP_S, *MEASURED_S])[:, 0]


def test_ranks_are_averaged():
    entry = run("a", MEASURED_S, WARMUP_S)
    first = step_rows(MEASURED_S, WARMUP_S)
    second = [replace(row, rank=1, seconds=tuple(3 * s for s in row.seconds or ())) for row in first]
    entry.__dict__["rows"] = StepTable.from_rows([*first, *second, replace(first[0], step=13, stage="memory")])
    assert [row.time("forward") for row in steps_after(entry, 1).rows] == pytest.approx(2 * FORWARD[1:])
    died = run("died", failed=("oom", "no memory left"))
    good, problems = readable([run("a", MEASURED_S), died])
    assert [str(entry.folder) for entry in good] == ["a"]
    assert_stored("analysis/notes: no steps to cut", {"one that died": problems})


def test_samples_of_a_cut_are_those_of_its_own_steps() -> None:
    """Warm-up steps have 2 samples, measured ones 5 and 6 in turn: 5.5 in each mean step of 0.4 s, whatever the cut."""
    own = run("a", [(0.1, 0.3)] * 10, [(0.1, 0.3)] * 2)
    warmup = BatchCount(step=1, batches=1, samples=2)
    measured = [BatchCount(step, batches=1, samples=5 + step % 2) for step in range(3, 13)]
    cuts, problems = judged_after_warmups([own], [0, 2, 4], None, lambda folder: [[warmup, *measured]])
    assert problems == []
    found = [entry.record.throughput.samples_per_s for entry in cuts]
    assert found == pytest.approx([(2 * 2 + 10 * 5.5) / 12 / 0.4, 5.5 / 0.4, 5.5 / 0.4])


def test_without_counts_the_samples_are_those_of_the_run() -> None:
    """The mean is 5.5 samples per step, stored rounded as 6; the warm-up steps took twice as long."""
    own = run("a", [(0.1, 0.3)] * 10, [(0.2, 0.6)] * 2)
    rate = Throughput(tokens_per_step=None, tokens_per_s=None, samples_per_step=6, samples_per_s=5.5 / 0.4)
    entry = replace(own, record=own.record.model_copy(update={"throughput": rate}))
    entry.__dict__["rows"] = own.rows
    cuts, _ = judged_after_warmups([entry], [0, 2], None)
    found = [cut.record.throughput.samples_per_s for cut in cuts]
    assert found == pytest.approx([5.5 / ((2 * 0.8 + 10 * 0.4) / 12), 5.5 / 0.4])

"""Figures from rows, against the statistics of the standard library."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from lm_profiler.analysis.steps.step_model import plain
from lm_profiler.analysis.steps.summaries import (
    mean_over_ranks,
    model_of,
    rank_medians,
    scalars,
    step_figures,
    summaries,
    throughput,
)
from lm_profiler.record.quantities import PARTS, TIMED
from lm_profiler.record.run_record import TimeSummary
from lm_profiler.record.steps import UNKNOWN, StepRow


def row(step: int, forward_ms: float = 3.0, backward_ms: float = 5.0, **options: object) -> StepRow:
    """Forward, backward, and 2 ms of other; on the host a tenth of it."""
    ms = {"forward": forward_ms, "backward": backward_ms, "other": 2.0}
    seconds = [ms.get(part, 0.0) * 1e-3 for part in PARTS]
    seconds.append(sum(seconds))
    host = tuple(s / 10 for s in seconds)
    return StepRow(step, **{"stage": "measure", "seconds": tuple(seconds), "host_seconds": host, **options})


def times_of(rows: list[StepRow]) -> dict[str, TimeSummary]:
    return summaries(rows, "device", model_of(rows, keeps_all_steps=True))


def test_means_over_ranks_are_those_of_brute_force_and_a_rank_that_is_missing_leaves_tokens_unknown():
    rng = np.random.default_rng(0)
    rows = [
        row(step, float(rng.uniform(1, 9)), rank=rank, tokens=10 + rank) for rank in (2, 0, 1) for step in (1, 2, 3)
    ]
    del rows[5]  # rank 0's third step
    for mean in mean_over_ranks(rows):
        own = [each for each in rows if each.step == mean.step]
        assert mean.time("forward") == pytest.approx(sum(each.time("forward") for each in own) / len(own))
        assert mean.time("step", "host") == pytest.approx(sum(each.time("step", "host") for each in own) / len(own))
        assert mean.tokens == (33 if mean.step < 3 else None)
    assert [mean.tokens for mean in mean_over_ranks(rows, world=4)] == [None] * 3


def test_a_summary_is_that_of_the_parts_values() -> None:
    forwards = [3.0, 4.0, 8.0, 3.5, 3.25]
    rows = [row(n, forward) for n, forward in enumerate(forwards, 1)]
    device, host = (summaries(rows, clock, plain([1.0] * 5)) for clock in ("device", "host"))
    assert set(device) == {*TIMED, "forward_backward"}
    assert device["forward"].n == 5
    assert device["forward"].mean == pytest.approx(statistics.mean(forwards) * 1e-3)
    assert device["forward"].median == pytest.approx(3.5e-3)
    assert device["forward"].std == pytest.approx(statistics.stdev(forwards) * 1e-3)
    assert device["forward_backward"].median == pytest.approx(8.5e-3)
    assert device["step"].max == pytest.approx(15e-3)
    assert host["forward"].median == pytest.approx(0.35e-3)


def test_both_clocks_tell_of_the_same_steps() -> None:
    """A device that died has no time for the last steps: their rows are left out before."""
    rows = [row(1), row(2)]
    assert summaries(rows, "device", model_of(rows))["step"].n == summaries(rows, "host", model_of(rows))["step"].n == 2


def test_ranks_are_averaged_so_that_the_parts_still_add_up() -> None:
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


def test_a_rank_whose_device_died_makes_the_steps_time_unknown() -> None:
    (step,) = mean_over_ranks([row(1), row(1, seconds=None, rank=1)])
    assert step.seconds is None
    assert step.time("step", "host") == pytest.approx(1e-3)


def test_each_rank_has_its_median() -> None:
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


def test_what_is_unknown_is_no_scalar() -> None:
    values = scalars(row(1, seconds=None, tokens=50, memory=UNKNOWN))
    assert all(tag.startswith("host_time_ms/") for tag in values)
    assert "throughput/tokens_per_s" not in scalars(row(1))


def test_throughput_is_all_tokens_over_all_time() -> None:
    rows = [row(1, tokens=100), row(2, 43.0, tokens=130), row(3, tokens=100)]
    found = throughput(rows, times_of(rows)["step"].mean)
    assert found.tokens_per_step == 110
    assert found.tokens_per_s == pytest.approx(330 / 70e-3)


def test_a_pattern_is_in_the_throughput_and_its_parts_are_told() -> None:
    """Every fifth of 40 steps takes 50 ms instead of 10: a median would tell 80 % too many tokens."""
    rng = np.random.default_rng(0)
    rows = [row(at, (43.0 if at % 5 == 0 else 3.0) + float(rng.normal(0, 0.05)), tokens=100) for at in range(1, 41)]
    model = model_of(rows)
    figures = step_figures(rows, model)
    assert figures["throughput"].tokens_per_s == pytest.approx(100 / 18e-3, rel=0.01)
    assert figures["shares"]["forward"] == pytest.approx(11.0 / 18.0, rel=0.01)
    assert sum(figures["shares"][part] for part in PARTS) == pytest.approx(1.0)
    assert model.parts_of(model.seconds).level == pytest.approx(10e-3, rel=0.01)
    assert model.parts_of(model.seconds).pattern == pytest.approx(8e-3, rel=0.01)
    assert figures["odd_steps"] == []


def test_odd_steps_are_told_with_the_part_that_differs_most_the_farthest_first() -> None:
    rng = np.random.default_rng(0)
    forwards = 3.0 + rng.normal(0, 0.02, 40)
    rows = [row(at, float(forwards[at - 1]), 25.0 if at == 9 else 5.0, tokens=100) for at in range(1, 41)]
    rows[19] = row(20, 13.0)
    found = step_figures(rows, model_of(rows))["odd_steps"]
    assert [(odd.step, odd.part) for odd in found] == [(9, "backward"), (20, "forward")]
    assert found[0].ratio == pytest.approx(3.0, rel=0.02)
    assert found[0].excess_s == pytest.approx(20e-3, rel=0.02)


def test_unknown_tokens_have_no_throughput() -> None:
    rows = [row(1), row(2)]
    found = throughput(rows, times_of(rows)["step"].mean)
    assert found.tokens_per_step is None
    assert found.tokens_per_s is None


def test_an_odd_step_of_a_fast_level_names_its_own_excess_and_not_that_over_another_level() -> None:
    """Of 50 steps the first 30 take 40 ms and the rest 10; one of the rest takes 30, by backward."""
    rng = np.random.default_rng(1)
    forwards = np.where(np.arange(50) < 30, 33.0, 3.0) + rng.normal(0, 0.02, 50)
    rows = [row(step, float(forwards[step - 1]), 25.0 if step == 44 else 5.0) for step in range(1, 51)]
    model = model_of(rows)
    (odd,) = step_figures(rows, model)["odd_steps"]
    assert (model.begin, model.end) == (0, 30)
    assert (odd.step, odd.part) == (44, "backward")
    assert odd.excess_s == pytest.approx(20e-3, rel=0.02)


def test_an_interval_wider_than_its_mean_is_not_in_the_record() -> None:
    rows = [row(step, forward) for step, forward in ((1, 0.5), (2, 30.0), (3, 3.0))]
    summary = step_figures(rows, model_of(rows))["time"]["forward"]
    assert summary.mean == pytest.approx(33.5e-3 / 3)
    assert (summary.mean_low, summary.mean_high) == (None, None)

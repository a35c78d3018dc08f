"""Slack and virtual speed-ups, against pipelines that are simulated event by event and really made faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from pipeline import Pipeline, held

from lm_profiler.analysis.why.slack_model import LEVELS, Held, held_in, plan, slack, steps_needed
from lm_profiler.record.run import Slack

HOST = {"forward": 0.35, "backward": 0.6, "optimizer": 0.05}
"""What each place takes of the host's time."""

PLACES = ("loader", *HOST)
SEEDS = range(10)
PIPELINES = {
    "loader-bound": Pipeline(worker_s=0.1, host_s=0.07, workers=1),
    "far loader-bound": Pipeline(worker_s=0.1, host_s=0.02, workers=1),
    "compute-bound": Pipeline(worker_s=0.07, host_s=0.1, workers=1),
    "two workers, loader-bound": Pipeline(worker_s=0.2, host_s=0.06, workers=2),
    "two workers, compute-bound": Pipeline(worker_s=0.15, host_s=0.1, workers=2),
}


def measured(pipeline: Pipeline, seed: int, steps: int = 700) -> tuple[Slack, float]:
    """What an experiment of ``steps`` concludes, and the median step that it began with."""
    pipeline = replace(pipeline, seed=seed)
    step_s = float(np.median(pipeline.run(60)[20:]))
    workers = pipeline.workers
    blocks = plan(PLACES, steps, 2 + workers * (pipeline.prefetch + 1), workers)
    own_s = {place: share * pipeline.host_s for place, share in HOST.items()}
    return known(held(replace(pipeline, seed=1000 + seed), blocks, step_s), workers, own_s), step_s


@cache
def of_one(name: str, seed: int) -> tuple[Slack, float]:
    """``measured``, once for all that is asked of it."""
    return measured(PIPELINES[name], seed)


@cache
def mean_step_s(pipeline: Pipeline) -> float:
    """Of a long run."""
    return float(np.mean(replace(pipeline, seed=99).run(3000)[50:]))


def known(held: Sequence[Held], workers: int, own_s: Mapping[str, float] | None = None) -> Slack:
    found = slack(held, workers, own_s)
    assert found is not None
    return found


def really_saved_s(pipeline: Pipeline, place: str, faster_s: float) -> float:
    """Of a long run, by taking ``faster_s`` a step from the ``place``."""
    if place == "loader":
        faster = replace(pipeline, worker_s=pipeline.worker_s - faster_s * pipeline.workers)
    else:
        faster = replace(pipeline, host_s=pipeline.host_s - faster_s)
    return max(mean_step_s(pipeline) - mean_step_s(faster), 0.0)


@pytest.mark.parametrize("place", ["loader", "compute", "backward", "optimizer"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_predicted_saving_is_the_real_one(name: str, place: str) -> None:
    pipeline = PIPELINES[name]
    near, inside = Counter[int](), Counter[int]()
    for seed in SEEDS:
        found, step_s = of_one(name, seed)
        savings = [of for of in found.savings if of.place == place]
        if place in HOST:
            assert max(of.faster_s for of in savings) <= HOST[place] * pipeline.host_s
        for level, saving in enumerate(savings):
            real_s = really_saved_s(pipeline, place, saving.faster_s)
            off_s = 0.005 * saving.faster_s  # of the truth: 3,000 steps, and what is faster varies by less too
            near[level] += abs(saving.saves_s - real_s) < 0.05 * step_s
            inside[level] += saving.low_s - off_s <= real_s <= saving.high_s + off_s
    assert min(near.values()) >= 9
    assert min(inside.values()) >= 9


@pytest.mark.parametrize(
    "name, critical, slack_s",
    [
        ("loader-bound", {"loader"}, 0.03),
        ("compute-bound", {"forward", "backward", "optimizer"}, 0.03),
        ("two workers, loader-bound", {"loader"}, 0.04),
        ("two workers, compute-bound", {"forward", "backward", "optimizer"}, 0.025),
    ],
)
def test_the_slope_is_one_on_the_critical_path_and_off_it_there_is_slack(
    name: str, critical: set[str], slack_s: float
) -> None:
    for seed in SEEDS:
        found, step_s = of_one(name, seed)
        for of in found.places:
            on = of.place in critical
            assert of.slack_s == pytest.approx(0.0 if on else slack_s, abs=0.05 * step_s)
            assert of.slope > 0.7 if on else of.slope < 0.4


def test_a_slack_beyond_the_largest_delay_is_as_much_as_that_or_more() -> None:
    for seed in SEEDS:
        host = [of for of in of_one("far loader-bound", seed)[0].places if of.place != "loader"]
        assert [of.slack_high_s for of in host] == pytest.approx([of.largest_s for of in host], rel=0.01)
        assert all(of.slack_low_s > 0.9 * of.largest_s for of in host)


def test_a_drift_favours_no_place() -> None:
    drifting = replace(PIPELINES["compute-bound"], drift=0.2)  # 14 % slower by the end
    for seed in SEEDS:
        found, step_s = measured(drifting, seed)
        slopes = [of.slope for of in found.places if of.place != "loader"]
        assert slopes == pytest.approx([1.0] * 3, abs=0.35)
        assert [of.slack_s for of in found.places if of.place != "loader"] == pytest.approx(
            [0.0] * 3, abs=0.05 * step_s
        )


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4, 9])
def test_every_round_holds_each_delay_once_in_another_order(workers: int) -> None:
    needed = steps_needed(PLACES, 5, workers)
    for steps in (needed, needed + 1, 2 * needed, 10 * needed):
        blocks = plan(PLACES, steps, 5, workers)
        cells = [{(b.place, b.level) for b in blocks if b.round == number} for number in {b.round for b in blocks}]
        assert len(cells) >= 2
        assert all(of == {(None, 0.0), *((place, level) for place in PLACES for level in LEVELS)} for of in cells)
        assert blocks[0].first == 0
        assert all(one.end == other.first for one, other in pairwise(blocks))
        assert blocks[-1].end <= steps
        kept = {b.end - b.kept for b in blocks}
        assert len(kept) == 1
        assert min(kept) >= 4
        assert min(kept) % max(workers, 1) == 0
        assert {b.kept - b.first for b in blocks} == {5}
    first, second = ([b.level for b in blocks if b.round == number] for number in (0, 1))
    assert first != second
    assert plan(PLACES, needed, 5, workers) == plan(PLACES, needed, 5, workers)


def made(costs: dict[str, tuple[float, ...]], delay_s: float = 1.0) -> list[Held]:
    """Two rounds without noise of a step of 10 s, under delays of ``LEVELS`` of 10 s each."""
    blocks = [Held(number, None, 0.0, 0.0, 10.0) for number in (0, 1) for _ in range(2)]
    return blocks + [
        Held(number, place, level, delay_s * level * 10, 10.0 + cost)
        for number in (0, 1)
        for place, of in costs.items()
        for level, cost in zip(LEVELS, of, strict=True)
    ]


def test_known_costs_give_known_figures() -> None:
    """Delays of 1, 2.5 and 6 s: with 2 s of slack they cost 0, 0.5 and 4."""
    found = known(made({"loader": (0.0, 0.5, 4.0), "forward": (1.0, 2.5, 6.0)}), workers=1)
    loader, forward = found.places
    assert (loader.place, loader.slack_s, loader.largest_s) == ("loader", pytest.approx(2.0), pytest.approx(6.0))
    assert loader.slope == pytest.approx(2.5 * 0.5 / (1.0 + 2.5**2))
    assert (forward.slope, forward.slack_s) == (pytest.approx(1.0), 0.0)
    saves = {place: [of.saves_s for of in found.savings if of.place == place] for place in ("loader", "compute")}
    assert saves == {"loader": pytest.approx([0.0] * 3), "compute": pytest.approx([1.0, 2.0, 2.0])}
    assert all(of.high_s - of.low_s <= 0.1 + 1e-9 for of in found.savings)  # 0.5 % of the step on either side


def test_no_saving_is_said_to_be_more_than_what_was_taken_away() -> None:
    """Noise alone would let a place that is 1 s faster save up to 1.5 s."""
    noisy = made({"loader": (0.0, 0.0, 0.0), "forward": (1.0, 2.5, 6.0)})
    noisy = [replace(of, step_s=of.step_s + (0.5 if at % 2 else -0.5)) for at, of in enumerate(noisy)]
    savings = known(noisy, workers=1).savings
    assert all(0 <= of.low_s <= of.saves_s <= of.high_s <= of.faster_s for of in savings)
    assert any(of.high_s == of.faster_s and of.low_s < of.saves_s for of in savings)


def test_of_host_and_device_the_dearer_one_counts_against_the_loader() -> None:
    """Where the device is behind and the host has slack, delaying the host alone would cost nothing."""
    costs = {"loader": (0.0, 0.0, 3.0), "forward": (0.0, 0.0, 2.0), "device": (1.0, 2.5, 6.0)}
    found = known(made(costs), workers=1)
    assert [of.saves_s for of in found.savings if of.place == "loader"] == pytest.approx([0.0] * 3)


def test_without_workers_nothing_is_said_of_a_faster_loader() -> None:
    found = known(made({"data": (1.0, 2.5, 6.0), "forward": (1.0, 2.5, 6.0)}), workers=0)
    assert [of.place for of in found.places] == ["data", "forward"]
    assert found.savings == []


def test_a_place_where_no_delay_was_taken_is_left_out() -> None:
    never = [
        replace(of, delay_s=0.0) if of.place == "backward" else of
        for of in made({"forward": (1.0, 2.5, 6.0), "backward": (0.0,) * 3})
    ]
    assert [of.place for of in known(never, workers=0).places] == ["forward"]


def test_a_run_that_was_cut_is_judged_by_its_whole_rounds_or_not_at_all() -> None:
    blocks = plan(PLACES, 3 * 14 * 21, 5, 1)
    steps = [1.0] * (blocks[-1].end - 1)
    cut = held_in(blocks, [0.1] * len(blocks), steps)
    assert len(cut) == len(blocks) - 1
    assert known(cut, 1).blocks == 2 * 14
    assert slack([of for of in cut if of.round == 0], 1) is None
    assert slack([], 1) is None

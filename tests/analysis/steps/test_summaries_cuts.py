"""The recorded steps after another warm-up, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stored_texts import assert_stored
from tabled import run, step_rows

from lm_profiler.analysis.steps.summaries import BatchCount, cut_anew, readable, steps_after
from lm_profiler.record.run_record import Steadiness, Throughput
from lm_profiler.record.steps import StepTable

RNG = np.random.default_rng(0)
WARMUP = [(3.0, 1.0), (0.5, 0.6)]
MEASURED = [tuple(pair) for pair in RNG.uniform(0.1, 0.2, size=(10, 2))]
FORWARD = np.array([*WARMUP, *MEASURED])[:, 0]


def test_without_a_setting_the_steps_are_those_of_the_runs_own_figures():
    entry = run("a", MEASURED, WARMUP)
    cut = Steadiness(word="steady", cut=3, drift=0.0, lag1=0.0, bias_of_mean=None, evidence="", recompilations=0)
    rows = entry.rows
    entry = replace(entry, record=entry.record.model_copy(update={"steadiness": cut}))
    entry.__dict__["rows"] = StepTable.from_rows(rows)
    assert [row.time("forward") for row in steps_after(entry).rows] == pytest.approx(FORWARD[5:])


def test_ranks_are_averaged_and_untimed_stages_left_out():
    entry = run("a", MEASURED, WARMUP)
    first = step_rows(MEASURED, WARMUP)
    second = [replace(row, rank=1, seconds=tuple(3 * s for s in row.seconds or ())) for row in first]
    entry.__dict__["rows"] = StepTable.from_rows([*first, *second, replace(first[0], step=13, stage="memory")])
    assert [row.time("forward") for row in steps_after(entry, 1).rows] == pytest.approx(2 * FORWARD[1:])


def test_runs_without_steps_are_named():
    died = run("died", failed=("oom", "no memory left"))
    good, problems = readable([run("a", MEASURED), died])
    assert [str(entry.folder) for entry in good] == ["a"]
    assert_stored("analysis/notes: no steps to cut", {"one that died": problems})


def test_all_that_is_said_of_the_steps_is_of_the_cut():
    own = run("a", [(0.1, 0.3)] * 11, [(9.0, 1.0)])
    [entry], problems = cut_anew([own], [0], 10)
    assert problems == []
    assert entry.record.throughput is not None
    assert [step.step for step in entry.record.odd_steps] == [1]
    assert entry.record.shares["forward"] == pytest.approx((9.0 + 9 * 0.1) / (10.0 + 9 * 0.4))  # time is a sum
    [entry], _ = cut_anew([own], [1], 10)
    assert entry.record.odd_steps == []


def test_a_cut_keeps_the_causes_of_its_slow_steps():
    own = run("a", [*[(0.1, 0.3)] * 14, (0.1, 1.3)])
    [(odd,)] = [entry.record.odd_steps for entry in cut_anew([own], [0], None)[0]]
    told = odd.model_copy(update={"cause": "waiting for a CPU", "cause_s": 0.9, "rank": 0})
    entry = replace(own, record=own.record.model_copy(update={"odd_steps": [told]}))
    entry.__dict__["rows"] = own.rows
    [cut], _ = cut_anew([entry], [2], None)
    (again,) = cut.record.odd_steps
    assert (again.cause, again.cause_s, again.beside) == ("waiting for a CPU", 0.9, None)


def test_samples_of_a_cut_are_those_of_its_own_steps() -> None:
    """Warm-up steps have 2 samples, measured ones 5 and 6 in turn: 5.5 in each mean step of 0.4 s, whatever the cut."""
    own = run("a", [(0.1, 0.3)] * 10, [(0.1, 0.3)] * 2)
    counts = [[BatchCount(1, 1, 2), *(BatchCount(step, 1, 5 + step % 2) for step in range(3, 13))]]
    cuts, problems = cut_anew([own], [0, 2, 4], None, lambda folder: counts)
    assert problems == []
    found = [entry.record.throughput.samples_per_s for entry in cuts]
    assert found == pytest.approx([(2 * 2 + 10 * 5.5) / 12 / 0.4, 5.5 / 0.4, 5.5 / 0.4])


def test_without_the_batches_of_its_steps_a_cut_has_the_exact_samples_of_the_run() -> None:
    """5.5 samples in a mean step, which the record has as 6; the warm-up steps took twice as long."""
    own = run("a", [(0.1, 0.3)] * 10, [(0.2, 0.6)] * 2)
    rate = Throughput(tokens_per_step=None, tokens_per_s=None, samples_per_step=6, samples_per_s=5.5 / 0.4)
    entry = replace(own, record=own.record.model_copy(update={"throughput": rate}))
    entry.__dict__["rows"] = own.rows
    cuts, _ = cut_anew([entry], [0, 2], None)
    found = [cut.record.throughput.samples_per_s for cut in cuts]
    assert found == pytest.approx([5.5 / ((2 * 0.8 + 10 * 0.4) / 12), 5.5 / 0.4])

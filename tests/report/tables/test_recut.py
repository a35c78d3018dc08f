"""The recorded steps after another warm-up, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tabled import run, step_rows

from lm_profiler.record.run import Steadiness
from lm_profiler.report.tables.recut import readable, steps_after, warmups

RNG = np.random.default_rng(0)
WARMUP = [(3.0, 1.0), (0.5, 0.6)]
MEASURED = [tuple(pair) for pair in RNG.uniform(0.1, 0.2, size=(10, 2))]
FORWARD, BACKWARD = np.array([*WARMUP, *MEASURED]).T


@pytest.mark.parametrize("setting", [0, 1, 2, 5])
def test_each_setting_leaves_out_that_many_recorded_steps(setting: int):
    table = warmups([(run("a", MEASURED, WARMUP), [0, 1, 2, 5])])
    rows = {row["part"]: row for row in table.records() if row["warmup_steps"] == setting}
    seconds = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "forward_backward": FORWARD + BACKWARD,
        "step": FORWARD + BACKWARD,
    }
    assert list(rows) == list(seconds)
    for part, row in rows.items():
        kept = seconds[part][setting:]
        assert row["steps"] == 12 - setting
        assert row["mean_s"] == pytest.approx(kept.mean())
        assert row["std_s"] == pytest.approx(kept.std(ddof=1))
        assert row["cv"] == pytest.approx(kept.std(ddof=1) / kept.mean())
        assert row["median_s"] == pytest.approx(np.median(kept))


def test_settings_of_a_part_stand_one_below_the_other():
    table = warmups([(run("a", MEASURED, WARMUP), [0, 2])])
    assert [(row["part"], row["warmup_steps"]) for row in table.records()][:4] == [
        *(("forward", 0), ("forward", 2), ("backward", 0), ("backward", 2))
    ]


def test_more_warm_up_than_steps_leaves_no_figure():
    row = warmups([(run("a", MEASURED, WARMUP), [0, 12])]).rows[1]
    assert [cell.text for cell in row[1:]] == ["forward", "12", "0", "", "", "", ""]


def test_without_a_setting_the_steps_are_those_of_the_runs_own_figures():
    entry = run("a", MEASURED, WARMUP)
    cut = Steadiness(word="steady", cut=3, drift=0.0, lag1=0.0, bias_of_mean=None, evidence="", recompilations=0)
    rows = entry.rows
    entry = replace(entry, record=entry.record.model_copy(update={"steadiness": cut}))
    entry.__dict__["rows"] = rows
    assert [row.time("forward") for row in steps_after(entry).rows] == pytest.approx(FORWARD[5:])


def test_ranks_are_averaged_and_untimed_stages_left_out():
    entry = run("a", MEASURED, WARMUP)
    first = step_rows(MEASURED, WARMUP)
    second = [replace(row, rank=1, seconds=tuple(3 * s for s in row.seconds or ())) for row in first]
    entry.__dict__["rows"] = [*first, *second, replace(first[0], step=13, stage="memory")]
    assert [row.time("forward") for row in steps_after(entry, 1).rows] == pytest.approx(2 * FORWARD[1:])


def test_runs_without_steps_are_named():
    died = run("died", failed=("oom", "no memory left"))
    good, problems = readable([run("a", MEASURED), died])
    assert [str(entry.folder) for entry in good] == ["a"]
    assert problems == ["died: no steps to cut (oom)"]

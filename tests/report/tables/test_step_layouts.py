"""The same steps after each setting of warm-up, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from tabled import run

from lm_profiler.report.tables.layouts import warmups

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

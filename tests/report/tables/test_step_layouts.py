"""The same steps after each setting of warm-up, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from tabled import run

from lm_profiler.analysis.steps.summaries import cut_anew
from lm_profiler.report.tables.layouts import warmups
from lm_profiler.report.tables.rows import raw_runs_table
from lm_profiler.report.tables.run_groups import repeats_together

RNG = np.random.default_rng(0)
WARMUP = [(3.0, 1.0), (0.5, 0.6)]
MEASURED = [tuple(pair) for pair in RNG.uniform(0.1, 0.2, size=(10, 2))]
FORWARD, BACKWARD = np.array([*WARMUP, *MEASURED]).T


@pytest.mark.parametrize("setting", [0, 1, 2, 5])
def test_each_setting_leaves_out_that_many_recorded_steps(setting: int):
    cuts, problems = cut_anew([run("a", MEASURED, WARMUP)], [0, 1, 2, 5], None)
    assert problems == []
    [row] = [row for row in raw_runs_table(repeats_together(cuts)).records() if row["warmup_steps"] == setting]
    assert row["steps_measure"] == 12 - setting
    seconds = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "forward_backward": FORWARD + BACKWARD,
        "step": FORWARD + BACKWARD,
    }
    for part, of in seconds.items():
        kept = of[setting:]
        assert row[f"{part}_s"] == pytest.approx(kept.mean())
        assert row[f"{part}_std_s"] == pytest.approx(kept.std(ddof=1))
        assert row[f"{part}_cv"] == pytest.approx(kept.std(ddof=1) / kept.mean())
        assert row[f"{part}_median_s"] == pytest.approx(np.median(kept))


def test_settings_of_a_pass_stand_one_below_the_other():
    table = warmups(cut_anew([run("a", MEASURED, WARMUP)], [0, 2], None)[0])
    assert [(row["forward_only"], row["warmup_steps"]) for row in table.records()] == [
        *((True, 0), (True, 2), (False, 0), (False, 2))
    ]
    assert [row["avg"] for row in table.records()][2:] == pytest.approx(
        [(FORWARD + BACKWARD).mean(), (FORWARD + BACKWARD)[2:].mean()]
    )

"""The Watch view: step time over a whole training with its events, where the time went, what happened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tab import OpenTab

from lm_profiler.record.watch_files import EVENTS, STATUS, WINDOWS, Sketch, WatchEvent, WatchStatus, WatchWindow
from lm_profiler.record.watch_files import append_lines as append

DRAWN = """({ data }) => Object.fromEntries(data.map(({ name, x, y }) => [name, { x: [...x], y: [...y] }]))"""


def test_a_watched_run_shows_its_steps_events_and_ledger(
    open_either: OpenTab, logdir: Path, request: pytest.FixtureRequest, screenshot: Any
) -> None:
    run = logdir / "watched"
    request.addfinalizer(lambda: shutil.rmtree(run))
    shutil.copytree(logdir / "demo/version_0", run)
    sketch = [Sketch.of(np.full(1000, 0.1 if at < 20 else 0.12)) for at in range(40)]
    windows = [
        WatchWindow(first_step=1 + 1000 * at, steps=1000, began_s=100.0 * at, seconds={"step": of})
        for at, of in enumerate(sketch)
    ]
    append(run / WINDOWS, windows)
    level = WatchEvent(at_s=2e3, step=20200, kind="level", part="data", now=0.12, against=0.1, since_step=20001)
    late = WatchEvent(at_s=2.5e3, rank=1, step=25000, kind="rank late", part="data", now=0.03, against=0.01, cost_s=9.0)
    append(run / EVENTS, [level, late])
    ledger = {"step: forward": 3800.0, "validation": 500.0, "waiting for ranks": 90.0, "unexplained": 10.0}
    WatchStatus(
        began_s=0.0, written_s=4400.0, steps=40_000, phase="forward", ledger=ledger, wall_s=4400.0, world_size=2
    ).write(run / STATUS)
    tab = open_either()
    tab.open_run("watched", "Watch")
    chart = tab.card("Step time over the run").locator(".js-plotly-plot")
    chart.locator(".scatterlayer .trace").first.wait_for(state="attached")
    drawn = chart.evaluate(DRAWN)
    assert drawn["mean"]["y"] == pytest.approx([100.0] * 20 + [120.0] * 20)
    assert drawn["mean"]["x"] == [window.first_step for window in windows]
    assert (drawn["level"]["x"], drawn["rank late"]["x"]) == ([20001], [25000])
    assert [row[0] for row in tab.table(tab.card("Where the time went"))[1:]] == [*ledger, "wall time"]
    assert len(tab.table(tab.card("Events"))) == 3
    assert tab.overflow_px() <= 0
    screenshot(tab, "watch")

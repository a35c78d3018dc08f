"""The Watch view: step time over a whole training with its events, where the time went, what happened."""

from pathlib import Path

import numpy as np
import pytest
from made_runs import made_entry
from shown import bars_of, rows_of, series_of, shown, text_of, titled

from lm_profiler.record.watch_files import EVENTS, STATUS, WINDOWS, Sketch, WatchEvent, WatchStatus, WatchWindow
from lm_profiler.record.watch_files import append_lines as append
from lm_profiler.report.pictures.drawing import PART_COLOURS


def test_a_watched_run_is_shown(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "watched")
    sketches = [Sketch.from_seconds(np.full(1000, 0.1 if window < 20 else 0.12)) for window in range(40)]
    windows = [
        WatchWindow(first_step=1 + 1000 * number, steps=1000, began_s=100.0 * number, seconds={"step": sketch})
        for number, sketch in enumerate(sketches)
    ]
    append(entry.folder / WINDOWS, windows)
    level = WatchEvent(at_s=2e3, step=20200, kind="level", part="data", now=0.12, against=0.1, since_step=20001)
    late = WatchEvent(at_s=2.5e3, rank=1, step=25000, kind="rank late", part="data", now=0.03, against=0.01, cost_s=9.0)
    append(entry.folder / EVENTS, [level, late])
    ledger = {"step: forward": 3800.0, "validation": 500.0, "waiting for ranks": 90.0, "unexplained": 10.0}
    WatchStatus(
        began_s=0.0, written_s=4400.0, steps=40_000, phase="forward", ledger=ledger, wall_s=4400.0, world_size=2
    ).write(entry.folder / STATUS)
    blocks = shown("watch", entry)
    series = series_of(titled(blocks, "Step time over the run"))
    assert series["mean"]["y"] == pytest.approx([100.0] * 20 + [120.0] * 20)
    assert series["mean"]["x"] == [window.first_step for window in windows]
    assert (series["level"]["x"], series["rank late"]["x"]) == ([20001], [25000])
    assert series["level"]["y"] == pytest.approx([120.0], rel=0.02)
    rows = bars_of(titled(blocks, "Where the time went"))
    assert list(rows) == [*ledger, "wall time"]
    assert rows["step: forward"]["pieces"][0]["width"] == pytest.approx(3800 / 4400)
    assert rows["step: forward"]["pieces"][0]["colour"] == PART_COLOURS["forward"]
    assert len(rows_of(titled(blocks, "Events"))) == 3
    assert len(series_of(titled(shown("watch", entry), "Step time"))["mean"]["x"]) == 40


def test_a_stall_does_not_flatten_the_curves(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "stalled")
    seconds = [np.full(1000, 0.005) for _ in range(40)]
    seconds[20][500] = 90.0
    windows = [
        WatchWindow(
            first_step=1 + 1000 * number,
            steps=1000,
            began_s=5.0 * number,
            seconds={"step": Sketch.from_seconds(step_s)},
        )
        for number, step_s in enumerate(seconds)
    ]
    append(entry.folder / WINDOWS, windows)
    WatchStatus(began_s=0.0, written_s=300.0, steps=40_000, wall_s=300.0).write(entry.folder / STATUS)
    (drawn,) = [block for block in titled(shown("watch", entry), "Step time")["blocks"] if block["kind"] == "chart"]
    lowest_ms, highest_ms = drawn["layout"]["yaxis"]["range"]
    assert lowest_ms == 0
    assert 5.0 < highest_ms < 30.0
    assert "--watch=true" in text_of(shown("watch", made_entry(tmp_path / "a")))

"""The Watch view: step time over a whole training with its events, where the time went, what happened."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import made_entry
from shown import bars_of, block_titled, blocks_of_view, series_of, table_rows, text_of

from lm_profiler.record.watch_files import EVENTS, STATUS, WINDOWS, Sketch, WatchEvent, WatchStatus, WatchWindow
from lm_profiler.record.watch_files import append_lines as append
from lm_profiler.report.pictures.drawing import PART_COLOURS


@pytest.fixture
def watched_blocks(tmp_path: Path) -> list[Any]:
    """Steps take 100 ms, and 120 from step 20,001 on, due to data; rank 1 is late at step 25,000."""
    entry = made_entry(tmp_path / "watched")
    windows = []
    for number in range(40):
        step_s = np.full(1000, 0.1 if number < 20 else 0.12)
        sketches = {"step": Sketch.from_seconds(step_s)}
        windows.append(WatchWindow(first_step=1 + 1000 * number, steps=1000, began_s=100.0 * number, seconds=sketches))
    append(entry.folder / WINDOWS, windows)
    level = WatchEvent(at_s=2e3, step=20200, kind="level", part="data", now=0.12, against=0.1, since_step=20001)
    late = WatchEvent(at_s=2.5e3, rank=1, step=25000, kind="rank late", part="data", now=0.03, against=0.01, cost_s=9.0)
    append(entry.folder / EVENTS, [level, late])
    WatchStatus(
        began_s=0.0, written_s=4400.0, steps=40_000, phase="forward", ledger=LEDGER_S, wall_s=4400.0, world_size=2
    ).write(entry.folder / STATUS)
    return blocks_of_view("watch", entry)


LEDGER_S = {"step: forward": 3800.0, "validation": 500.0, "waiting for ranks": 90.0, "unexplained": 10.0}


def test_step_times_and_events_are_drawn(watched_blocks: list[Any]) -> None:
    """20 windows of 1,000 steps of 100 ms, and 20 of 120. Step 20,001 changes the level; at 25,000 a rank is late."""
    series = series_of(block_titled(watched_blocks, "Step time over the run"))
    assert series["mean"]["x"] == list(range(1, 40_001, 1000))
    assert series["mean"]["y"] == pytest.approx([100.0] * 20 + [120.0] * 20)
    assert series["level"]["x"] == [20001]
    assert series["level"]["y"] == pytest.approx([120.0], rel=0.02)
    assert series["rank late"]["x"] == [25000]
    assert len(table_rows(block_titled(watched_blocks, "Events"))) == 1 + 2


def test_the_ledger_is_drawn_as_bars(watched_blocks: list[Any]) -> None:
    """Of 4400 s of wall time, forward took 3800."""
    rows = bars_of(block_titled(watched_blocks, "Where the time went"))
    assert list(rows) == [*LEDGER_S, "wall time"]
    (forward,) = rows["step: forward"]["pieces"]
    assert forward["width"] == pytest.approx(3800 / 4400)
    assert forward["colour"] == PART_COLOURS["forward"]


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
    step_time = block_titled(blocks_of_view("watch", entry), "Step time")
    (drawn,) = [block for block in step_time["blocks"] if block["kind"] == "chart"]
    lowest_ms, highest_ms = drawn["layout"]["yaxis"]["range"]
    assert lowest_ms == 0
    assert 5.0 < highest_ms < 30.0
    assert "--watch=true" in text_of(blocks_of_view("watch", made_entry(tmp_path / "a")))

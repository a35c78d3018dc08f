"""The table of phases has the first and the last window only where a run has several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lm_profiler.record import watch_files
from lm_profiler.record.watch_files import Sketch, WatchStatus, WatchWindow
from lm_profiler.report.run.watch_tables import watch_tables

LAST_WINDOWS = ["first window", "last window"]


def window(first_step: int, step_s: float) -> WatchWindow:
    steps_s = np.full(1000, step_s)
    return WatchWindow(first_step=first_step, steps=1000, began_s=0.0, seconds={"step": Sketch.from_seconds(steps_s)})


@pytest.mark.parametrize("step_seconds", [[0.01], [0.01, 0.02, 0.03]])
def test_windows_are_compared_only_where_there_are_several(step_seconds: list[float], tmp_path: Path) -> None:
    windows = [window(1 + 1000 * index, step_s) for index, step_s in enumerate(step_seconds)]
    WatchStatus(began_s=0.0, written_s=1.0, steps=1000 * len(windows)).write(tmp_path / watch_files.STATUS)
    watch_files.append_lines(tmp_path / watch_files.WINDOWS, windows)
    (phases,) = [table for table in watch_tables(tmp_path) if table.headings and table.headings[0].title == "ms"]
    titles = [heading.title for heading in phases.headings]
    (step,) = phases.rows
    if len(step_seconds) == 1:
        assert titles[-1] == "longest"
        return
    assert titles[-2:] == LAST_WINDOWS
    assert [float(cell.text) for cell in step[-2:]] == pytest.approx([10.0, 30.0], rel=0.05)

"""What is seen of a search while it runs."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lm_profiler.improve.runner import ImproveDisplay
from lm_profiler.record.sweep import Cell
from lm_profiler.sweep.outcome import OUTPUT_FILE
from tests.support.made_improve import TRIED, made_improve

CELL = Cell(id="data.num_workers=4,r2", overrides={}, repeat=2, arguments=[])


@pytest.mark.parametrize("terminal", [True, False])
def test_it_tells_of_each_change_and_on_a_terminal_of_the_run_that_goes_on(tmp_path: Path, terminal: bool) -> None:
    (tmp_path / CELL.id).mkdir()
    (tmp_path / CELL.id / OUTPUT_FILE).write_text("warm-up: 5 steps\nmeasuring: 20 steps\n")
    said, now = StringIO(), [0.0]
    console = Console(file=said, force_terminal=terminal, width=150, no_color=True)
    display = ImproveDisplay(tmp_path, 600.0, console, clock=lambda: now[0])
    with display.shown():
        display.tell(made_improve(tried=TRIED[:1], ended="unfinished", final=None, left=["model.compile=true"]))
        display.began(CELL, None)
        now[0] = 3.0
        display.tick()
        display.tell(made_improve(tried=TRIED[:2], ended="unfinished", final=None))
    text = said.getvalue()
    assert "trainer.precision=bf16-mixed" in text
    assert "8.1 %" in text
    if terminal:
        assert "model.compile=true" in text
        assert f"{CELL.id}, 3.0 s" in text
    else:
        first, second = text.splitlines()
        of = "[9.5 min of 10 min] trainer.precision="
        assert first.startswith(f"{of}bf16-mixed: FASTER")
        assert "48.0 [46.5, 49.5]" in first
        assert second.startswith(f"{of}bf16-true: NUMERICS")
        assert "9.0 [7.5, 10.5]" in second

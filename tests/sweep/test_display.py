"""What is printed while a sweep runs, and at its end."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from by_hand import made_outcome, made_sweep_plan
from rich.console import Console
from stored_texts import assert_stored

from lm_profiler.record.sweep_files import Cell
from lm_profiler.sweep.display import Display, stage_of

CELLS = made_sweep_plan("a[b]", "b", "c", "d").cells


def display_of(
    cells: Sequence[Cell], ended_cells: int = 0, slots: int = 1, folder: Path = Path("nowhere"), **of: Any
) -> Display:
    return Display(cells, ended_cells, slots, folder, **of)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_than_on_a_terminal_each_cell_is_a_line() -> None:
    file = io.StringIO()
    display = display_of([*CELLS, *made_sweep_plan("e").cells], ended_cells=1, console=Console(file=file, width=40))
    with display.live_line():
        display.cell_begins(CELLS[0], None)
        display.cell_ends(CELLS[0], made_outcome("a[b]", "ok", 12.34))
        display.cell_begins(CELLS[1], None)
        display.cell_ends(CELLS[1], made_outcome("b", "failed", 75.0, "RuntimeError: [red]boom[/red]"))
    assert_stored("sweep/display: lines", {"two of five cells, after one": file.getvalue()})


def test_time_left_is_estimated_from_ended_cells() -> None:
    clock = Clock()
    display = display_of(CELLS, slots=2, console=Console(file=io.StringIO()), clock=clock)
    display.cell_begins(CELLS[0], "0")
    display.cell_begins(CELLS[1], "1")
    texts = {"none has ended": display.progress()}
    clock.now = 10.0
    display.cell_ends(CELLS[0], made_outcome("a[b]", "ok", 10.0))
    display.cell_begins(CELLS[2], "0")
    clock.now = 14.0
    # Three are left, of 10 s each; b has spent all of its 10 s, c 4 s of them; two run side by side.
    texts["one has ended, and two run side by side"] = display.progress()
    assert_stored("sweep/display: progress", texts)


def test_a_cell_longer_than_the_others_has_no_time_left() -> None:
    clock = Clock()
    display = display_of(CELLS[:2], console=Console(file=io.StringIO()), clock=clock)
    display.cell_ends(CELLS[0], made_outcome("a[b]", "ok", 10.0))
    display.cell_begins(CELLS[1], None)
    clock.now = 30.0
    assert "left" not in display.progress()


def test_refused_cells_do_not_count_for_the_time_left() -> None:
    display = display_of(CELLS, console=Console(file=io.StringIO()), clock=Clock())
    display.cell_ends(CELLS[0], made_outcome("a[b]", "refused", 1.0))
    assert "left" not in display.progress()
    display.cell_ends(CELLS[1], made_outcome("b", "ok", 10.0))
    assert "20.0 s" in display.progress()


REASON = "memory: expected at most the 22.6 GiB that are free, given 29.8 GiB before any activation; " * 3


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_what_runs_in_one_line_below_the_cells_that_have_ended(width: int, tmp_path: Path) -> None:
    cells, file = made_sweep_plan("size=2.7B,compile=true", "size=small,compile=false").cells, io.StringIO()
    (tmp_path / cells[1].id).mkdir()
    (tmp_path / cells[1].id / "output.txt").write_text("warm-up: 5 steps\nmeasuring: 20 steps\nthe user's print\n")
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    display = display_of(cells, folder=tmp_path, console=console, clock=lambda: 75.0)
    display.cell_begins(cells[1], "0")
    display.cell_ends(cells[0], made_outcome(cells[0].id, "refused", 75.4, REASON))
    ended = file.getvalue().split()
    assert ended[: ended.index("memory:")] == ["[1/2]", "refused", cells[0].id, "75.4", "s"]
    with console.capture() as shown:
        console.print(display._live.renderable)
    (line,) = shown.get().splitlines()
    assert len(line) <= width
    whole = "1 of 2 cells, 1 refused, 0 ms elapsed; measuring on 0: size=small,compile=false, 0 ms"
    assert line.endswith("…") or whole in line
    assert whole[:20] in line


@pytest.mark.parametrize("text,stage", [("", "starting"), ("tracing: 3 steps\n", "tracing"), ("tracing\n", "starting")])
def test_the_stage_of_a_running_cell_is_in_its_output(text: str, stage: str, tmp_path: Path) -> None:
    assert stage_of(tmp_path / "nothing") == "starting"
    (tmp_path / "output.txt").write_text(text)
    assert stage_of(tmp_path / "output.txt") == stage

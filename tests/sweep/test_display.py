"""What a person is told while a sweep runs, and at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from by_hand import plan
from rich.console import Console

from lm_profiler.record.sweep import CellOutcome, CellStatus
from lm_profiler.report.collection import Entry
from lm_profiler.sweep.display import Display, duration, print_end

CELLS = plan("a[b]", "b", "c", "d").cells


def outcome(cell: str, status: CellStatus, duration_s: float, reason: str | None = None) -> CellOutcome:
    return CellOutcome(
        cell=cell, status=status, reason=reason, run=None, ended="", duration_s=duration_s, exit_code=None
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_than_on_a_terminal_each_cell_is_a_line() -> None:
    file = io.StringIO()
    with Display(5, done=1, console=Console(file=file, width=40)) as display:
        display.began(CELLS[0], None)
        display.ended(CELLS[0], outcome("a[b]", "ok", 12.34))
        display.began(CELLS[1], None)
        display.ended(CELLS[1], outcome("b", "failed", 75.0, "RuntimeError: [red]boom[/red]"))
    assert file.getvalue().splitlines() == [
        "[2/5] ok       a[b]  12.3 s",
        "[3/5] failed   b  1:15  RuntimeError: [red]boom[/red]",
    ]


def test_time_left_is_told_from_the_cells_that_have_ended() -> None:
    clock = Clock()
    display = Display(4, slots=2, console=Console(file=io.StringIO()), clock=clock)
    display.began(CELLS[0], "0")
    display.began(CELLS[1], "1")
    assert display.progress() == "0 of 4 cells, 0.0 s gone"
    clock.now = 10.0
    display.ended(CELLS[0], outcome("a[b]", "ok", 10.0))
    display.began(CELLS[2], "0")
    clock.now = 14.0
    # Three are left, of 10 s each; b has spent all of its 10 s, c 4 s of them; two run side by side.
    assert display.progress() == "1 of 4 cells, 1 ok, 14.0 s gone, about 8.0 s left"
    unknown = Display(4, slots=None, console=Console(file=io.StringIO()), clock=clock)
    unknown.ended(CELLS[0], outcome("a[b]", "ok", 10.0))
    assert "left" not in unknown.progress()


def test_a_terminal_shows_what_runs_and_what_has_ended() -> None:
    file = io.StringIO()
    with Display(4, console=Console(file=file, force_terminal=True, width=100)) as display:
        display.began(CELLS[0], "0")
        display.ended(CELLS[0], outcome("a[b]", "oom", 1.0, "[/nothing] of a tag"))
        display.began(CELLS[1], "2,3")
    shown = file.getvalue()
    assert "running on 2,3" in shown
    assert "a[b]" in shown
    assert "[/nothing] of a tag" in shown
    assert "1 of 4 cells, 1 oom" in shown


def test_the_end_lists_every_cell_with_its_reason() -> None:
    file = io.StringIO()
    entries = [
        Entry(Path("s/a"), None, CELLS[0], outcome("a[b]", "timeout", 9.0, "ran longer than 9 s")),
        Entry(Path("s/b"), None, CELLS[1], None),
    ]
    print_end(entries, Console(file=file, width=100))
    lines = (line.split(maxsplit=2) for line in file.getvalue().splitlines())
    head, first, second = ([word.strip() for word in line] for line in lines)
    assert head == ["cell", "status", "reason"]
    assert first == ["a[b]", "timeout", "ran longer than 9 s"]
    assert second == ["b", "missing"]


@pytest.mark.parametrize("seconds,shown", [(0.04, "0.0 s"), (59.94, "59.9 s"), (75.4, "1:15"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown

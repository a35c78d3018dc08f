"""What a person is told while a sweep runs, and at its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from by_hand import plan
from rich.console import Console

from lm_profiler.record.collection import Entry
from lm_profiler.record.sweep import Cell, CellOutcome, CellStatus
from lm_profiler.sweep.display import Display, duration, print_end
from lm_profiler.sweep.lines import stage_of
from lm_profiler.sweep.plan import plan_of
from lm_profiler.sweep.request import Request

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
    with Display([*CELLS, *plan("e").cells], done=1, console=Console(file=file, width=40)) as display:
        display.began(CELLS[0], None)
        display.ended(CELLS[0], outcome("a[b]", "ok", 12.34))
        display.began(CELLS[1], None)
        display.ended(CELLS[1], outcome("b", "failed", 75.0, "RuntimeError: [red]boom[/red]"))
    assert file.getvalue().splitlines() == [
        "[2/5] ok       a[b]  12.3 s",
        "[3/5] failed   b  1:15  RuntimeError: [red]boom[/red]",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reason_is_no_order_to_the_terminal(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    with Display(CELLS, console=console) as display:
        display.ended(CELLS[1], outcome("b", "failed", 1.0, "RuntimeError: \x1b]0;owned\x07 \x1b[31mred"))
    assert r"RuntimeError: \x1b]0;owned\x07 \x1b[31mred" in file.getvalue()
    assert "\x1b]0;" not in file.getvalue()


def test_time_left_is_told_from_the_cells_that_have_ended() -> None:
    clock = Clock()
    display = Display(CELLS, slots=2, console=Console(file=io.StringIO()), clock=clock)
    display.began(CELLS[0], "0")
    display.began(CELLS[1], "1")
    assert display.progress() == "0 of 4 cells, 0.0 s gone"
    clock.now = 10.0
    display.ended(CELLS[0], outcome("a[b]", "ok", 10.0))
    display.began(CELLS[2], "0")
    clock.now = 14.0
    # Three are left, of 10 s each; b has spent all of its 10 s, c 4 s of them; two run side by side.
    assert display.progress() == "1 of 4 cells, 1 ok, 14.0 s gone, about 8.0 s left"
    unknown = Display(CELLS, slots=None, console=Console(file=io.StringIO()), clock=clock)
    unknown.ended(CELLS[0], outcome("a[b]", "ok", 10.0))
    assert "left" not in unknown.progress()


def test_a_cell_that_takes_longer_than_the_others_leaves_no_time_that_is_known() -> None:
    clock = Clock()
    display = Display(CELLS[:2], console=Console(file=io.StringIO()), clock=clock)
    display.ended(CELLS[0], outcome("a[b]", "ok", 10.0))
    display.began(CELLS[1], None)
    clock.now = 30.0
    assert display.progress() == "1 of 2 cells, 1 ok, 30.0 s gone"


def test_refusals_say_nothing_of_the_time_that_is_left() -> None:
    display = Display(CELLS, console=Console(file=io.StringIO()), clock=Clock())
    display.ended(CELLS[0], outcome("a[b]", "refused", 1.0))
    assert "left" not in display.progress()
    display.ended(CELLS[1], outcome("b", "ok", 10.0))
    assert display.progress().endswith("about 20.0 s left")


def wide() -> list[Cell]:
    """Cells as of a real sweep: eight options, long values."""
    values = {
        "model.size": ["2.7B", "small"],
        "model.compile": ["true", "false"],
        "model.compile_mode": ["max-autotune-no-cudagraphs", "reduce-overhead"],
        "trainer.precision": ["bf16-mixed", "32-true"],
        "data.context_length": ["16384", "128"],
        "model.activation_checkpointing": ["true", "false"],
        "model.float32_matmul_precision": ["highest", "medium"],
        "model.optimizer": ["adamw", "none"],
    }
    points = [{name: both[n] for name, both in values.items()} for n in (0, 1)]
    return [
        Cell(id=f"a-long-name-of-a-cell-{n}-{r}", overrides=point, repeat=r, arguments=[])
        for n, point in enumerate(points)
        for r in (0, 1)
    ]


REASON = "memory: expected at most the 22.6 GiB that are free, given 29.8 GiB before any activation; " * 3


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_shows_what_tells_cells_apart_and_a_reason_in_a_line_of_its_own(width: int, tmp_path: Path) -> None:
    cells, file = wide(), io.StringIO()
    (tmp_path / cells[1].id).mkdir()
    (tmp_path / cells[1].id / "output.txt").write_text("warm-up: 5 steps\nmeasuring: 20 steps\nthe user's print\n")
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    display = Display(cells, folder=tmp_path, console=console, clock=lambda: 75.0)
    display._live.start = lambda *_: None  # type: ignore[method-assign] - it would draw over itself
    display.tick = lambda: None  # type: ignore[method-assign]
    display.began(cells[1], "0")
    display.ended(cells[0], outcome(cells[0].id, "refused", 75.4, REASON))
    console.print(display._picture())
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    head, refused, reason, running, progress = lines
    assert head.startswith("status")
    assert head.endswith("time")
    assert refused.startswith("refused")
    assert refused.endswith("1:15")
    assert refused.split()[1] == "2.7B"
    assert reason.startswith("  memory: expected at most the 22.6 GiB")
    assert reason.endswith("…")
    assert running.startswith("measuring on 0")
    assert running.endswith("0.0 s")
    assert progress.startswith("1 of 4 cells, 1 refused")


def test_options_that_fit_are_told_whole() -> None:
    file = io.StringIO()
    cells = plan_of(Request(name="s", grid={"model.size": ["small", "xl"], "model.compile": ["true", "false"]})).cells
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    with Display(cells, console=console, clock=Clock()) as display:
        display.ended(cells[3], outcome(cells[3].id, "oom", 1.0, "[/nothing] of a tag"))
        display.began(cells[1], None)
    words = [line.split() for line in file.getvalue().splitlines()]
    assert ["oom", "xl", "false", "1.0", "s"] in words
    assert ["[/nothing]", "of", "a", "tag"] in words
    assert ["running", "small", "false", "0.0", "s"] in words


@pytest.mark.parametrize("said,stage", [("", "starting"), ("tracing: 3 steps\n", "tracing"), ("tracing\n", "starting")])
def test_a_running_cell_says_what_it_does_in_its_output(said: str, stage: str, tmp_path: Path) -> None:
    assert stage_of(tmp_path / "nothing") == "starting"
    (tmp_path / "output.txt").write_text(said)
    assert stage_of(tmp_path / "output.txt") == stage


@pytest.mark.parametrize("width", [80, 120])
def test_the_end_lists_every_cell_with_its_reason_below_it(width: int) -> None:
    file, cells = io.StringIO(), wide()
    entries = [
        Entry(Path("s/a"), None, cells[0], outcome(cells[0].id, "timeout", 9.0, "ran longer than 9 s")),
        Entry(Path("s/b"), None, cells[2], None),
    ]
    print_end(entries, Console(file=file, width=width, force_terminal=True, color_system=None))
    head, first, reason, second = file.getvalue().splitlines()
    assert all(len(line) <= width for line in (head, first, second))
    assert first.split()[:2] == ["timeout", "2.7B"]
    assert reason == "  ran longer than 9 s"
    assert second.split()[:3] == ["not", "run", "small"]


@pytest.mark.parametrize("seconds,shown", [(0.04, "0.0 s"), (59.94, "59.9 s"), (75.4, "1:15"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown

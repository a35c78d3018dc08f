"""The line that names the stage, on a terminal and elsewhere."""

from __future__ import annotations

import io

from lm_profiler.callbacks import StageOptions
from lm_profiler.callbacks.stages import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminals_line_is_drawn_over_itself_twice_a_second_at_most() -> None:
    out, seconds = Terminal(), Seconds()
    progress = Progress(StageOptions(measure_steps=20), out, seconds)
    for done in range(20):  # a step every eighth of a second
        progress.draw("measure", done, 20)
        seconds.now += 0.125
    lines = out.getvalue().split("\r\x1b[K")
    assert lines == ["", "measuring 1/20", "measuring 5/20", "measuring 9/20", "measuring 13/20", "measuring 17/20"]


def test_a_new_stage_is_shown_at_once() -> None:
    out, seconds = Terminal(), Seconds()
    progress = Progress(StageOptions(measure_steps=20), out, seconds)
    for stage in ("warmup", "measure", "collectives", "actions", "memory", "trace"):
        progress.draw(stage, 0, 3)
    lines = out.getvalue().split("\r\x1b[K")[1:]
    assert lines == [
        "warm-up 1/3",
        "measuring 1/3",
        "timing collectives 1/3",
        "timing actions 1/3",
        "reading memory 1/3",
        "tracing 1/3",
    ]


def test_the_line_is_left_empty() -> None:
    out = Terminal()
    progress = Progress(StageOptions(measure_steps=20), out, Seconds())
    progress.clear()
    assert out.getvalue() == ""
    progress.draw("warmup", 0, 3)
    progress.clear()
    assert out.getvalue().endswith("\r\x1b[K")


def test_a_notebook_draws_over_its_line_without_codes_of_terminals() -> None:
    out = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    progress = Progress(StageOptions(measure_steps=20), out, Seconds())
    for stage in ("warmup", "measure"):
        progress.draw(stage, 0, 3)
    progress.clear()
    shown = out.getvalue()
    assert "\x1b" not in shown
    assert "\n" not in shown
    over = shown.split("\r")
    assert [text for text in over if text.strip()] == ["warm-up 1/3", "measuring 1/3"]
    assert over[-1] == ""
    assert len(over[-2]) > len("timing collectives 1,000/1,000")  # blanks over what was there


def test_elsewhere_there_is_a_line_a_stage() -> None:
    out, seconds = io.StringIO(), Seconds()
    progress = Progress(StageOptions(measure_steps=20), out, seconds)
    for stage in ("warmup", "measure"):
        for done in range(3):
            progress.draw(stage, done, 3)
            seconds.now += 10
    progress.clear()
    assert [line.partition(":")[0] for line in out.getvalue().splitlines()] == ["warm-up", "measuring"]


def test_no_more_steps_are_counted_than_planned() -> None:
    out = Terminal()
    Progress(StageOptions(measure_steps=20), out, Seconds()).draw("measure", 3, 3)
    assert out.getvalue().endswith("measuring 3/3")


def test_a_stage_that_may_end_early_says_so() -> None:
    out = io.StringIO()
    progress = Progress(StageOptions(until_ci=0.01), out)
    for stage in ("warmup", "measure"):
        progress.draw(stage, 0, 5)
    assert "at most" in out.getvalue().splitlines()[-1]


def test_no_number_of_steps_is_promised_where_time_decides_it() -> None:
    elsewhere, terminal = io.StringIO(), Terminal()
    for out in (elsewhere, terminal):
        Progress(StageOptions(), out, Seconds()).draw("measure", 6, 5000)
    assert "5,000" not in elsewhere.getvalue()
    assert terminal.getvalue().endswith("measuring step 7")

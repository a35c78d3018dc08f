"""The line that names the stage, on a terminal and elsewhere."""

import io

from lm_profiler.callbacks import StageOptions
from lm_profiler.callbacks.stages import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Seconds:
    now = 0.0

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
    for stage in ("collectives", "actions", "memory", "trace"):  # a new one is shown at once
        progress.draw(stage, 0, 3)
    progress.draw("warmup", 3, 3)  # no more are counted than planned
    lines = out.getvalue().split("\r\x1b[K")[-5:]
    shown = ["timing collectives", "timing actions", "reading memory", "tracing", "warm-up"]
    assert lines == [f"{text} {step}/3" for text, step in zip(shown, (1, 1, 1, 1, 3), strict=True)]
    progress.clear()  # the line is left empty
    assert out.getvalue().endswith("\r\x1b[K")


def test_a_notebook_redraws_its_line_without_terminal_codes() -> None:
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

"""The time of parts that a program marks, on clocks that the test sets."""

from contextlib import suppress
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_loop import SimulatedClock
from made_runs import made_record

import lm_profiler
from lm_profiler.callbacks.instruments.part_times import PartTimes
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.code_parts import time_parts
from lm_profiler.record.run_record import CodePart
from lm_profiler.report.run.sections import phase_table


class Clock(SimulatedClock):
    """Nanoseconds that the test sets; the device is twice as fast as the host believes."""

    def stream(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.now_ns,
            reached=lambda event: True,
            seconds=lambda begin, end: (end - begin) * 0.5e-9,
            release=lambda events: None,
        )


def step(clock: Clock, timeline: Timeline, origin_ns: int, loss_ns: int) -> None:
    """Forward with the part ``loss`` from 100 to 600; backward with a part ``penalty`` of 5; 1,000 in all."""

    def at_ns(now_ns: int) -> None:
        clock.now_ns = origin_ns + now_ns

    at_ns(0)
    timeline.mark(at.DATA)
    at_ns(100)
    timeline.mark(at.LEAVE)
    timeline.mark(at.FORWARD)
    at_ns(200)
    with lm_profiler.part("loss"):
        at_ns(200 + loss_ns)
    at_ns(600)
    timeline.mark(at.LEAVE)
    timeline.mark(at.BACKWARD)
    with suppress(KeyError), lm_profiler.part("penalty"):
        at_ns(605)
        raise KeyError  # a part ends with an error too
    at_ns(900)
    timeline.mark(at.LEAVE)
    timeline.mark(at.END)
    at_ns(950)
    with lm_profiler.part("loss"):  # of a validation
        at_ns(980)


@pytest.mark.parametrize("on_device", [False, True])
def test_each_part_has_its_mean_time_and_first_phase(on_device: bool) -> None:
    clock = Clock()
    timeline = Timeline(clock=clock, stream=clock.stream() if on_device else None)
    parts = PartTimes(timeline)
    step(clock, timeline, 0, 100)  # before the stage: nothing hears of it
    timeline.reading().finished.clear()
    parts.begin("warmup")
    parts.begin("measure")
    step(clock, timeline, 1_000, 50)
    step(clock, timeline, 2_000, 150)
    other = Thread(target=lambda: lm_profiler.part("loss").__enter__())
    other.start()
    other.join()
    for marks in timeline.reading().finished:
        parts.keep(marks)
    parts.end("measure")
    unit_s = 0.5e-9 if on_device else 1e-9
    found = {(part.name, part.phase): (part.seconds, part.calls) for part in parts.facts["code_parts"]}
    assert found == {
        ("loss", "forward"): (pytest.approx(100 * unit_s), 1),
        ("penalty", "backward"): (pytest.approx(5 * unit_s), 1),
    }
    waiting = len(parts._spans)
    step(clock, timeline, 3_000, 77)  # after the stage nothing hears of it
    assert len(parts._spans) == waiting == 1


def test_parts_cause_no_recompilation() -> None:
    frames = 0

    def counting(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal frames
        frames += 1
        return module.forward

    def loss(x: torch.Tensor) -> torch.Tensor:
        with lm_profiler.part("loss"):
            return (x * x).sum()

    compiled = torch.compile(loss, backend=counting, fullgraph=True)
    parts = PartTimes(Timeline())
    x = torch.ones(3)
    compiled(x)
    parts.begin("measure")
    assert compiled(x) == 3
    assert not parts._spans
    time_parts(None)
    compiled(x)
    assert frames == 1


def test_a_part_is_a_row_below_its_phase() -> None:
    loss = CodePart(name="loss", phase="forward", seconds=0.5e-3, calls=1)
    table = phase_table(made_record(code_parts=[loss]))
    titles = [row[0].text.strip() for row in table.rows]
    assert titles == ["forward", "of which loss", "backward", "other", "forward + backward", "step"]
    [row] = [row for row in table.rows if "loss" in row[0].text]
    assert [row[1].text, row[5].text] == ["0.500", "5.0%"]
    assert {len(row) for row in table.rows} == {len(table.headings)}

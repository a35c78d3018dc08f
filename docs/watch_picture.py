"""Draws what `lm_profiler watch` shows of a day: `python docs/watch_picture.py` writes docs/images/watch.svg.

The steps are made up (a second each, 6 % slower in `data` for three hours); files, events and tables are the tool's.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from lm_profiler.analysis.watch.ledger import CHECKPOINTS, VALIDATION, Ledger, NamedSpan
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.callbacks import watch_writer
from lm_profiler.callbacks.instruments.profiling_options import WatchOptions
from lm_profiler.callbacks.watch_writer import HandOver, WatchWriter
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.report.run.watch_tables import watch_tables
from lm_profiler.report.tables.formats import lines

WIDTH = 118  # characters of a line
STEPS = 80_000
STEPS_TOGETHER = 20  # steps of one hand-over
PHASE_SECONDS = {
    at.DATA: 0.05,
    at.TRANSFER: 0.01,
    at.FORWARD: 0.32,
    at.BACKWARD: 0.52,
    at.OPTIMIZER: 0.06,
}
OTHER_S = 0.04
BUSY_STEPS = range(41_000, 52_000)  # the file system is busy
BUSY_S = 0.06
STALLED_STEPS = (23_456, 61_234)
STALL_S = 4.0
CHECKPOINT_STEPS, CHECKPOINT_S = (
    17_000,
    25.0,
)  # from one checkpoint to the next, and how long it takes
LONG_CHECKPOINT_STEP, LONG_CHECKPOINT_S = 68_000, 75.0
VALIDATION_STEPS, VALIDATION_S = 10_000, 240.0
HELD_BYTES, GROWTH_BYTES_PER_HOUR = 22 * 2**30, 0.15 * 2**30
FREE_BYTES = 40 * 2**30
BEGAN_S = 1_764_050_400.0  # six in the morning, in seconds since 1970


class SimulatedDay:
    """A rank whose fit begins at six in the morning: its clock moves only where a method says so."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 0
        self.random = np.random.default_rng(1)
        self.timeline = Timeline(lambda: self.now_ns)
        self.spans: list[NamedSpan] = []
        self.writer = WatchWriter(
            folder=folder,
            rank=0,
            world_size=1,
            timeline=self.timeline,
            run=WatchedRun(workers=4, epoch_s=BEGAN_S),
            ledger=Ledger(0),
            options=WatchOptions(traces=False),
            report=print,
            device=torch.device("cpu"),
        )

    def train(self) -> None:
        """Write the files of all steps; the last step is in its backward pass."""
        for step in range(1, STEPS):
            self.take_step(step)
            if step % STEPS_TOGETHER == 0:
                self.hand_over(step)
        self.hand_over(STEPS - 1)
        for code in (at.DATA, at.LEAVE, at.BACKWARD):
            self.timeline.mark(code)
        self.writer.take(
            HandOver(self.now_ns, held_bytes=self.held_bytes(), global_step=STEPS - 1)
        )

    def take_step(self, step: int) -> None:
        for code, usual_s in PHASE_SECONDS.items():
            self.timeline.mark(code)
            self.wait(usual_s * np.exp(0.01 * self.random.standard_normal()))
            if code == at.DATA and step in BUSY_STEPS:
                self.wait(BUSY_S)
            if code == at.DATA and step in STALLED_STEPS:
                self.wait(STALL_S)
            self.timeline.mark(at.LEAVE)
        self.wait(OTHER_S)
        if step == LONG_CHECKPOINT_STEP:
            self.pass_span(CHECKPOINTS, LONG_CHECKPOINT_S)
        elif step % CHECKPOINT_STEPS == 0:
            self.pass_span(CHECKPOINTS, CHECKPOINT_S)
        if step % VALIDATION_STEPS == 0:
            self.timeline.go_outside(VALIDATION)
            self.spans.append(NamedSpan(self.now_ns, self.now_ns, VALIDATION))
            self.pass_span(VALIDATION, VALIDATION_S)
            self.timeline.mark(at.DATA)
            self.timeline.mark(at.LEAVE)
        self.timeline.mark(at.END)

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def pass_span(self, name: str, seconds: float) -> None:
        begin_ns = self.now_ns
        self.wait(seconds)
        self.spans.append(NamedSpan(begin_ns, self.now_ns, name))

    def held_bytes(self) -> int:
        hours = self.now_ns * 1e-9 / 3600
        return HELD_BYTES + round(GROWTH_BYTES_PER_HOUR * hours)

    def hand_over(self, step: int) -> None:
        spans = self.spans
        self.spans = []
        marks = self.timeline.take_marks()
        self.writer.take(
            HandOver(
                self.now_ns,
                marks,
                spans=spans,
                held_bytes=self.held_bytes(),
                global_step=step,
            )
        )


def draw(file: Path) -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    watch_writer.usable_bytes = lambda device: FREE_BYTES
    printed_lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        SimulatedDay(Path(name)).train()
        for table in watch_tables(Path(name)):
            printed_lines += [*lines(table, WIDTH, True), ""]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(printed_lines)))
    svg = console.export_svg(
        title="lm_profiler watch logs/demo/version_0", unique_id="watch"
    )
    file.write_text(
        re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    )  # fonts from elsewhere


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "watch.svg")

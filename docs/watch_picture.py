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
from lm_profiler.callbacks.watch_writer import Handed, WatchWriter
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.report.run.watch_tables import watch_tables
from lm_profiler.report.tables.formats import lines

WIDTH, STEPS, S = 118, 80_000, 1_000_000_000
PARTS = {at.DATA: 0.05, at.TRANSFER: 0.01, at.FORWARD: 0.32, at.BACKWARD: 0.52, at.OPTIMIZER: 0.06}
SLOW = range(41_000, 52_000)  # the file system is busy
EVERY_SAVED, SAVED_S, EVERY_VALIDATED, VALIDATED_S = 17_000, 25, 10_000, 240


def simulate(folder: Path) -> None:
    """Write the files of a rank whose fit begins at six in the morning."""
    rng, now_ns = np.random.default_rng(1), 0
    run = WatchedRun(workers=4, epoch_s=1_764_050_400.0)
    timeline = Timeline(lambda: now_ns)
    writer = WatchWriter(folder, 0, 1, timeline, run, Ledger(0), WatchOptions(traces=False), print, torch.device("cpu"))
    for first in range(1, STEPS, 20):
        spans = []
        for step in range(first, first + 20):
            for code, usual_s in PARTS.items():
                timeline.mark(code)
                slower_s = 0.06 * (code == at.DATA and step in SLOW) + 4.0 * (
                    code == at.DATA and step in (23_456, 61_234)
                )
                now_ns += round((usual_s * np.exp(0.01 * rng.standard_normal()) + slower_s) * S)
                timeline.mark(at.LEAVE)
            now_ns += S // 25
            if step % EVERY_SAVED == 0:
                seconds = SAVED_S * (3 if step == 68_000 else 1)
                spans.append(NamedSpan(now_ns, now_ns + seconds * S, CHECKPOINTS))
                now_ns += seconds * S
            if step % EVERY_VALIDATED == 0:
                timeline.go_outside(VALIDATION)
                spans += [
                    NamedSpan(now_ns, now_ns, VALIDATION),
                    NamedSpan(now_ns, now_ns + VALIDATED_S * S, VALIDATION),
                ]
                now_ns += VALIDATED_S * S
                timeline.mark(at.DATA)
                timeline.mark(at.LEAVE)
            timeline.mark(at.END)
        held = 22 * 2**30 + round(0.15 * 2**30 * now_ns / (3600 * S))
        writer.take(Handed(now_ns, timeline.take(), spans=spans, held_bytes=held, global_step=first + 19))
    timeline.mark(at.DATA)
    timeline.mark(at.LEAVE)
    timeline.mark(at.BACKWARD)
    writer._status(now_ns)


def draw(file: Path) -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    watch_writer._free_bytes = lambda device: 40 * 2**30
    with tempfile.TemporaryDirectory() as name:
        simulate(Path(name))
        shown = [line for table in watch_tables(Path(name)) for line in (*lines(table, WIDTH, True), "")]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(shown)))
    svg = console.export_svg(title="lm_profiler watch logs/demo/version_0", unique_id="watch")
    file.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL))  # fonts from elsewhere


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "watch.svg")

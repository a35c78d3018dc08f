"""Records of steps made by hand, through the code that makes every record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from known_loop import trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel

from lm_profiler.callbacks.launch import Launch
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.outcome.afterwards import LateFacts
from lm_profiler.callbacks.outcome.recorder import Recorder
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import Flops, RunRecord, read_run
from lm_profiler.record.steps import StepRow
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.formats import render

LEVEL = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.0, 10.1, 9.9, 10.0, 10.2, 9.8, 10.0, 10.1, 9.9, 10.0]


FLOPS = Flops(forward=100, backward=200, recomputation=60)


def recorded(
    folder: Path,
    step_ms: Sequence[float],
    hardware: LateFacts | None = None,
    peak_flops_per_s: float | None = None,
    **found: Any,
) -> RunRecord:
    """The record of measured steps of ``step_ms``, all of it forward."""
    trainer = trainer_with([], folder)
    trainer.strategy.connect(BoringModel())
    rows = []
    for step, ms in enumerate(step_ms, 1):
        seconds = (*(ms * 1e-3 if part == "forward" else 0.0 for part in PARTS), ms * 1e-3)
        rows.append(StepRow(step, "measure", seconds, seconds))
    values = {"part_peaks": {}, "between_steps_s": 0.0, "device_idle": None, "recompilations": 0, "notes": ()}
    measured = Measured(rows=rows, planned={"measure": len(rows)}, **{**values, **found})
    recorder = Recorder(folder, Launch(), trainer, "fit", peak_flops_per_s)
    recorder.complete(measured, recorder.first(measured, "ok", None), hardware or LateFacts())
    return read_run(folder)


def lines(record: RunRecord, verbose: bool = False) -> dict[str, list[str]]:
    """What the terminal says at the run's end, by the line's first word."""
    said: dict[str, list[str]] = {}
    for line in render(end_tables(record, Path("/logs"), verbose), "terminal").splitlines():
        first, _, rest = line.partition(" ")
        said.setdefault(first, []).append(rest)
    return said

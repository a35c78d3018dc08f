"""Which of a run's steps are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lm_profiler.improve.cells import RanCell
from lm_profiler.improve.ran import ran
from lm_profiler.record.entry import Entry
from lm_profiler.record.steps import write_steps
from lm_profiler.record.sweep import CellOutcome
from tests.support.made_runs import made_record, made_rows


@pytest.mark.parametrize(
    "workers,counted_from",
    [
        (0, 6),  # the first that is measured
        (2, 6),  # what is made ahead ends in the warm-up
        (4, 10),
        (8, 18),
        (40, 21),  # a quarter of them at least
    ],
)
def test_steps_whose_batches_were_made_ahead_do_not_count(tmp_path: Path, workers: int, counted_from: int) -> None:
    record = made_record({"data.num_workers": str(workers)})
    rows = [replace(row, seconds=(*row.seconds[:-1], float(row.step))) for row in made_rows() if row.seconds]
    write_steps(tmp_path / "steps.csv", rows)
    step = record.time["step"].model_copy(update={"mean": sum(range(6, 26)) / 20})
    record = record.model_copy(update={"time": {**record.time, "step": step}})
    outcome = CellOutcome(cell="it", status="ok", reason=None, run="it", ended="", duration_s=1.0, exit_code=0)
    told = ran(RanCell(Entry(tmp_path, record), outcome, 1.0), record)
    assert told.seconds == pytest.approx((counted_from + 25) / 2)

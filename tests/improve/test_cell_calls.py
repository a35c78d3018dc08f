"""The calls of cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_profiler.improve.cell_calls import timed_cell, warm_up
from lm_profiler.record.run import LoaderFacts
from tests.improve.test_ran import MODEL
from tests.support.made_runs import made_record


@pytest.mark.parametrize(
    "options,ahead,steps",
    [
        ({}, 0, None),
        ({"data.num_workers": "2"}, 0, None),  # five steps of two batches are enough
        ({"data.num_workers": "8"}, 0, 9),
        ({"loader.num_workers": "1"}, 14, 8),  # what the data has by itself
        ({"model.num_workers": "some"}, None, None),
    ],
)
def test_what_workers_make_ahead_is_used_up_while_the_run_warms_up(
    options: dict[str, str], ahead: int | None, steps: int | None
) -> None:
    loader = LoaderFacts(workers=0, ahead=ahead, ready_before=0, ready_after=0)
    facts: dict[str, Any] = {"model": MODEL, "loader": loader, "steps_planned": {"warmup": 5}}
    cell = timed_cell(Path("it"), ["fit"], options, 3, warm_up(options, made_record(**facts)))
    told = [word for word in cell.arguments if word.startswith("--stages")]
    assert told == ([] if steps is None else [f"--stages.warmup_steps={steps}"])
    assert cell.overrides == options

"""The calls of cells, and how long a step of one takes."""

from pathlib import Path
from typing import Any

import pytest
from by_hand import outcome
from tests.support.made_parts import made_model
from tests.support.made_runs import made_record

from lm_profiler.improve.cells import CellCalls, FinishedCell
from lm_profiler.improve.tolerance import SizeDifference, size_difference
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import LoaderFacts, RunRecord

OK = outcome("it", "ok", 1.0, run="it", exit_code=0)
MODEL = made_model(accumulate_grad_batches=2)


@pytest.mark.parametrize(
    "size,batches,other",
    [
        (4, 2, None),
        (2, 4, None),
        (2, 2, ("samples", 8, 4)),
        (4, 1, ("samples", 8, 4)),
        (None, 2, None),
        (None, 1, ("batches", 2, 1)),
    ],
)
def test_uncounted_samples_are_known_by_options(size: int | None, batches: int, other: tuple[str, int, int] | None):
    def record(size: int | None, batches: int) -> RunRecord:
        model = MODEL.model_copy(update={"accumulate_grad_batches": batches})
        data = {} if size is None else {"batch_size": size}
        return made_record(model=model, throughput=None, config={"data": {"init_args": data}})

    a, b = record(4 if size else None, 2), record(size, batches)
    difference = None if other is None else SizeDifference(*other)
    assert size_difference(a, b) == difference
    step = FinishedCell(Entry(Path(), b), OK, 1.0).timed_run(a).step_s
    assert step == pytest.approx(b.time["step"].mean * (other[1] / other[2] if other else 1.0))  # type: ignore[operator]


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
def test_warm_up_uses_up_prefetched_batches(options: dict[str, str], ahead: int | None, steps: int | None):
    loader = LoaderFacts(workers=0, ahead=ahead, ready_before=0, ready_after=0)
    facts: dict[str, Any] = {"model": MODEL, "loader": loader, "steps_planned": {"warmup": 5}}
    cell = CellCalls(Path("it"), ["fit"], made_record(**facts)).time(options, 3)
    stage_options = [word for word in cell.arguments if word.startswith("--stages")]
    assert stage_options == ([] if steps is None else [f"--stages.warmup_steps={steps}"])
    assert cell.overrides == options

"""The calls of cells, and how long a step of one takes."""

from pathlib import Path
from typing import Any

import pytest
from by_hand import made_outcome
from tests.support.made_parts import made_model
from tests.support.made_runs import made_record

from lm_profiler.improve.cells import CellCalls, FinishedCell
from lm_profiler.improve.tolerance import SizeDifference, size_difference
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import LoaderFacts, RunRecord

OK = made_outcome("it", "ok", 1.0, run="it", exit_code=0)
MODEL = made_model(accumulate_grad_batches=2)


@pytest.mark.parametrize(
    "size, batches, difference, factor",
    [
        (4, 2, None, 1),
        (2, 4, None, 1),
        (2, 2, SizeDifference("samples", 8, 4), 2),
        (4, 1, SizeDifference("samples", 8, 4), 2),
    ],
)
def test_uncounted_samples_are_known_by_options(
    size: int, batches: int, difference: SizeDifference | None, factor: int
) -> None:
    """A step of the first run has two batches of four samples; with half of them it counts twice."""
    assert_compared(record_of_batches(4, 2), record_of_batches(size, batches), difference, factor)


@pytest.mark.parametrize("batches, difference, factor", [(2, None, 1), (1, SizeDifference("batches", 2, 1), 2)])
def test_without_a_size_batches_are_compared(batches: int, difference: SizeDifference | None, factor: int) -> None:
    assert_compared(record_of_batches(None, 2), record_of_batches(None, batches), difference, factor)


def record_of_batches(size: int | None, batches: int) -> RunRecord:
    model = MODEL.model_copy(update={"accumulate_grad_batches": batches})
    data = {} if size is None else {"batch_size": size}
    return made_record(model=model, throughput=None, config={"data": {"init_args": data}})


def assert_compared(a: RunRecord, b: RunRecord, difference: SizeDifference | None, factor: int) -> None:
    """A step of B counts ``factor`` times, as so many of them process what one of A does."""
    assert size_difference(a, b) == difference
    step_s = FinishedCell(Entry(Path(), b), OK, 1.0).timed_run(a).step_s
    assert step_s == pytest.approx(factor * b.time["step"].mean)


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

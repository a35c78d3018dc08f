"""What a step is told to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm_profiler.improve.ran import MemorySeen, RanCell, other_step, ran
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import Failure, LoaderFacts, ModelFacts, OutOfMemory, PlannedMemory, RunRecord
from lm_profiler.record.steps import write_steps
from lm_profiler.record.sweep import CellOutcome
from tests.support.made_runs import made_record, made_rows

OK = CellOutcome(cell="it", status="ok", reason=None, run="it", ended="", duration_s=1.0, exit_code=0)
MODEL = ModelFacts(
    class_path="mine.Module", parameters=1, parameters_without_embedding=None, trainable_parameters=1, bytes=4,
    precision="32-true", optimizers=[], accumulate_grad_batches=2,
)  # fmt: skip


@pytest.mark.parametrize(
    "before,after,seconds",
    [
        (0, 0, 0.01),
        (3, 8, 0.01),  # the queue grows: the loop is the slower one
        (None, None, 0.01),
        (8, 0, 0.01 * 40 / 34),  # of the 20 steps' 40 batches 32 were made meanwhile, and four were begun
        (34, 0, 0.01 * 40 / 8),
        (35, 0, None),
    ],
)
def test_steps_that_lived_on_batches_made_before_count_as_long_as_their_workers_take(
    tmp_path: Path, before: int | None, after: int | None, seconds: float | None
) -> None:
    write_steps(tmp_path / "steps.csv", [replace(row, seconds=(*[0.0] * 8, 0.01)) for row in made_rows()])
    record = made_record(model=MODEL, loader=LoaderFacts(workers=4, ahead=8, ready_before=before, ready_after=after))
    step = record.time["step"].model_copy(update={"mean": 0.01})
    record = record.model_copy(update={"time": {**record.time, "step": step}})
    told = ran(RanCell(Entry(tmp_path, record), OK, 1.0), record)
    assert told.seconds == (None if seconds is None else pytest.approx(seconds))
    if seconds is None:
        assert "35 of" in told.failed
        assert "4 workers" in told.failed
        assert "--stages.measure_steps" in told.failed


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
def test_where_nobody_can_count_samples_the_options_tell_of_another_batch(
    size: int | None, batches: int, other: tuple[str, int, int] | None
) -> None:
    def record(size: int | None, batches: int) -> RunRecord:
        model = MODEL.model_copy(update={"accumulate_grad_batches": batches})
        data = {} if size is None else {"batch_size": size}
        return made_record(model=model, throughput=None, config={"data": {"init_args": data}})

    a, b = record(4 if size else None, 2), record(size, batches)
    assert other_step(a, b) == other
    step = ran(RanCell(Entry(Path(), b), OK, 1.0), a).seconds
    assert step == pytest.approx(b.time["step"].mean * (other[1] / other[2] if other else 1.0))  # type: ignore[operator]


GIB = 2**30


def ended(status: Any, record: RunRecord | None = None) -> RanCell:
    outcome = CellOutcome(cell="it", status=status, reason=None, run=None, ended="", duration_s=1.0, exit_code=1)
    return RanCell(Entry(Path("it"), record), outcome, 1.0)


def planned(status: Any, needed: int, free: int) -> RunRecord:
    record = made_record() if status == "ok" else made_record(status=status)
    return record.model_copy(update={"planned": PlannedMemory(peaks={"forward": needed}, available=free)})


def out_of_memory(allocated: int, requested: int) -> RunRecord:
    said = OutOfMemory(requested=requested, free=0, total=80 * GIB, allocated=allocated, fragmented=0, allowed=None)
    failure = Failure(phase="forward", step=1, type="OutOfMemoryError", message="", out_of_memory=said)
    return made_record(status="oom").model_copy(update={"failure": failure})


@pytest.mark.parametrize(
    "setting,done,passing",
    [
        ("first", ended("refused", planned("refused", 9 * GIB, 1 * GIB)), True),  # it ran before
        ("first", ended("oom"), True),
        ("first", ended("interrupted"), True),
        ("first", ended("failed"), False),
        ("first", ended("timeout"), False),
        ("other", ended("refused", planned("refused", 9 * GIB, 1 * GIB)), True),  # as much was free before
        ("other", ended("refused", planned("refused", 11 * GIB, 1 * GIB)), False),
        ("other", ended("oom", out_of_memory(8 * GIB, 1 * GIB)), True),
        ("other", ended("oom", out_of_memory(9 * GIB, 2 * GIB)), False),
        ("other", ended("oom"), False),  # nobody knows how much it needs
        ("other", ended("interrupted", planned("interrupted", 1 * GIB, 1 * GIB)), False),
    ],
)
def test_a_shortage_passes_where_as_much_was_free_before(setting: str, done: RanCell, passing: bool) -> None:
    seen = MemorySeen()
    seen.saw("first", ended("ok", planned("ok", 2 * GIB, 10 * GIB)))
    assert seen.is_passing(setting, done) is passing


def test_of_the_first_run_nobody_knows_better_unless_the_device_is_too_small() -> None:
    refused = planned("refused", 9 * GIB, 1 * GIB)
    assert MemorySeen().is_passing("first", ended("refused", refused))
    environment = made_record().environment
    assert environment is not None
    small = refused.model_copy(update={"environment": environment.model_copy(update={"device_bytes": 8 * GIB})})
    assert not MemorySeen().is_passing("first", ended("refused", small))

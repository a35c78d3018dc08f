"""Memory that is short for a moment, and memory that is too little ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_profiler.improve.ran import RanCell
from lm_profiler.improve.shortage import MemorySeen
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import Failure, OutOfMemory, PlannedMemory, RunRecord
from lm_profiler.record.sweep import CellOutcome
from tests.support.made_runs import made_record

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

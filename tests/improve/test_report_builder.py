"""What a search is recorded as."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.improve.trials import Improvement
from lm_profiler.improve.improve_request import ImproveRequest
from lm_profiler.improve.report_builder import Account


@pytest.mark.parametrize("shared, notes", [(0, []), (3, ["3 of 5 runs shared the machine with something else"])])
def test_runs_that_shared_the_machine_are_told(shared: int, notes: list[str]) -> None:
    record = Account(ImproveRequest(config="demo"), "now").record(Improvement(), "done", 5, shared)
    assert [note.partition(",")[0] for note in record.notes] == notes

"""What the record says of batches that workers had made before."""

from __future__ import annotations

import pytest

from lm_profiler.callbacks.outcome.facts import made_ahead_notes
from lm_profiler.record.run import LoaderFacts
from tests.support.made_runs import made_rows

STEPS = [row for row in made_rows() if row.stage == "measure"]  # of 10 ms each


BEFORE = "of the 20 batches that were measured had been made before by the loader's workers: "


@pytest.mark.parametrize(
    "workers,before,told",
    [
        (4, 4, None),  # each may just have made one
        (4, 8, "in the long run a step takes about 14.3 ms, not 10 ms"),
        (4, 16, "what it takes in the long run is unknown, for those that were made meanwhile are too few"),
        (0, 0, None),
        (None, None, None),
    ],
)
def test_steps_that_lived_on_batches_made_before_are_told(
    workers: int | None, before: int | None, told: str | None
) -> None:
    loader = LoaderFacts(workers=workers, ahead=before, ready_before=before, ready_after=before and 0)
    assert made_ahead_notes(loader, STEPS, 1) == ([] if told is None else [f"{before} {BEFORE}{told}"])
    assert made_ahead_notes(None, STEPS, 1) == []

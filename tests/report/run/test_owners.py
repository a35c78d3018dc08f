"""The line that says whose ``other`` is."""

from __future__ import annotations

from made_runs import made_record
from stored_texts import assert_stored

from lm_profiler.record.run import OtherByOwner, OwnedTime
from lm_profiler.report.run.owners import other_lines


def owned(measured_s: float | None, *actions: tuple[str, str, float, int]) -> OtherByOwner:
    rows = [OwnedTime(owner=o, action=a, seconds=s, calls=1.0, in_steps=n) for o, a, s, n in actions]
    return OtherByOwner(steps=3, seconds=sum(row.seconds for row in rows), measured_s=measured_s, actions=rows)


ACTIONS = (
    ("LearningRateMonitor", "on_train_batch_start", 1.9e-3, 3),
    ("TensorBoardLogger", "log_metrics", 1.2e-3, 1),
    ("Lightning", "loop", 0.5e-3, 3),
    ("", "my block", 0.4e-3, 3),
    ("lm_profiler", "timing of these", 0.2e-3, 3),
    ("Mine", "on_train_batch_end", 0.1e-3, 3),
)


CASES = {
    "the longest are named, and the rest is added up": made_record(other_by_owner=owned(4.1e-3, *ACTIONS)),
    # The table's figures are of the mean over ranks: these need not agree with them.
    "of several ranks it is of the first": made_record(
        rank_step_s=[0.01, 0.01], other_by_owner=owned(4.1e-3, *ACTIONS)
    ),
    "what was measured is unknown": made_record(other_by_owner=owned(None, *ACTIONS[2:4])),
    "nothing was timed": made_record(),
    "no action was seen": made_record(other_by_owner=owned(1.0)),
}


def test_the_line_is_as_stored() -> None:
    assert_stored("report/other", {case: other_lines(record) for case, record in CASES.items()})

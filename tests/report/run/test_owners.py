"""The line that says whose ``other`` is."""

from __future__ import annotations

import pytest
from made_runs import made_record

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


def test_the_longest_are_named_and_the_rest_is_added_up() -> None:
    record = made_record().model_copy(update={"other_by_owner": owned(4.1e-3, *ACTIONS)})
    [line] = other_lines(record)
    total, _, actions = line.rpartition(" timed: ")
    assert total == "other: 4.10 ms, 4.30 ms while each action of 3 steps was"
    assert actions.split(", ") == [
        "LearningRateMonitor.on_train_batch_start 1.90",
        "TensorBoardLogger.log_metrics 1.20 (in 1 of 3 steps)",
        "Lightning's loop 0.500",
        "my block 0.400",
        "2 more 0.300",
    ]


def test_of_several_ranks_it_is_said_to_be_of_the_first() -> None:
    """The table's figures are of the mean over ranks: these need not agree with them."""
    record = made_record(rank_step_s=[0.01, 0.01]).model_copy(update={"other_by_owner": owned(4.1e-3, *ACTIONS)})
    [line] = other_lines(record)
    assert line.startswith("other of rank 0: 4.10 ms, 4.30 ms while")


def test_what_was_measured_is_left_out_where_it_is_unknown() -> None:
    record = made_record().model_copy(update={"other_by_owner": owned(None, *ACTIONS[2:4])})
    assert other_lines(record) == [
        "other: 0.900 ms while each action of 3 steps was timed: Lightning's loop 0.500, my block 0.400"
    ]


@pytest.mark.parametrize("known", [None, owned(1.0)])
def test_nothing_is_said_where_nothing_was_timed(known: OtherByOwner | None) -> None:
    assert other_lines(made_record().model_copy(update={"other_by_owner": known})) == []
